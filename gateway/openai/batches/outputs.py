"""What a batch leaves: a file, piece by piece as its lines come, kept once there is room."""

from contextlib import suppress
from typing import Final

from ledger.batches.batches import BatchName
from ledger.batches.files import CHUNK_BYTES, Files
from service_kit.errors import NotFound

PURPOSE: Final = "batch_output"


class ChunkWriter:
    """An output of a batch that is being written. It is no file before it is kept."""

    def __init__(self, files: Files, batch: BatchName, id: str) -> None:
        self._files, self._batch = files, batch
        self.id = id
        self._buffer = bytearray()
        self._chunks = 0
        self.size_bytes = 0

    async def write(self, line: bytes) -> None:
        self._buffer += line + b"\n"
        while len(self._buffer) >= CHUNK_BYTES:
            await self._put(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    async def end(self) -> None:
        """Nothing more is written."""
        if self._buffer:
            await self._put(bytes(self._buffer))
            self._buffer.clear()

    async def keep(self, filename: str, ttl_s: int | None) -> None:
        """Overloaded: its tenant keeps too much; it may be tried again. OutOfOrder: another driver
        has brought the batch to its end.
        """
        # Not found: another has kept it, and its client has deleted it.
        with suppress(NotFound):
            await self._files.keep(
                self._batch.tenant,
                self.id,
                filename=filename,
                purpose=PURPOSE,
                size_bytes=self.size_bytes,
                chunks=self._chunks,
                ttl_s=ttl_s,
                of=self._batch,
            )

    async def _put(self, chunk: bytes) -> None:
        await self._files.put(self._batch.tenant, self.id, self._chunks, chunk)
        self._chunks += 1
        self.size_bytes += len(chunk)
