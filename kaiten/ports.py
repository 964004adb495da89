"""Free and taken local ports."""

import errno
import socket
from typing import Final

from kaiten.errors import StartError

PORT_MAX: Final = 65535


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Somebody may take it before we do; then the service says so."""
    return _bound(host, 0)


def claim(host: str, port: int, flag: str) -> int:
    """`port` if a server could listen there now, any free one for 0; otherwise a StartError."""
    if not 0 <= port <= PORT_MAX:
        raise StartError(f"{flag} must be in [0, {PORT_MAX}], got {port}", "0 picks a free port")
    try:
        return _bound(host, port)
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


def _bound(host: str, port: int) -> int:
    with socket.create_server((host, port), family=_family(host)) as probe:
        return int(probe.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
