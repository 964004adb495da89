"""A place in an output that can be checked: a position, and a digest of every token before it.

A client that comes back with a cursor either goes on exactly where it left, or is told that what it
has is not what we have. The digest is bound to the sequence; it is no secret and proves no right.
"""

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from service_kit.errors import InvalidRequest

DIGEST_BYTES: Final = 8
LAYOUT: Final = struct.Struct(f"<I{DIGEST_BYTES}s")


class TokenDigest:
    """The running digest of one output. Invariant: `position` tokens have been fed."""

    __slots__ = ("_hash", "position")

    def __init__(self, sequence_id: int) -> None:
        self._hash = blake2b(sequence_id.to_bytes(8, "little"), digest_size=DIGEST_BYTES)
        self.position = 0

    def feed(self, token_ids: Sequence[int]) -> None:
        """Add tokens. How they are grouped makes no difference."""
        self._hash.update(array("I", token_ids).tobytes())
        self.position += len(token_ids)

    def cursor(self) -> bytes:
        """This place."""
        return LAYOUT.pack(self.position, self._hash.digest())


def position_of(cursor: bytes) -> int:
    """Where a cursor points to; an empty one is the beginning. InvalidRequest: not a cursor."""
    if not cursor:
        return 0
    if len(cursor) != LAYOUT.size:
        raise InvalidRequest("cursors", f"must have {LAYOUT.size} bytes each, got {len(cursor)}")
    return int(LAYOUT.unpack(cursor)[0])
