"""Which server holds a cell's keys now, and who may come after it.

redis-py's maintained clients ask: `Sentinel` whom the Sentinels follow, `RedisCluster` who has the
slot. Commands do not go through them: ledger/servers/connections.py says why.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from redis import exceptions as redis_errors
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff

from ledger.servers.urls import Address, StoreUrl
from service_kit.errors import ConfigError


class Servers(Protocol):
    """Asks who is who. Raises redis-py's errors when nobody answers, ConfigError when the answer is
    that these are not the servers of the url.
    """

    # Whether another server may take the primary's place.
    is_redundant: bool
    # What a connection to a primary says first, and who it must be then.
    asks_role: bool

    async def primary(self) -> Address: ...

    async def replicas(self) -> list[Address]: ...

    async def close(self) -> None: ...


class OneServer:
    """Itself, for ever."""

    is_redundant = False
    asks_role = False

    def __init__(self, address: Address) -> None:
        self._address = address

    async def primary(self) -> Address:
        return self._address

    async def replicas(self) -> list[Address]:
        return []

    async def close(self) -> None:
        """Nobody was asked."""


class SentinelServers:
    """Whom the Sentinels follow under a name."""

    is_redundant = True
    # A Sentinel that was away may name one that is primary no more.
    asks_role = True

    def __init__(self, url: StoreUrl, timeout_s: float) -> None:
        self._name = url.name
        self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
            list(url.addresses),
            sentinel_kwargs={
                **_patience(timeout_s),
                **url.sentinel_options,
                "ssl": issubclass(url.connection_class, SSLConnection),
            },
        )

    async def primary(self) -> Address:
        try:
            host, port = await self._sentinel.discover_master(self._name)
        except MasterNotFoundError as error:
            await self._require_name()
            raise redis_errors.ConnectionError(
                f"the Sentinels know no working primary of {self._name!r}"
            ) from error
        except redis_errors.AuthenticationError as error:
            raise ConfigError(
                f"ledger url: the Sentinels must accept its user and password; they said: {error}."
                " Fix: ?sentinel_username=…&sentinel_password=…"
            ) from error
        except redis_errors.ResponseError as error:
            raise ConfigError(
                f"ledger url: redis+sentinel:// must lead to Sentinels; one said: {error}."
                " Fix: redis:// for a single server, redis+cluster:// for a cluster"
            ) from error
        return Address(str(host), int(port))

    async def _require_name(self) -> None:
        """Of those that answer one at least knows it."""
        known: set[str] = set()
        for sentinel in self._sentinel.sentinels:
            try:
                masters: Any = await sentinel.sentinel_masters()
                known |= set(masters)
            except redis_errors.RedisError:
                continue
        if known and self._name not in known:
            raise ConfigError(
                f"ledger url: the Sentinels must watch {self._name!r}; they watch"
                f" {', '.join(sorted(known))}. Fix: redis+sentinel://HOST,HOST/NAME with their name"
            )

    async def replicas(self) -> list[Address]:
        found = await self._sentinel.discover_slaves(self._name)
        return [Address(str(host), int(port)) for host, port in found]

    async def close(self) -> None:
        await self._sentinel.aclose()


class ClusterServers:
    """Who has the slot of a key."""

    is_redundant = True
    # Who has it not says so to every command.
    asks_role = False

    def __init__(self, url: StoreUrl, key: str, timeout_s: float) -> None:
        options: dict[str, Any] = {**url.options, **_patience(timeout_s)}
        options.pop("db", None)
        self._key = key
        self._cluster = RedisCluster(
            startup_nodes=[ClusterNode(*each) for each in url.addresses],
            require_full_coverage=False,
            ssl=issubclass(url.connection_class, SSLConnection),
            **options,
        )
        self.last: Address | None = None

    async def primary(self) -> Address:
        return (await self._nodes())[0]

    async def replicas(self) -> list[Address]:
        return (await self._nodes())[1:]

    async def _nodes(self) -> list[Address]:
        """Of the slot, primary first."""
        nodes = self._cluster.nodes_manager
        try:
            # Its own `initialize` asks for all commands that there are, too; ours need none.
            await nodes.initialize(
                last_failed_node_name=str(self.last) if self.last is not None else None
            )
        except IndexError:
            # So ends the look for a primary where nobody has any slot.
            nodes.slots_cache = {}
        except redis_errors.RedisClusterException as error:
            raise self._what(error) from error
        found = nodes.slots_cache.get(slot := self._cluster.keyslot(self._key))
        if not found:
            raise ConfigError(
                f"ledger: the cluster must serve slot {slot}, which has the keys"
                f" {self._key.rpartition(':')[0]}:*; no server of it does. Fix: CLUSTER ADDSLOTS"
                f" {slot} on one, or another --cell"
            )
        addresses = [Address(str(each.host), int(each.port)) for each in found]
        self.last = addresses[0]
        return addresses

    def _what(self, error: redis_errors.RedisClusterException) -> Exception:
        """redis-py tells all that can be wrong by one class."""
        causes = [error.__cause__, getattr(error.__cause__, "__context__", None)]
        for cause in causes:
            if isinstance(cause, redis_errors.AuthenticationError):
                return cause
            if isinstance(cause, redis_errors.NoPermissionError):
                return ConfigError(
                    f"ledger: the store's user must be allowed CLUSTER SLOTS; it said: {cause}."
                    " Fix: its rules as deploy/valkey/valkey-commands.acl"
                )
        if "not enabled" in f"{error} {error.__cause__}":
            return ConfigError(
                "ledger url: redis+cluster:// must lead to servers of a cluster; this one is none."
                " Fix: redis:// for a single server, redis+sentinel:// for those of Sentinels"
            )
        return redis_errors.ConnectionError(str(error))

    async def close(self) -> None:
        nodes = self._cluster.nodes_manager
        await nodes.aclose()
        await nodes.aclose("startup_nodes")


def servers_of(url: StoreUrl, key: str, *, timeout_s: float) -> Servers:
    """`key` is any of the cell's: all are in one slot."""
    if url.kind == "cluster":
        return ClusterServers(url, key, timeout_s)
    if url.kind == "sentinel":
        return SentinelServers(url, timeout_s)
    return OneServer(url.addresses[0])


def _patience(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }


class Route:
    """The way to the primary: learnt when it is first needed, and anew when something speaks
    against it. Several callers ask once.
    """

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.address: Address | None = None
        self._is_doubted = True
        self._asking: asyncio.Task[Address] | None = None
        self._movers: list[Callable[[Address], None]] = []

    def on_move(self, mover: Callable[[Address], None]) -> None:
        """Is told of every other primary."""
        self._movers.append(mover)

    @property
    def is_certain(self) -> bool:
        return not self._is_doubted

    def doubt(self) -> None:
        """The primary did not answer, or said that it is none: ask before the next command."""
        self._is_doubted = self.servers.is_redundant

    def moved(self, address: Address) -> None:
        """Go there from now on."""
        self._is_doubted = False
        if address != self.address:
            self.address = address
            for mover in self._movers:
                mover(address)

    async def find(self) -> Address:
        """Ask, and go there. When nobody can tell, the last one may still be the one."""
        try:
            return await self.ask()
        except (redis_errors.RedisError, OSError):
            if self.address is None:
                raise
            return self.address
        except ConfigError as error:
            # A start is refused for it (see `ask`); a service that runs waits until it is mended.
            raise redis_errors.ConnectionError(str(error)) from error

    async def ask(self) -> Address:
        """The same, with every error as it is."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        asking, caller = self._asking, asyncio.current_task()
        try:
            # Whoever gives up must not take it from the others.
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if asking.cancelled() and not (caller and caller.cancelling()):
                # Nobody cancelled the caller: passed on, this would end a loop without a word.
                raise redis_errors.ConnectionError("the way to the store was closed") from None
            raise

    async def _ask(self) -> Address:
        address = await self.servers.primary()
        self.moved(address)
        return address

    def _asked(self, task: asyncio.Task[Address]) -> None:
        self._asking = None
        if not task.cancelled():
            # Seen by those who wait, if any still do.
            task.exception()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self.servers.close()
