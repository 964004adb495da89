"""The ledger of one cell: the durable record that gateways and the leader meet in."""

from typing import Self

from ledger.batches.batches import Batches
from ledger.batches.conversations import Conversations
from ledger.batches.files import Files
from ledger.commits import Commits
from ledger.durability import check_kind, check_replicas, check_store, is_full
from ledger.keys import Keys
from ledger.leadership import Leadership
from ledger.servers.commands import needed
from ledger.servers.refusals import NotLetIn
from ledger.store import Store
from ledger.submissions import Submissions
from ledger.types import LedgerLimits, StoreInfo
from service_kit.errors import ConfigError


class Ledger(Submissions, Leadership, Commits):
    """One process's handle on a cell: the gateway's methods, the leader's methods, and the health
    check.

    Every method is bounded in time and either takes effect as a whole or not at all; after
    Unavailable it may have taken effect, and calling again with the same arguments is safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.files = Files(store)
        self.batches = Batches(store)
        self.conversations = Conversations(store)

    @classmethod
    async def connect(
        cls, url: str, *, cell: str = "0", limits: LedgerLimits | None = None
    ) -> Self:
        """A handle; sockets are opened when needed, so the store may start later. ConfigError: not
        a URL.
        """
        if not cell or set(cell) & set("{}:*"):
            raise ConfigError(f"cell must be a name without braces, colons and stars, got {cell!r}")
        return cls(Store(url, Keys(cell), limits or LedgerLimits()))

    async def close(self) -> None:
        await self._store.close()

    @property
    def keys(self) -> Keys:
        """The names of this cell's keys, for operators' tools."""
        return self._store.keys

    async def store_id(self) -> str:
        """Which store this is: another one, or the same flushed, has another."""
        return (await self._store.nonce()).decode()

    async def check(self) -> StoreInfo:
        """Is this a store to trust requests to? ConfigError names the rule and the fix.

        Creates the cell's meta key in an unused cell. StoreLost when the store is not the one known
        before.
        """
        try:
            return await self._checked()
        except NotLetIn as error:
            raise ConfigError(error.reason) from error

    async def _checked(self) -> StoreInfo:
        store, limits, kind = self._store, self._store.limits, self._store.url.kind
        await store.primary()
        facts = await store.facts()
        check_kind(facts, kind)
        check_store(facts, allow_everysec=limits.allow_everysec)
        for address, of_replica in (await store.facts_of_replicas()).items():
            where = f"replica {address}"
            check_store(of_replica, allow_everysec=limits.allow_everysec, where=where)
        if refused := await store.refused_commands(needed(kind, limits.replicas_min)):
            raise ConfigError(
                f"ledger: the store's user must be allowed {', '.join(map(str.upper, refused))} on"
                f" {self.keys.prefix}*. Fix: its rules as in deploy/valkey/valkey-commands.acl"
            )
        await store.rebind()
        return StoreInfo(
            server=facts.get("server_name", "redis"),
            version=facts.get("valkey_version", facts["redis_version"]),
            appendfsync=facts["appendfsync"],
            kind=kind,
            replicas=check_replicas(facts, limits.replicas_min),
            is_full=is_full(facts),
        )
