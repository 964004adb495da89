"""Under which address others reach a process that listens on every interface."""

import asyncio
import socket
from typing import Final

WILDCARDS: Final = ("0.0.0.0", "::", "")


async def advertised(host: str, port: int, *, peer: str) -> str:
    """The host:port at which `peer` ("host:port") reaches what is bound to `host` and `port`.

    A wildcard is no address. What stands for it is this machine's address on the route to the
    peer: right on a container network, where names of containers may mean nothing to others.
    """
    if host in WILDCARDS:
        family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC
        host = await _own_address(peer, family) or socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
