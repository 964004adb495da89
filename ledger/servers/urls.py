"""What a ledger url says: which kind of servers, where to ask for them, and as whom."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from redis.asyncio.connection import AbstractConnection, Connection, parse_url

from service_kit.errors import ConfigError

Kind = Literal["single", "cluster", "sentinel"]
DEFAULT_PORTS: Final = {"cluster": 6379, "sentinel": 26379}
# user:password@hosts/path?query: a comma is no part of one host's url.
SEVERAL: Final = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>cluster|sentinel)://"
    r"(?P<user>[^@/?#]*@)?(?P<hosts>[^@/?#]+)(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?"
)
FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
OF_SENTINELS: Final = "sentinel_"


class Address(NamedTuple):
    """Of one server. An empty host: the unix socket of the url."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.host else "the url's socket"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """A url taken apart. Its repr shows no password: there is none."""

    kind: Kind
    # Where the servers are asked for; of a single one where it is.
    addresses: tuple[Address, ...]
    # What Sentinels call the primary and its replicas.
    name: str
    # Of a connection to a server, and of one to a Sentinel; redis-py's.
    connection_class: type[AbstractConnection]
    options: dict[str, Any]
    sentinel_options: dict[str, Any]

    def __repr__(self) -> str:
        return f"StoreUrl({self.kind}, {', '.join(map(str, self.addresses))})"


def parse(url: str) -> StoreUrl:
    """ConfigError says how urls are written, never what stood in this one."""
    several = SEVERAL.fullmatch(url)
    try:
        parsed = _single(url) if several is None else _several(several)
    except ValueError:
        # Not what was wrong with it: of a password with a "/" that would be the beginning.
        raise ConfigError(
            "ledger url: it must be redis://, rediss:// or unix://, or for several servers"
            " redis+cluster://HOST,HOST or redis+sentinel://HOST,HOST/NAME (rediss+… with TLS), and"
            " in a password / is written %2F, # %23, ? %3F, @ %40 and : %3A"
        ) from None
    for name in FILES:
        if (file := parsed.options.get(name)) is not None and not Path(file).is_file():
            raise ConfigError(f"ledger url: {name}: {file} is no file")
    return parsed


def first_address(url: str) -> str:
    """`host:port` of the first server a url names: on the way there lies our own address."""
    first = parse(url).addresses[0]
    return str(first) if first.host else ":6379"


def _single(url: str) -> StoreUrl:
    options: dict[str, Any] = dict(parse_url(url))
    connection_class = options.pop("connection_class", Connection)
    address = Address("", 0)
    if "path" not in options:
        host, port = options.pop("host", "localhost"), options.pop("port", 6379)
        address = Address(str(host), int(port))
    return StoreUrl(
        kind="single",
        addresses=(address,),
        name="",
        connection_class=connection_class,
        options=options,
        sentinel_options={},
    )


def _several(found: re.Match[str]) -> StoreUrl:
    kind: Kind = "cluster" if found["kind"] == "cluster" else "sentinel"
    addresses = tuple(_address(each, DEFAULT_PORTS[kind]) for each in found["hosts"].split(","))
    name, _, database = (found["path"] or "/").removeprefix("/").partition("/")
    if kind == "cluster":
        if name not in ("", "0") or database:
            raise ConfigError(f"ledger url: a cluster has database 0 and no other, got /{name}")
        name, database = "", "0"
    elif not name:
        raise ConfigError(
            "ledger url: after the Sentinels it must name what they watch,"
            " redis+sentinel://HOST,HOST/NAME"
        )
    place = f"{found['scheme']}://{found['user'] or ''}host/{database}{found['query'] or ''}"
    options: dict[str, Any] = dict(parse_url(place))
    del options["host"]
    connection_class = options.pop("connection_class", Connection)
    of_sentinels = {each: options.pop(each) for each in [*options] if each.startswith(OF_SENTINELS)}
    tls = {each: value for each, value in options.items() if each.startswith("ssl_")}
    return StoreUrl(
        kind=kind,
        addresses=addresses,
        name=name,
        connection_class=connection_class,
        options=options,
        sentinel_options={
            **tls,
            **{each.removeprefix(OF_SENTINELS): value for each, value in of_sentinels.items()},
        },
    )


def _address(text: str, default_port: int) -> Address:
    place = urlsplit(f"//{text}")
    if not place.hostname:
        raise ValueError(text)
    return Address(place.hostname, place.port or default_port)
