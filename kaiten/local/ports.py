"""Local ports, held from the moment they are chosen until whoever they are for has ended."""

import errno
import socket
from types import TracebackType
from typing import Final, Self

from kaiten.start_error import StartError

LOOPBACK: Final = "127.0.0.1"
PORT_MAX: Final = 65535


class HeldPort:
    """A port that is bound but not listened on, so that the system gives it to nobody else.

    SO_REUSEADDR lets one listener in beside a socket that does not listen: a child of ours, again
    after each restart. A second listener is refused as ever. OSError when the port is taken.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.host = host
        self.number: Final[int] = self._socket.getsockname()[1]

    def __repr__(self) -> str:
        return f"HeldPort({self.address})"

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.number}" if ":" in self.host else f"{self.host}:{self.number}"

    def close(self) -> None:
        """Let it go. Again is fine."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def claim(host: str, port: int, flag: str) -> HeldPort:
    """`port`, any free one for 0; StartError when a server could not listen there now."""
    if not host:
        raise StartError("--host is empty", "give it an address; 0.0.0.0 is all of this machine")
    if not 0 <= port <= PORT_MAX:
        raise StartError(f"{flag} must be in [0, {PORT_MAX}], got {port}", "0 picks a free port")
    try:
        return HeldPort(host, port)
    except OSError as error:
        raise _refusal(error, host, port, flag) from error


def _refusal(error: OSError, host: str, port: int, flag: str) -> StartError:
    if error.errno == errno.EADDRINUSE:
        return StartError(
            f"port {port} is taken on {host}",
            f"stop what holds it (another `kaiten serve`?), or choose another with {flag}",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return StartError(
            f"port {port} is not allowed to this user", f"choose one of 1024 or above with {flag}"
        )
    return StartError(
        f"{host} is no address of this machine: {error.strerror}",
        "give --host an address of this machine; 0.0.0.0 is all of them",
    )
