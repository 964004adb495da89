"""The ledger of one cell: the durable record that gateways and the leader meet in."""

from typing import Self

from ledger.commits import Commits
from ledger.keys import Keys
from ledger.leadership import Leadership
from ledger.store import Store
from ledger.submissions import Submissions
from ledger.types import LedgerLimits, StoreInfo
from service_kit.errors import ConfigError

VERSION_MIN = (7, 2)


class Ledger(Submissions, Leadership, Commits):
    """One process's handle on a cell: the gateway's methods, the leader's methods, and the health
    check.

    Every method is bounded in time and either takes effect as a whole or not at all; after
    Unavailable it may have taken effect, and calling again with the same arguments is safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

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
    def store(self) -> Store:
        """For the follower, which tails the journal on a socket of its own."""
        return self._store

    async def check(self) -> StoreInfo:
        """Is this a store to trust requests to? ConfigError names the rule and the fix.

        Creates the cell's meta key in an unused cell. StoreLost when the store is not the one known
        before.
        """
        facts = await self._store.facts()
        version = facts.get("redis_version", "0")
        if tuple(int(part) for part in version.split(".")[:2]) < VERSION_MIN:
            raise ConfigError(
                f"ledger: Redis >= 7.2 or Valkey is needed, found {version}; install a newer server"
            )
        self._check_durability(facts.get("appendonly"), facts.get("appendfsync"))
        policy = facts.get("maxmemory-policy", "unknown")
        memory_bytes = int(facts.get("maxmemory", 0))
        # maxmemory 0 never evicts, but the policy would bite on the day somebody sets a limit.
        if policy != "noeviction":
            raise ConfigError(
                f"ledger: maxmemory-policy must be noeviction, or accepted requests may be evicted; found"
                f" {policy}. Fix: CONFIG SET maxmemory-policy noeviction, and the same in the server's"
                " configuration file"
            )
        return StoreInfo(
            server=facts.get("server_name", "redis"),
            version=facts.get("valkey_version", version),
            appendfsync=facts.get("appendfsync", "unknown"),
            maxmemory_policy=policy,
            maxmemory_bytes=memory_bytes,
            nonce=await self._store.rebind(),
        )

    def _check_durability(self, appendonly: str | None, appendfsync: str | None) -> None:
        if appendonly is None:
            raise ConfigError(
                "ledger: CONFIG GET is not permitted, so durability cannot be checked; allow this user"
                " +config|get"
            )
        if appendonly != "yes":
            raise ConfigError(
                "ledger: appendonly must be yes, or a restart of the store loses accepted requests; found"
                f" {appendonly}. Fix: CONFIG SET appendonly yes, and the same in the server's configuration file"
            )
        allowed = ("always", "everysec") if self._store.limits.allow_everysec else ("always",)
        if appendfsync not in allowed:
            raise ConfigError(
                f"ledger: appendfsync must be {' or '.join(allowed)}, or a crash of the store loses what it"
                f" acknowledged; found {appendfsync}. Fix: CONFIG SET appendfsync always, and the same in the"
                " server's configuration file"
            )
