"""A gRPC server with every limit set, and binding that explains itself."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from service_kit.addresses import WILDCARDS, bind_sockets, listened_on
from service_kit.errors import ConfigError, DeadlineExceeded
from service_kit.grpc_errors import ErrorInterceptor
from service_kit.grpc_health import WATCHES_MAX, AtMost, HealthStatus

MIB: Final = 1 << 20
# Who lists services is done in less.
REFLECTION_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one server takes.

    `connection_age_s_max` makes clients reconnect, so that load spreads over new servers; open
    streams outlive it.

    Calls that arrive faster than they are begun wait in a backlog, also after they were reset. Near
    its end gRPC refuses calls at random, with CANCELLED, whoever makes them; so the backlog holds
    what several connections may have outstanding, and no single one can fill it (CVE-2023-44487).
    """

    message_in_bytes_max: int = 4 * MIB
    message_out_bytes_max: int = 16 * MIB
    metadata_bytes_max: int = 16 << 10
    rpcs_max: int | None = None
    # Of one message and the messages in it; for clients that are not trusted.
    records_max: int | None = None
    connection_streams_max: int = 1024
    backlog_rpcs_max: int = 4096
    keepalive_ms: int = 20_000
    keepalive_timeout_ms: int = 10_000
    # Whoever connects and then says nothing; left alone two minutes.
    handshake_ms_max: int = 10_000
    # Clients that ping more often than this are told to go away.
    client_ping_ms_min: int = 500
    connection_age_s_max: int | None = 1800


def channel_options(limits: ServerLimits) -> list[tuple[str, int]]:
    """The limits in gRPC's own words."""
    options = [
        ("grpc.max_receive_message_length", limits.message_in_bytes_max),
        ("grpc.max_send_message_length", limits.message_out_bytes_max),
        # The soft limit refuses at random above it, so both are the same: a sharp edge.
        ("grpc.max_metadata_size", limits.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes_max),
        ("grpc.keepalive_time_ms", limits.keepalive_ms),
        ("grpc.keepalive_timeout_ms", limits.keepalive_timeout_ms),
        # The timeout that really ends a connection; left alone it is a minute.
        ("grpc.http2.ping_timeout_ms", limits.keepalive_timeout_ms),
        ("grpc.server_handshake_timeout_ms", limits.handshake_ms_max),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", limits.client_ping_ms_min),
        ("grpc.max_concurrent_streams", limits.connection_streams_max),
        ("grpc.server.max_pending_requests", limits.backlog_rpcs_max),
        ("grpc.server.max_pending_requests_hard_limit", 2 * limits.backlog_rpcs_max),
        # Two processes sharing a port by accident would each get half of the requests.
        ("grpc.so_reuseport", 0),
    ]
    if limits.connection_age_s_max is not None:
        options.append(("grpc.max_connection_age_ms", limits.connection_age_s_max * 1000))
    return options


def create_server(
    *, limits: ServerLimits | None = None, interceptors: Sequence[Any] = ()
) -> "grpc.aio.Server":
    """A server, not yet bound or started. Errors are translated inside all other interceptors."""
    limits = limits or ServerLimits()
    return grpc.aio.server(
        interceptors=[*interceptors, ErrorInterceptor(limits.records_max)],
        options=channel_options(limits),
        maximum_concurrent_rpcs=limits.rpcs_max,
    )


def bind(
    server: "grpc.aio.Server",
    host: str,
    port: int,
    flag: str = "--grpc-port",
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Bind to host:port (0 = any free one) and return the port. ConfigError says why not."""
    # By itself gRPC resolves names otherwise than the system does.
    found = [host] if host in WILDCARDS else listened_on(host, flag)
    with ExitStack() as held:
        if port == 0 and len(found) > 1:
            # One that is free at all of them: gRPC gives back none that it has.
            kept = [held.enter_context(each) for each in bind_sockets(host, port, flag)]
            port = int(kept[0].getsockname()[1])
        for each in found:
            port = _bound(server, each, port, flag, credentials)
    return port


def _bound(
    server: "grpc.aio.Server",
    address: str,
    port: int,
    flag: str,
    credentials: grpc.ServerCredentials | None,
) -> int:
    """The port, at one address."""
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    bound = 0
    with suppress(RuntimeError):
        if credentials is None:
            bound = server.add_insecure_port(place)
        else:
            bound = server.add_secure_port(place, credentials)
    if bound == 0:
        # The same question to the operating system, whose answer gRPC does not pass on.
        for taken in bind_sockets(address, port, flag, listens=True):
            taken.close()
        why = f"port {port} was taken on {address} a moment ago; try again, or see {flag}"
        raise ConfigError(why)
    return bound


def add_health(
    server: "grpc.aio.Server",
    service_names: Sequence[str] = (),
    watches_max: int = WATCHES_MAX,
    why_stuck: Callable[[], str] = lambda: "",
    asked: Mapping[str, Callable[[], str]] = MappingProxyType({}),
) -> HealthStatus:
    """Serve grpc.health.v1. Every name, and "" for the process, starts as not serving; `live` is
    serving unless `why_stuck` says why not, and so is each name of `asked`.
    """
    status = HealthStatus(("", *service_names), watches_max, why_stuck, asked)
    status.add_to(server)
    return status


class _Reflection(reflection.aio.ReflectionServicer):
    """At most so many clients that look around, and each for a while only."""

    def __init__(self, names: Sequence[str], streams_max: int) -> None:
        super().__init__(names)
        self._streams = AtMost(streams_max, "reflection streams")

    async def ServerReflectionInfo(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        with self._streams:
            try:
                async with asyncio.timeout(REFLECTION_S_MAX):
                    async for answer in super().ServerReflectionInfo(requests, context):
                        yield answer
            except TimeoutError:
                raise DeadlineExceeded("reflection") from None


def add_reflection(
    server: "grpc.aio.Server", names: Sequence[str], streams_max: int = WATCHES_MAX
) -> None:
    """Let grpcurl and friends list these services. Call after they were added."""
    servicer = _Reflection([*names, reflection.SERVICE_NAME], streams_max)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
