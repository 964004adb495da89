"""ranking: logits as integers that order as they do, for the kernels that look for the largest.

formula  key(x): the bits of a float32, of negative ones all but the sign turned round; both zeros
         are one. rank(x, id) = key(x) * 2^32 + (2^32 - 1 - id): the largest rank is the largest
         value, and among equals the lowest id, in whatever order ranks are compared
shapes   any -> the same shape: key int32, rank int64
cost     4 integer operations
"""

from __future__ import annotations

from typing import Final

from kernels import jit
from kernels.jit import pointer, tl

# Logits of one program of the kernels that cut a row of the vocabulary into pieces.
CHUNK: Final = 4096


def chunks_of(vocab: int) -> int:
    """Pieces of a row."""
    return -(-vocab // CHUNK)


@jit.compiled
def key_of(value: pointer) -> pointer:
    """int32 that orders as the floats do."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit.compiled
def value_of_key(key: pointer) -> pointer:
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit.compiled
def ranked(value: pointer, token: pointer) -> pointer:
    """int64 that orders by value, then by falling id."""
    return (key_of(value).to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@jit.compiled
def value_of(rank: pointer) -> pointer:
    """The float32 of a rank."""
    return value_of_key((rank >> 32).to(tl.int32))


@jit.compiled
def token_of(rank: pointer) -> pointer:
    """The id of a rank."""
    return 0xFFFFFFFF - (rank & 0xFFFFFFFF)
