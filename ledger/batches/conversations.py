"""Conversations of tenants: each a content that changes as a whole, unless another was first."""

import secrets
from dataclasses import dataclass
from typing import Final, NamedTuple

from ledger import scripts
from ledger.batches.shelf import too_many_bytes
from ledger.store import Store
from ledger.types import UNBOUNDED
from service_kit.errors import AlreadyExists, NotFound, Overloaded

# Of one tenant.
CONVERSATIONS_MAX: Final = 10_000
# What one takes of the store besides its content.
CONVERSATION_BYTES: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptConversation:
    """As it was found. `created_at`: seconds of the store's clock. `version`: of this content."""

    id: str
    created_at: int
    version: str
    content: bytes


class Waiting(NamedTuple):
    """A conversation that goes on with a response, which may have ended."""

    tenant: str
    id: str
    request_id: str


class Conversations:
    """Every method names the tenant, and finds nothing of another. Part of Ledger; see there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def new(self, tenant: str, id: str, content: bytes) -> KeptConversation:
        """Overloaded: the tenant keeps too much. AlreadyExists: it has one of this id."""
        kept = await self._keep(tenant, id, "", content)
        if kept is None:
            raise AlreadyExists(f"conversation {id!r}")
        return kept

    async def find(self, tenant: str, id: str) -> KeptConversation:
        """NotFound: no such conversation of this tenant, or not any more."""
        key = self._store.keys.conversation(tenant, id)
        (found,) = await self._store.read((("HMGET", key, "created_at", "version", "content"),))
        created_at, version, content = found
        if version is None:
            raise self._gone(id)
        return KeptConversation(
            id=id, created_at=int(created_at), version=version.decode(), content=content
        )

    async def waits_for(self, tenant: str, id: str) -> str | None:
        """As `change` was told; None: it was not. NotFound as `find`, whose content it does not
        read.
        """
        key = self._store.keys.conversation(tenant, id)
        (found,) = await self._store.read((("HMGET", key, "version", "waits_for"),))
        version, waits_for = found
        if version is None:
            raise self._gone(id)
        return None if waits_for is None else str(waits_for.decode())

    async def waiting(self) -> list[Waiting]:
        """All that wait, of every tenant. Some may have left by themselves."""
        (found,) = await self._store.read((("HGETALL", self._store.keys.waiting),))
        pairs = zip(found[::2], found[1::2], strict=True)
        split = [(name.decode().partition(":"), request_id.decode()) for name, request_id in pairs]
        return [Waiting(tenant, id, request_id) for (tenant, _, id), request_id in split]

    async def change(
        self,
        tenant: str,
        before: KeptConversation,
        content: bytes,
        *,
        waits_for: str = "",
        is_let_in: bool = False,
    ) -> KeptConversation | None:
        """Its time begins anew. None: somebody has changed it since it was found. `waits_for`: a
        response that is to become a part of it. `is_let_in`: however much there is, of the tenant
        and in the store.

        NotFound as `find`. Overloaded: it grew, and the tenant keeps too much.
        """
        return await self._keep(
            tenant, before.id, before.version, content, waits_for, is_let_in=is_let_in
        )

    async def drop(self, tenant: str, id: str) -> None:
        """NotFound as `find`."""
        if not await self._drop(tenant, id):
            raise self._gone(id)

    async def let_go(self, tenant: str, id: str) -> None:
        """It is none of `waiting` any more, as it has left."""
        await self._drop(tenant, id, only_waiting=True)

    async def _drop(self, tenant: str, id: str, *, only_waiting: bool = False) -> bool:
        keys = self._store.keys
        verdict, *_ = await self._store.script(
            scripts.CONVERSATION_DROP,
            (*keys.shelf(tenant), keys.conversation(tenant, id), keys.waiting),
            (id, f"{tenant}:{id}", int(only_waiting)),
        )
        return bool(verdict != b"NONE")

    async def _keep(
        self,
        tenant: str,
        id: str,
        before: str,
        content: bytes,
        waits_for: str = "",
        *,
        is_let_in: bool = False,
    ) -> KeptConversation | None:
        keys, limits = self._store.keys, self._store.limits
        bytes_max = UNBOUNDED if is_let_in else limits.files_bytes_max
        bounds = (bytes_max, CONVERSATIONS_MAX, CONVERSATION_BYTES)
        version, name = secrets.token_hex(8), f"{tenant}:{id}"
        verdict, *rest = await self._store.script(
            scripts.CONVERSATION_LET_IN if is_let_in else scripts.CONVERSATION_KEEP,
            (*keys.shelf(tenant), keys.conversation(tenant, id), keys.waiting),
            (id, before, version, content, limits.files_ttl_s, *bounds, waits_for, name),
        )
        if verdict == b"OTHER":
            return None
        if verdict == b"NONE":
            raise self._gone(id)
        if verdict == b"FULL":
            raise too_many_bytes(tenant, limits.files_bytes_max, int(rest[0]))
        if verdict == b"MANY":
            raise Overloaded(
                f"too many conversations of tenant {tenant} are kept; delete some",
                60.0,
                CONVERSATIONS_MAX,
                live=int(rest[0]),
                subject="tenant",
                tenant=tenant,
            )
        return KeptConversation(id=id, created_at=int(rest[0]), version=version, content=content)

    def _gone(self, id: str) -> NotFound:
        hours = self._store.limits.files_ttl_s / 3600
        rule = (
            "it never was, was deleted, or is kept no more; conversations are kept for"
            f" {hours:g} h (--files-hours) after their last change"
        )
        return NotFound(f"conversation {id!r}", rule)
