"""Free and taken local ports."""

import socket

from kaiten.errors import StartError


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Somebody may take it before we do; then the service says so."""
    with socket.create_server((host, 0), family=_family(host)) as probe:
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError:
        return False
    return True


def claim(host: str, port: int, flag: str) -> int:
    """`port` if it is free, any free one for 0; otherwise a StartError that names the flag."""
    if port == 0:
        return free_port(host)
    if not is_free(host, port):
        raise StartError(
            f"port {port} is taken on {host}",
            f"stop what holds it (another `kaiten serve`?), or choose another with {flag}",
        )
    return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
