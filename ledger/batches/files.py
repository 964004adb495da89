"""Files of tenants: what batches read and write. Pieces in the store, bounded in bytes and time."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from ledger import scripts
from ledger.batches.batches import BatchName
from ledger.batches.shelf import FILES, Page, page_of, too_many_bytes
from ledger.store import Store
from service_kit.errors import NotFound, OutOfOrder, Overloaded, Unavailable

CHUNK_BYTES: Final = 1 << 20
# From the first piece of a file to its last.
UPLOAD_S_MAX: Final = 3600
# Of one tenant. Listing them all is a page (OpenAI's largest).
FILES_MAX: Final = 10_000
# What a file takes of the store besides its bytes, or a small one in all.
FILE_BYTES_MIN: Final = 2048
# As shelf_page.lua tells them apart, by their ids.
OF_PURPOSE: Final = {"": "all", "batch": "plain", "batch_output": "outputs"}
# Heads read at once.
FILES_AT_ONCE: Final = 128
FIELDS: Final = ("bytes", "chunks", "created_at", "expires_at", "filename", "purpose")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that is kept. Times are seconds of the store's clock."""

    id: str
    filename: str
    purpose: str
    size_bytes: int
    chunks: int
    created_at: int
    expires_at: int


class Files:
    """Every method names the tenant, and finds nothing of another."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def rule(self) -> str:
        """Why a file may not be there."""
        hours = self._store.limits.files_ttl_s / 3600
        return (
            "it never was, was deleted, or is kept no more;"
            f" files are kept for {hours:g} h (--files-hours) or what expires_after said"
        )

    async def put(self, tenant: str, id: str, number: int, chunk: bytes) -> None:
        """A piece of a file that is coming in, from number 0. `keep` makes it one; then nothing
        changes it any more.
        """
        keys = self._store.keys
        call_keys = (keys.file(tenant, id), keys.file_chunk(tenant, id, number))
        await self._store.script(scripts.FILE_CHUNK, call_keys, (chunk, UPLOAD_S_MAX))

    async def keep(
        self,
        tenant: str,
        id: str,
        *,
        filename: str,
        purpose: str,
        size_bytes: int,
        chunks: int,
        ttl_s: int | None = None,
        of: BatchName | None = None,
    ) -> StoredFile:
        """The file of all pieces, for so long if that is less than all may be kept; `of`: the batch
        whose output it is.

        Again: what it was, whoever is late with another. Overloaded: the tenant keeps too much.
        OutOfOrder: the batch is not being written down (any more). NotFound: it was its output, and
        has been deleted.
        """
        keys, limits = self._store.keys, self._store.limits
        kept_s = min(ttl_s or limits.files_ttl_s, limits.files_ttl_s)
        bounds = (limits.files_bytes_max, FILES_MAX, FILE_BYTES_MIN)
        verdict, *rest = await self._store.script(
            scripts.FILE_KEEP,
            (
                *keys.shelf(tenant),
                keys.file(tenant, id),
                keys.place(tenant, id),
                *(() if of is None else (keys.batch(*of),)),
                *self._chunk_keys(tenant, id, chunks),
            ),
            (id, size_bytes, kept_s, filename, purpose, *bounds, int(of is not None)),
        )
        if verdict == b"FULL":
            raise too_many_bytes(tenant, limits.files_bytes_max, int(rest[0]))
        if verdict == b"MANY":
            raise Overloaded(
                f"too many files of tenant {tenant} are kept; delete some",
                60.0,
                FILES_MAX,
                live=int(rest[0]),
                subject="tenant",
                tenant=tenant,
            )
        if verdict == b"OVER":
            raise OutOfOrder(f"the batch of {id!r} is not being written down any more")
        if verdict == b"LEFT":
            raise NotFound(f"file {id!r}", self.rule)
        if verdict == b"GONE":
            raise Unavailable("a piece of the file was lost on its way; send it again")
        kept = _file(id, rest)
        assert kept is not None
        return kept

    async def find(self, tenant: str, id: str) -> StoredFile:
        """NotFound: no such file of this tenant, or not any more."""
        (found,) = await self._found(tenant, [id])
        if found is None:
            raise NotFound(f"file {id!r}", self.rule)
        return found

    async def page(self, tenant: str, page: Page, *, purpose: str = "") -> tuple[list[str], bool]:
        """As `shelf.page_of`; of all purposes, if it is left out."""
        if purpose not in OF_PURPOSE:
            return [], False
        return await page_of(self._store, tenant, FILES, page, of=OF_PURPOSE[purpose])

    async def some(self, tenant: str, ids: Sequence[str]) -> AsyncIterator[StoredFile]:
        """Those of them that are still there, in their order."""
        for start in range(0, len(ids), FILES_AT_ONCE):
            for each in await self._found(tenant, ids[start : start + FILES_AT_ONCE]):
                if each is not None:
                    yield each

    async def read(self, tenant: str, file: StoredFile) -> AsyncIterator[bytes]:
        """Piece by piece. NotFound when it is deleted meanwhile."""
        for key in self._chunk_keys(tenant, file.id, file.chunks):
            (chunk,) = await self._store.read((("GET", key),))
            if chunk is None:
                raise NotFound(f"file {file.id!r}")
            yield chunk

    async def drop(self, tenant: str, id: str, chunks: int) -> None:
        """NotFound: it was not there; its pieces are gone all the same."""
        keys = self._store.keys
        verdict, *_ = await self._store.script(
            scripts.FILE_DROP,
            (
                *keys.shelf(tenant),
                keys.file(tenant, id),
                keys.place(tenant, id),
                *self._chunk_keys(tenant, id, chunks),
            ),
            (id,),
        )
        if verdict == b"NONE":
            raise NotFound(f"file {id!r}")

    async def _found(self, tenant: str, ids: Sequence[str]) -> list[StoredFile | None]:
        keys = self._store.keys
        heads = await self._store.read([("HMGET", keys.file(tenant, id), *FIELDS) for id in ids])
        return [_file(id, head) for id, head in zip(ids, heads, strict=True)]

    def _chunk_keys(self, tenant: str, id: str, chunks: int) -> list[str]:
        return [self._store.keys.file_chunk(tenant, id, number) for number in range(chunks)]


def _file(id: str, head: Sequence[bytes | None]) -> StoredFile | None:
    if None in head:
        return None
    size_bytes, chunks, created_at, expires_at, filename, purpose = (
        (each or b"").decode() for each in head
    )
    return StoredFile(
        id=id,
        filename=filename,
        purpose=purpose,
        size_bytes=int(size_bytes),
        chunks=int(chunks),
        created_at=int(created_at),
        expires_at=int(expires_at),
    )
