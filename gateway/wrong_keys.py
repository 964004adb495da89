"""What becomes of keys that nobody has: counted, logged without the key, answered late.

A key has 256 bits of chance, so nobody finds one by trying; what is slowed is the load and the
noise of those who try, or whose program has an old key. Only the refusal waits: a right key from
the same address is answered at once, because others may be behind the same proxy.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import unquote

import structlog

log = structlog.get_logger()

WAIT_S_MIN: Final = 0.05
WAIT_S_MAX: Final = 2.0
# Without a wrong key for so long an address begins anew.
FORGET_S: Final = 60.0
LOG_EVERY_S: Final = 1.0
# The longest silent is forgotten first.
ADDRESSES_MAX: Final = 1024
# Refusals that wait at once. Those beyond do not: waiting must not become a load of its own.
WAITING_MAX: Final = 256


@dataclass(slots=True, eq=False)
class _Address:
    """Of one address: wrong keys in a row, the last one's time, and what the log does not know."""

    count: int = 0
    last_s: float = 0.0
    logged_s: float = -LOG_EVERY_S
    unlogged: int = 0


class WrongKeys:
    """Of one gateway, over both ports. `count`: since its start."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._now_s = now_s
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._waiting = 0

    def __repr__(self) -> str:
        return f"WrongKeys({self.count}, {len(self._addresses)} addresses)"

    async def seen(self, peer: str) -> None:
        """Note one of this peer (an address, or gRPC's name of it), and wait before it is told."""
        wait_s = self.note(peer)
        if self._waiting >= WAITING_MAX:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._waiting -= 1

    def note(self, peer: str) -> float:
        """Count and log; for how many seconds the refusal waits."""
        self.count += 1
        name, now_s = address_of(peer), self._now_s()
        entry = self._addresses.setdefault(name, _Address())
        self._addresses.move_to_end(name)
        if len(self._addresses) > ADDRESSES_MAX:
            self._addresses.popitem(last=False)
        if now_s - entry.last_s > FORGET_S:
            entry.count = 0
        entry.count, entry.last_s, entry.unlogged = entry.count + 1, now_s, entry.unlogged + 1
        if now_s - entry.logged_s >= LOG_EVERY_S:
            log.warning("keys.wrong", address=name, count=entry.unlogged)
            entry.logged_s, entry.unlogged = now_s, 0
        doublings = min(entry.count - 1, 16)
        return float(min(WAIT_S_MAX, WAIT_S_MIN * 2**doublings))


def address_of(peer: str) -> str:
    """Of `ipv4:192.0.2.1:5000`, `ipv6:[2001:db8::1]:5000` or a bare address. Of IPv6 the /64: who
    has one address there has them all."""
    kind, _, rest = unquote(peer).partition(":")
    text = rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return f"{IPv6Address(int(address) >> 64 << 64)}/64"
    return str(address)
