"""Batches of tenants: their state, the answers of their lines, and who drives them.

An answer is written once, by whoever has it first, and a state is left once: so a driver may die
anywhere, two may drive the same batch, and every line still has one answer.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from ledger import scripts
from ledger.batches.shelf import BATCHES, Page, page_of, too_many_bytes
from ledger.store import Store
from service_kit.errors import NotFound, Overloaded

# Of one tenant: more of them wait for each other anyway.
LIVE_MAX: Final = 16
# Of one tenant, live or over.
KEPT_MAX: Final = 10_000
# What a batch takes of the store besides its fields, with those that it gets until its end.
BATCH_BYTES: Final = 2048
# Each may have tens of kilobytes.
HEADS_AT_ONCE: Final = 16
BOUNDS: Final = {b"LIVE": ("live batches", LIVE_MAX), b"KEPT": ("kept batches", KEPT_MAX)}
LIVE: Final = ("validating", "in_progress", "finalizing", "cancelling")


class BatchName(NamedTuple):
    tenant: str
    id: str

    def __str__(self) -> str:
        return f"{self.tenant}:{self.id}"


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """`fields` as they are stored. Times are seconds of the store's clock."""

    name: BatchName
    fields: Mapping[str, str]

    @property
    def status(self) -> str:
        return self.fields["status"]

    def number(self, field: str) -> int:
        """0: not set yet."""
        return int(self.fields.get(field, "0"))


class Batches:
    """Part of Ledger; see there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def new(self, name: BatchName, fields: Mapping[str, str], *, window_s: int) -> None:
        """Overloaded: the tenant has too many, live ones or all that are kept, or too much."""
        keys, limits = self._store.keys, self._store.limits
        kept_s = window_s + limits.files_ttl_s
        bounds = (LIVE_MAX, KEPT_MAX, limits.files_bytes_max, BATCH_BYTES)
        verdict, *rest = await self._store.script(
            scripts.BATCH_NEW,
            (*keys.shelf(name.tenant), keys.batches, keys.batch(*name), keys.place(*name)),
            (name.tenant, name.id, kept_s, window_s, *bounds, *_flat(fields)),
        )
        if verdict == b"FULL":
            raise too_many_bytes(name.tenant, limits.files_bytes_max, int(rest[0]))
        if verdict in BOUNDS:
            what, limit = BOUNDS[verdict]
            raise Overloaded(
                f"too many {what} of tenant {name.tenant}",
                60.0,
                limit,
                live=int(rest[0]),
                subject="tenant",
                tenant=name.tenant,
            )

    async def find(self, name: BatchName) -> StoredBatch:
        """NotFound: no such batch of this tenant, or not any more."""
        (found,) = await self._found([name])
        if found is None:
            raise _gone(name)
        return found

    async def page(self, tenant: str, page: Page) -> tuple[list[str], bool]:
        """As `shelf.page_of`."""
        return await page_of(self._store, tenant, BATCHES, page)

    async def some(self, tenant: str, ids: Sequence[str]) -> AsyncIterator[StoredBatch]:
        """Those of them that are still there, in their order."""
        names = [BatchName(tenant, id) for id in ids]
        for start in range(0, len(names), HEADS_AT_ONCE):
            for each in await self._found(names[start : start + HEADS_AT_ONCE]):
                if each is not None:
                    yield each

    async def live(self) -> list[BatchName]:
        """Of every tenant, those that somebody must drive."""
        (names,) = await self._store.read((("HKEYS", self._store.keys.batches),))
        return [BatchName(*name.decode().split(":", 1)) for name in names]

    async def hold(self, name: BatchName, who: str, for_ms: int) -> bool:
        """Whether this one drives it now, and for so long if it does not ask again."""
        key = self._store.keys.batch_driver(*name)
        verdict, *_ = await self._store.script(scripts.BATCH_HOLD, (key,), (who, for_ms))
        return bool(verdict == b"OK")

    async def move(
        self,
        name: BatchName,
        state: str,
        *,
        of: Sequence[str],
        fields: Mapping[str, str] | None = None,
    ) -> str:
        """To a state from one of `of`; the state it is in then. NotFound: it is not kept."""
        keys, is_over = self._store.keys, state not in LIVE
        verdict, *rest = await self._store.script(
            scripts.BATCH_MOVE,
            (
                keys.batches,
                keys.batch(*name),
                keys.answers(name.tenant),
                *((keys.batch_lines(*name), keys.batch_driver(*name)) if is_over else ()),
            ),
            (str(name), f" {' '.join(of)} ", state, int(is_over), *_flat(fields or {})),
        )
        if verdict == b"NONE":
            raise _gone(name)
        return rest[0].decode() if verdict == b"OTHER" else state

    async def let_go(self, name: BatchName) -> None:
        """It is nobody's to drive any more, if its state has left; else nothing."""
        with suppress(NotFound):
            await self.move(name, "failed", of=())

    async def answer(self, name: BatchName, line: int, answer: bytes, *, is_ok: bool) -> None:
        """Of a line; the first one stays. NotFound: the batch is not computed any more: all that is
        answered may be written down by now. Overloaded: the answers of its tenant's live batches
        are as large as a file may be. Failures are always taken.
        """
        keys, limits = self._store.keys, self._store.limits
        state = "completed" if is_ok else "failed"
        verdict, *rest = await self._store.script(
            scripts.BATCH_LINE,
            (keys.batch(*name), keys.batch_lines(*name), keys.answers(name.tenant)),
            (line, answer, state, str(name), limits.files_bytes_max),
        )
        if verdict == b"FULL":
            raise Overloaded(
                f"too many bytes of answers in live batches of tenant {name.tenant}",
                60.0,
                limits.files_bytes_max,
                live=int(rest[0]),
                subject="tenant",
                rule="files_mb",
                tenant=name.tenant,
            )
        if verdict == b"NONE":
            raise _gone(name)

    async def answered(self, name: BatchName) -> list[int]:
        """Numbers of the lines that have an answer, ascending."""
        (lines,) = await self._store.read((("HKEYS", self._store.keys.batch_lines(*name)),))
        return sorted(int(line) for line in lines)

    async def answers(self, name: BatchName, lines: Sequence[int]) -> list[bytes]:
        """Of lines that have one. NotFound: it is over, and they are kept no more."""
        if not lines:
            return []
        key = self._store.keys.batch_lines(*name)
        (found,) = await self._store.read((("HMGET", key, *lines),))
        if None in found:
            raise _gone(name)
        return list(found)

    async def _found(self, names: Sequence[BatchName]) -> list[StoredBatch | None]:
        keys = self._store.keys
        heads = await self._store.read([("HGETALL", keys.batch(*name)) for name in names])
        return [_batch(name, head) for name, head in zip(names, heads, strict=True)]


def _batch(name: BatchName, head: Sequence[bytes]) -> StoredBatch | None:
    words = [each.decode() for each in head]
    return StoredBatch(name, dict(zip(words[::2], words[1::2], strict=True))) if words else None


def _gone(name: BatchName) -> NotFound:
    rule = "batches are kept for as long as files (--files-hours) after their 24 h"
    return NotFound(f"batch {name.id!r}", f"it never was, or is kept no more; {rule}")


def _flat(fields: Mapping[str, str]) -> list[str]:
    return [word for pair in fields.items() for word in pair]
