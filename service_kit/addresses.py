"""Where processes listen, and under which addresses they reach each other.

An address is `host:port`, or a socket file, `unix:/path`.
"""

import asyncio
import errno
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from service_kit.errors import ConfigError

WILDCARDS: Final = ("0.0.0.0", "::", "")
UNIX: Final = "unix:"
PORT_MAX: Final = 65535
FREE_PORT_TRIES: Final = 8
# A name or an address of IPv4; an address of IPv6 has brackets.
_TCP: Final = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]):([0-9]{1,5})", re.ASCII)


async def advertised(host: str, port: int, *, peer: str) -> str:
    """The host:port at which `peer` ("host:port") reaches what is bound to `host` and `port`.

    A wildcard is no address. What stands for it is this machine's address on the route to the
    peer: right on a container network, where names of containers may mean nothing to others.
    """
    if host in WILDCARDS:
        family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC
        host = await _own_address(peer, family) or socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unix_address(path: Path) -> str:
    """Of a socket file, as gRPC and we write it: what a URI reads otherwise is escaped."""
    return UNIX + quote(str(path))


def unix_path(address: str) -> Path | None:
    """The socket file of an address; None: it is no socket's."""
    return Path(unquote(address.removeprefix(UNIX))) if address.startswith(UNIX) else None


def problem_of(address: str) -> str:
    """The rule that an address breaks; empty: it can be dialled. gRPC has other schemes (`dns:`,
    `xds:`), by which who may name an address could have us ask anybody."""
    if (path := unix_path(address)) is not None:
        return "" if path.is_absolute() else "must be unix:/ and an absolute path"
    found = _TCP.fullmatch(address)
    if found is None or not 1 <= int(found[1]) <= PORT_MAX:
        return "must be host:port or unix:/path"
    return ""


def is_loopback(host: str) -> bool:
    """Only this machine reaches what is bound to it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


async def is_listening(address: str) -> bool:
    """Somebody takes connections there: who is put aside does, who has ended does not."""
    try:
        if (path := unix_path(address)) is not None:
            _, writer = await asyncio.open_unix_connection(path)
        else:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, ValueError):
        return False
    writer.close()
    return True


async def _own_address(peer: str, family: int) -> str:
    """The local end of the route to the peer, or "" when there is none (a socket file, no name)."""
    host, _, port = peer.rpartition(":")
    if not host or not port.isdecimal():
        return ""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            host.strip("[]"), int(port), family=family, type=socket.SOCK_DGRAM
        )
        kind, _, _, _, address = found[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket chooses the route and sends nothing.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def listened_on(host: str, flag: str) -> list[str]:
    """This machine's addresses that a host stands for: all of a name's, and of a wildcard those of
    both families, as gRPC has it. ConfigError: it is no name.
    """
    found = ["0.0.0.0", "::"]
    if host not in WILDCARDS:
        try:
            told = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            why = f"host {host!r} cannot be resolved; choose another with {_host_flag(flag)}"
            raise ConfigError(why) from error
        found = list(dict.fromkeys(str(address[0]) for *_, address in told))
    # A name may have addresses of a family that this machine has not.
    return [each for each in found if _is_here(each)] or found


def bind_sockets(host: str, port: int, flag: str, *, listens: bool = False) -> list[socket.socket]:
    """A socket for each address of `listened_on`, all of one port (0: any free one). ConfigError
    says why there is none.
    """
    found = listened_on(host, flag)
    # What is free at the first address may be taken at the next: then another one is tried.
    for _ in range(0 if port else FREE_PORT_TRIES - 1):
        with suppress(ConfigError):
            return _bound_at_all(found, port, flag, listens=listens)
    return _bound_at_all(found, port, flag, listens=listens)


def _bound_at_all(
    found: Sequence[str], port: int, flag: str, *, listens: bool
) -> list[socket.socket]:
    taken: list[socket.socket] = []
    for address in found:
        try:
            taken.append(_bound(address, port, listens=listens))
        except OSError as error:
            for each in taken:
                each.close()
            raise ConfigError(_why_not(error, address, port, flag)) from error
        port = port or int(taken[0].getsockname()[1])
    return taken


def _bound(address: str, port: int, *, listens: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Unless TCP is named asyncio leaves Nagle's algorithm on, which costs 40 ms per answer.
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # IPv4 has a socket of its own, whose peers look as they do elsewhere.
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind((address, port))
        if listens:
            taken.listen()
    except OSError:
        taken.close()
        raise
    return taken


def _is_here(address: str) -> bool:
    try:
        _bound(address, 0).close()
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _why_not(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        fix = f"stop what holds it, or choose another with {flag}"
        return f"port {port} is taken on {host}; {fix}"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one above 1023 with {flag}"
    return f"cannot listen on {host}:{port}: {error.strerror}; see {_host_flag(flag)} and {flag}"


def _host_flag(flag: str) -> str:
    return flag.removesuffix("-port") + "-host"
