"""What is kept with a response: what it was asked, so that any gateway can tell it again or go on.

Compressed MessagePack of a `Note`, in the ledger, for as long as its result.
"""

import asyncio
import zlib
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from gateway.openai.responses.body import ResponseBody
from gateway.openai.responses.reply import Asked, ReasoningReply
from gateway.text.model_card import SamplingDefaults
from gateway.values.generation_request import Message

# A conversation of a million tokens takes a few: what is not ours must not fill the memory.
NOTE_BYTES_MAX: Final = 64 << 20
# More takes milliseconds, for which others would wait.
INLINE_BYTES_MAX: Final = 64 << 10


class Note(Struct, kw_only=True):
    asked: Asked
    # (role, text) of all there was before the answer, the instructions excepted.
    turns: list[tuple[str, str]]
    with_logprobs: bool

    @property
    def messages(self) -> list[Message]:
        return [Message(role=role, content=text) for role, text in self.turns]


def note_of(
    body: ResponseBody, turns: Iterable[Message], created_at: int, defaults: SamplingDefaults
) -> Note:
    asked = Asked(
        created_at=created_at,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        previous_response_id=body.previous_response_id,
        reasoning=ReasoningReply(None if body.reasoning is None else body.reasoning.effort),
        store=body.is_stored,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_logprobs=body.top_logprobs or 0,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
    )
    said = [(each.role, each.content or "") for each in turns]
    return Note(asked=asked, turns=said, with_logprobs=body.with_logprobs)


async def packed(note: Note) -> bytes:
    content = msgspec.msgpack.encode(note)
    if len(content) > INLINE_BYTES_MAX:
        return await asyncio.to_thread(zlib.compress, content, 1)
    return zlib.compress(content, 1)


async def unpacked(stored: bytes) -> Note:
    unpack = zlib.decompressobj().decompress
    if len(stored) > INLINE_BYTES_MAX:
        content = await asyncio.to_thread(unpack, stored, NOTE_BYTES_MAX)
    else:
        content = unpack(stored, NOTE_BYTES_MAX)
    return msgspec.msgpack.decode(content, type=Note)
