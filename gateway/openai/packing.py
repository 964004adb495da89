"""What the ledger keeps for us beside its own records: compressed MessagePack of a Struct."""

import asyncio
import sys
import zlib
from typing import Any, Final, TypeVar

import msgspec

# A conversation of a million tokens takes a few: what is not ours must not fill the memory.
BYTES_MAX: Final = 64 << 20
# More takes milliseconds, for which others would wait.
INLINE_BYTES_MAX: Final = 64 << 10

FLOAT_MAX: Final = sys.float_info.max

T = TypeVar("T")


def keepable(value: Any) -> Any:
    """JSON of a client's own, in which a whole number of more than 64 bits, for which MessagePack
    has no room, is as near as a float comes to it."""
    if isinstance(value, dict):
        return {name: keepable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [keepable(each) for each in value]
    if type(value) is int and not -(2**63) <= value < 2**64:
        return float(min(max(value, -FLOAT_MAX), FLOAT_MAX))
    return value


async def compressed(content: bytes) -> bytes:
    if len(content) > INLINE_BYTES_MAX:
        return await asyncio.to_thread(zlib.compress, content, 1)
    return zlib.compress(content, 1)


async def packed(value: msgspec.Struct) -> bytes:
    return await compressed(msgspec.msgpack.encode(value))


async def unpacked(stored: bytes, kind: type[T]) -> T:
    unpack = zlib.decompressobj().decompress
    if len(stored) > INLINE_BYTES_MAX:
        content = await asyncio.to_thread(unpack, stored, BYTES_MAX)
    else:
        content = unpack(stored, BYTES_MAX)
    return msgspec.msgpack.decode(content, type=kind)
