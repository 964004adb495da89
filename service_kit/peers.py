"""What the parts of a cell know each other by: a shared credential, certificates, a private socket.

All that parts say to parts goes through here: the port or socket that a part listens on, and every
channel to another. Three ways, and any two of them together:

    --grpc-socket            a file in a private folder: whoever may open it is let in
    --peer-credential-file   both sides prove that they have it, at every call, without sending it
    --peer-tls-cert/key/ca   certificates of one authority on both sides, and nobody reads along

A proof is `1.<unix ms>.<nonce>.<mac>`, and counts once; the answer to it proves the other side, so
that a process which took the address of another is told nothing. Who can read *and change* what
goes over the network can still hand calls on between two that are honest: only TLS ends that.
"""

import hmac
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import grpc
import structlog
from pydantic import Field

from service_kit import addresses, grpc_server
from service_kit.errors import ConfigError, Unauthenticated
from service_kit.grpc_errors import trailers_of
from service_kit.settings import Settings
from service_kit.tls import Certificates, Expiry

log = structlog.get_logger()

PROOF: Final = "kaiten-peer"
ANSWER: Final = "kaiten-peer-answer"
VERSION: Final = "1"
CREDENTIAL_CHARS: Final = (32, 512)
CREDENTIALS_MAX: Final = 8
# Clocks of two machines may differ by so much; a proof is remembered for as long.
SKEW_S_MAX: Final = 300
PROOFS_KEPT_MAX: Final = 1 << 17
# sun_path holds 108 bytes with its terminator.
SOCKET_BYTES_MAX: Final = 107
# Says whether a process serves, and nothing else: for probes, which have no credential.
OPEN_TO_ALL: Final = "/grpc.health.v1.Health/"
REFUSAL_LOG_S: Final = 10.0

Options = Sequence[tuple[str, Any]]
# A proxy is for what lies outside, and a container is often given its variables unasked.
_DIRECT: Final = (("grpc.enable_http_proxy", 0),)
Metadata = tuple[tuple[str, str], ...]


class PeerSettings(Settings):
    """How a part proves itself to others of its cell."""

    peer_credential_file: Path | None = Field(
        default=None,
        description="what the cell's parts have in common: 32 characters or more, readable by their"
        " user only; several lines: the first is shown, each is taken",
    )
    peer_tls_cert: Path | None = Field(
        default=None, description="PEM certificate shown to other parts, for TLS between them"
    )
    peer_tls_key: Path | None = Field(default=None, description="and its key")
    peer_tls_ca: Path | None = Field(
        default=None, description="and the authority whose certificates other parts must show"
    )


class PartSettings(PeerSettings):
    """And how one is reached that only other parts talk to."""

    grpc_host: str = Field(default="127.0.0.1", description="address to listen on")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="0 picks a free port")
    grpc_socket: Path | None = Field(
        default=None,
        description="listen on this socket file, in a folder of mode 700, and on no port",
    )
    allow_anyone: bool = Field(
        default=False,
        description="listen beyond loopback without --peer-credential-file or --peer-tls-*:"
        " whoever reaches the port can read prompts and give wrong answers",
    )


class Credential:
    """The lines of a file, read again when it has changed. What is wrong then changes nothing."""

    def __init__(self, path: Path) -> None:
        """ConfigError for a file that cannot be used."""
        self._path = path
        self._seen = self._look()
        self._keys = self._read()
        # Why those above stay, though the file is another.
        self._kept = ""

    def __repr__(self) -> str:
        return f"Credential({self._path})"

    def now(self) -> tuple[bytes, ...]:
        """The one to show, and the others that are taken."""
        try:
            if (seen := self._look()) != self._seen:
                self._seen = seen
                self._keys = self._read()
                self._kept = ""
                log.info("credential.read", path=str(self._path), count=len(self._keys))
        except ConfigError as error:
            # Once, however many calls there are before it is mended.
            if str(error) != self._kept:
                self._kept = str(error)
                log.warning("credential.kept", reason=self._kept)
        return self._keys

    def _look(self) -> tuple[int, ...]:
        """Another when its content, its mode or its owner is another."""
        try:
            found = self._path.stat()
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None
        # The times of two changes may be the same: they are of a coarse clock.
        times = found.st_mtime_ns, found.st_ctime_ns
        return found.st_ino, found.st_size, found.st_mode, *times

    def _read(self) -> tuple[bytes, ...]:
        try:
            if stat.S_IMODE(self._path.stat().st_mode) & stat.S_IRWXO:
                raise self._error("is open to every user: chmod o-rwx")
            lines = self._path.read_text("ascii").split("\n")
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise self._error(f"cannot be read: {why}") from None
        keys = [line.strip() for line in lines if line.strip()]
        least, most = CREDENTIAL_CHARS
        if not 1 <= len(keys) <= CREDENTIALS_MAX:
            raise self._error(f"must have 1 to {CREDENTIALS_MAX} lines, got {len(keys)}")
        if wrong := next((key for key in keys if not least <= len(key) <= most), None):
            raise self._error(
                f"must have {least} to {most} characters a line, got {len(wrong)}:"
                " openssl rand -hex 32"
            )
        return tuple(key.encode() for key in keys)

    def _error(self, rule: str) -> ConfigError:
        return ConfigError(f"--peer-credential-file {self._path} {rule}")


def make_credential(path: Path) -> None:
    """A new one, unless there is one already; of several that make it at once, one has. ConfigError
    where it cannot be written."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        draft.touch(0o600, exist_ok=False)
        draft.write_text(secrets.token_hex(32) + "\n", "ascii")
        try:
            path.hardlink_to(draft)
            log.info("credential.made", path=str(path))
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise ConfigError(
            f"--peer-credential-file {path} cannot be made: {error.strerror}"
        ) from None


def _mac(key: bytes, side: str, stamp: str) -> str:
    return hmac.digest(key, f"kaiten {side} {stamp}".encode(), "sha256").hex()


class Proof:
    """Of one call: what to send with it, and whether the answer is of one who knows it too."""

    def __init__(self, key: bytes | None, unix_ms: int = 0) -> None:
        self.metadata: Metadata = ()
        self._answer = ""
        if key is not None:
            stamp = f"{VERSION}.{unix_ms}.{secrets.token_hex(16)}"
            self.metadata = ((PROOF, f"{stamp}.{_mac(key, 'call', stamp)}"),)
            self._answer = _mac(key, "answer", stamp)

    def check(self, told: "grpc.aio.Metadata | Metadata | None") -> None:
        """AioRpcError (UNAUTHENTICATED) unless the initial metadata of the answer prove it."""
        if not self._answer:
            return
        given = str(dict(told or ()).get(ANSWER, ""))
        if not hmac.compare_digest(given.encode(), self._answer.encode()):
            empty = grpc.aio.Metadata()
            text = "whoever answered did not prove to have our credential (--peer-credential-file)"
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, empty, empty, text)

    async def stream(self, call: Any) -> AsyncIterator[Any]:
        """The answers of a call that was made with this, once they have proved themselves."""
        is_checked = False
        async for answer in call:
            if not is_checked:
                self.check(await call.initial_metadata())
                is_checked = True
            yield answer

    def blocking_stream(self, call: Any) -> Iterator[Any]:
        """The same for programs without an event loop."""
        is_checked = False
        for answer in call:
            if not is_checked:
                self.check(call.initial_metadata())
                is_checked = True
            yield answer


class Guard:
    """Who is let in by a credential."""

    def __init__(self, credential: Credential) -> None:
        self._credential = credential
        self._taken: OrderedDict[str, int] = OrderedDict()

    def answer(self, proof: str, now_ms: int) -> str:
        """Our own proof, for a good one that was not seen before. Unauthenticated says why not."""
        if not proof:
            raise Unauthenticated(
                "only parts of this cell are let in here, and no proof of it came: give"
                " --peer-credential-file the file that they have"
            )
        stamp, _, mac = proof.rpartition(".")
        for key in self._credential.now():
            if hmac.compare_digest(_mac(key, "call", stamp).encode(), mac.encode()):
                self._take_once(stamp, now_ms)
                return _mac(key, "answer", stamp)
        raise Unauthenticated("the credential is another than ours (--peer-credential-file)")

    def _take_once(self, stamp: str, now_ms: int) -> None:
        """Only what somebody with the credential has made comes here."""
        _, told_ms, nonce = stamp.split(".")
        behind_s = (now_ms - int(told_ms)) / 1000
        if abs(behind_s) > SKEW_S_MAX:
            side = "behind" if behind_s > 0 else "ahead of"
            raise Unauthenticated(
                f"the caller's clock is {abs(behind_s):.0f} s {side} ours, and may be {SKEW_S_MAX}:"
                " set the clocks of both machines (or somebody sent an old proof again)"
            )
        if nonce in self._taken:
            raise Unauthenticated("the proof was used before: each call needs its own")
        self._taken[nonce] = now_ms
        oldest_ms = now_ms - 2000 * SKEW_S_MAX
        while len(self._taken) > PROOFS_KEPT_MAX or next(iter(self._taken.values())) < oldest_ms:
            self._taken.popitem(last=False)


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Lets nobody in who has no proof, before anything is read of what they want."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._logged_s = 0.0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], call: Any
    ) -> Any:
        if call.method.startswith(OPEN_TO_ALL):
            return await continuation(call)
        proof = str(dict(call.invocation_metadata or ()).get(PROOF, ""))
        try:
            answer = self._guard.answer(proof, time.time_ns() // 1_000_000)
        except Unauthenticated as error:
            return self._refusing(error, call.method)
        handler = await continuation(call)
        return None if handler is None else _answering(handler, ((ANSWER, answer),))

    def _refusing(self, error: Unauthenticated, method: str) -> Any:
        async def refuse(_requests: Any, context: Any) -> None:
            # However many ask: a log is no place to be flooded by strangers.
            if time.monotonic() - self._logged_s > REFUSAL_LOG_S:
                self._logged_s = time.monotonic()
                log.warning("peer.refused", peer=context.peer(), method=method, reason=str(error))
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error), trailers_of(error))

        # Of streams: no message is waited for.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _answering(handler: Any, metadata: Metadata) -> Any:
    """The same handler, whose answer begins with this. It is one of `ErrorInterceptor`'s."""
    kind = "_".join(
        "stream" if is_stream else "unary"
        for is_stream in (handler.request_streaming, handler.response_streaming)
    )
    behaviour = getattr(handler, kind)

    async def answer(request: Any, context: Any) -> Any:
        await context.send_initial_metadata(metadata)
        return await behaviour(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(answer, handler.request_deserializer, handler.response_serializer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Where a part listens."""

    host: str = ""
    port: int = 0
    socket: Path | None = None

    def __str__(self) -> str:
        return addresses.unix_address(self.socket) if self.socket else f"{self.host}:{self.port}"

    async def advertised(self, peer: str) -> str:
        """The address by which that other part reaches it."""
        if self.socket is not None:
            return str(self)
        return await addresses.advertised(self.host, self.port, peer=peer)


class Peers:
    """The other parts of the cell: how one of them reaches and lets them in. As it is: anybody."""

    def __init__(
        self, credential: Credential | None = None, certificates: Certificates | None = None
    ) -> None:
        self._credential, self._certificates = credential, certificates
        self._shown = None if certificates is None else certificates.for_channel()

    @classmethod
    def of(cls, chosen: PeerSettings) -> Self:
        """ConfigError for files that cannot be used."""
        given = {
            name: value
            for name in ("cert", "key", "ca")
            if (value := getattr(chosen, f"peer_tls_{name}")) is not None
        }
        if given and len(given) < 3:
            raise ConfigError("--peer-tls-cert, --peer-tls-key and --peer-tls-ca go together")
        certificates = Certificates(**given) if given else None
        if certificates is not None:
            certificates.check()
        path = chosen.peer_credential_file
        return cls(None if path is None else Credential(path), certificates)

    def expiries(self) -> tuple[Expiry, ...]:
        """Of our certificate and the authorities; empty: there is no TLS between parts."""
        return () if self._certificates is None else self._certificates.expiries()

    # To others

    def channel(self, address: str, options: Options = ()) -> "grpc.aio.Channel":
        """To the part at an address, `host:port` or `unix:/path`; by no proxy."""
        options = (*options, *_DIRECT)
        if (credentials := self._credentials(address)) is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)

    def blocking_channel(self, address: str, options: Options = ()) -> grpc.Channel:
        """The same for programs without an event loop."""
        options = (*options, *_DIRECT)
        if (credentials := self._credentials(address)) is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, credentials, options)

    def _credentials(self, address: str) -> grpc.ChannelCredentials | None:
        if self._certificates is None or addresses.unix_path(address) is not None:
            return None
        try:
            self._certificates.check()
            self._shown = self._certificates.for_channel()
        except (OSError, ConfigError) as error:
            # They are being renewed, as a rule.
            log.warning("certificates.kept", reason=str(error))
        return self._shown

    def proof(self) -> Proof:
        """For one call."""
        key = None if self._credential is None else self._credential.now()[0]
        return Proof(key, time.time_ns() // 1_000_000)

    async def ask(self, method: Any, request: Any, timeout_s: float) -> Any:
        """The answer of one call of a stub. Raises AioRpcError."""
        proof = self.proof()
        call = method(request, timeout=timeout_s, metadata=proof.metadata)
        answer = await call
        proof.check(await call.initial_metadata())
        return answer

    # From others

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """For the server of a part."""
        return [] if self._credential is None else [GuardInterceptor(Guard(self._credential))]

    async def bind(self, server: "grpc.aio.Server", chosen: PartSettings) -> Bound:
        """Listen where the settings say. ConfigError says why not."""
        host, port = chosen.grpc_host, chosen.grpc_port
        if chosen.grpc_socket is not None:
            return await bind_socket(server, chosen.grpc_socket.absolute())
        has_proof = self._credential is not None or self._certificates is not None
        if not (has_proof or addresses.is_loopback(host)):
            if not chosen.allow_anyone:
                raise ConfigError(
                    f"--grpc-host {host} is reached from other machines, and nothing tells who may"
                    " call: give --peer-credential-file, or --peer-tls-cert, -key and -ca, or"
                    " --allow-anyone if everybody who reaches this port may read prompts"
                )
            log.warning("peers.anyone", host=host, reason="whoever reaches this port is let in")
        credentials = None if self._certificates is None else self._certificates.for_server()
        return Bound(host=host, port=grpc_server.bind(server, host, port, credentials=credentials))


async def bind_socket(server: "grpc.aio.Server", path: Path) -> Bound:
    """Listen on a socket file, which the kernel opens for this user alone. What a process left that
    was killed is taken over; what one listens on is not. ConfigError says why not."""
    address = addresses.unix_address(path)
    _check_socket(path)
    if await addresses.is_listening(address):
        raise ConfigError(f"--grpc-socket {path} is listened on by another process: stop it")
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise ConfigError(f"--grpc-socket {path} cannot be listened on") from None
    return Bound(socket=path)


def _check_socket(path: Path) -> None:
    if (count := len(bytes(path))) > SOCKET_BYTES_MAX:
        raise ConfigError(
            f"--grpc-socket {path} must have at most {SOCKET_BYTES_MAX} bytes, got {count}"
        )
    if "," in str(path):
        raise ConfigError(f"--grpc-socket {path}: gRPC takes a comma for the end of its name")
    try:
        folder, found = path.parent.stat(), path.stat() if path.exists() else None
    except OSError as error:
        raise ConfigError(f"--grpc-socket {path}: {error.strerror}") from None
    if stat.S_IMODE(folder.st_mode) & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"--grpc-socket {path}: chmod 700 its folder, others may enter it")
    if found is not None and not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"--grpc-socket {path} is there already and no socket")
