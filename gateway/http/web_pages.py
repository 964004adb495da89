"""Which web pages may reach this gateway. Pure.

A page of any site can make its visitor's browser send requests to http://localhost:8000, and with
a name that it lets lead to 127.0.0.1 (DNS rebinding) it could read the answers as well. Browsers
cannot be made to lie about two headers: Host is the name that was asked for, Origin the page that
asks. Programs send no Origin, and whoever asks for an address was not led there by a name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Self

from gateway.http.errors import HttpError
from service_kit.addresses import is_loopback

ANY: Final = "*"
# A name or an address, and a port. What no browser writes is no host.
HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPolicy:
    """The names that may stand in Host (None: any) and the origins of pages that may call."""

    hosts: frozenset[str] | None
    origins: frozenset[str]

    @classmethod
    def of(cls, bound: str, allowed_hosts: Sequence[str], cors_origins: Sequence[str]) -> Self:
        """`bound` is what the server listens on. Bound beyond loopback, nobody but the operator
        knows the names it is reached by: without `allowed_hosts` any will do."""
        is_any = ANY in allowed_hosts or not (allowed_hosts or is_loopback(bound))
        names = {"localhost", bound.lower(), *(each.lower() for each in allowed_hosts)}
        return cls(hosts=None if is_any else frozenset(names), origins=frozenset(cors_origins))

    def refusal(self, host: str, origin: str) -> HttpError | None:
        """Why a request with these headers (empty: not sent) is not answered."""
        host, origin = host.lower(), origin.lower()
        if host and not self._is_ours(host):
            rule = "must be an address, localhost or one of --allowed-hosts"
            return HttpError(403, f"Host: {rule}, got {host[:128]!r}", "host_not_allowed")
        same = (f"http://{host}", f"https://{host}")
        if origin and origin not in same and self.origins.isdisjoint((origin, ANY)):
            rule = "other sites' pages must be named in --cors-origins"
            return HttpError(403, f"Origin: {rule}, got {origin[:128]!r}", "origin_not_allowed")
        return None

    def _is_ours(self, host: str) -> bool:
        if self.hosts is None:
            return True
        parts = HOST.fullmatch(host)
        name = (parts[1] or parts[2]).rstrip(".") if parts else ""
        return name in self.hosts or is_address(name)


def is_address(host: str) -> bool:
    """An IP address as such: no name that somebody could lead elsewhere."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
