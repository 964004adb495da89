"""Protobuf messages from their descriptors: now and then sensible, mostly hostile, always bytes.

The strategies know no message by name. `SENSIBLE` gives some field names values that get past the
first check, so that not everything is refused at the door.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

DEPTH_MAX: Final = 4
ITEMS_MAX: Final = 3
IDS: Final = ("a", "b.c", "x-1", "Y_9", "unknown")
TEXTS: Final = ("", "The chef", "\u0000", "\u202e寿司🍣", "<|user|></s>", "a" * 3000, "é" * 64)
SENSIBLE: Final[Mapping[str, st.SearchStrategy[Any]]] = {
    "model": st.sampled_from(("", "mini", "mini", "other")),
    "request_id": st.sampled_from(("", "", *IDS, "../etc", "a" * 129, "a b")),
    "text": st.sampled_from(("The chef", "Hello!", *TEXTS)),
    "content": st.sampled_from(("Hello!", *TEXTS)),
    "role": st.sampled_from(("user", "system", "assistant", "tool", "", "x" * 65)),
    "max_tokens": st.sampled_from((1, 2, 4, 0, 2**32 - 1)),
    "min_tokens": st.sampled_from((0, 1, 3)),
    "n": st.sampled_from((1, 1, 2, 0, 17, 2**32 - 1)),
    "temperature": st.sampled_from((0.0, 1.0, 2.0, -1.0, 2.1, math.nan, math.inf)),
    "top_p": st.sampled_from((1.0, 0.5, 1e-38, 0.0, math.nan)),
    "min_p": st.sampled_from((0.0, 0.5, 1.0, -0.5)),
    "ids": st.integers(0, 1600),
    "token_ids": st.integers(0, 1600),
    "token_id": st.integers(0, 1600),
    "stop": st.sampled_from(("chef", ".", "", "x" * 300)),
    "logprobs": st.sampled_from((0, 1, 20, 21)),
    "prompt_logprobs": st.sampled_from((0, 1, 20, 21)),
    "name": st.sampled_from(("enable_thinking", "date_string", "__class__", "")),
}
INT_EDGES: Final = (0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, math.nan, math.inf, -math.inf)
RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Any value the field's type can carry."""
    if field.cpp_type in RANGES:
        least, most = RANGES[field.cpp_type]
        edges = [edge for edge in INT_EDGES if least <= edge <= most]
        return st.sampled_from(edges) | st.integers(least, most)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.sampled_from(FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from((0, 1, 2, 99, -1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=64)
    return st.sampled_from(TEXTS) | st.text(max_size=16)


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.name in SENSIBLE:
        return SENSIBLE[field.name] | SENSIBLE[field.name] | SENSIBLE[field.name] | _scalars(field)
    return _scalars(field)


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Messages of a type, most fields left out."""
    if depth >= DEPTH_MAX:
        return st.builds(message_factory.GetMessageClass(descriptor))
    return _built(descriptor, depth)


# Hypothesis reads the source of each function that it meets: one for all messages.
@st.composite
def _built(draw: st.DrawFn, descriptor: Descriptor, depth: int) -> Message:
    message: Message = message_factory.GetMessageClass(descriptor)()
    # Of each choice of fields one is taken, so that requests have an input.
    choices = [sorted(field.name for field in oneof.fields) for oneof in descriptor.oneofs]
    chosen = {draw(st.sampled_from(names)) for names in choices if len(names) > 1}
    rarity = draw(st.sampled_from((0, 2, 8)))
    for field in descriptor.fields:
        if field.name not in chosen and draw(st.integers(0, rarity)):
            continue
        if field.is_repeated:
            drawn = draw(st.lists(_values(field, depth), max_size=ITEMS_MAX))
        else:
            drawn = [draw(_values(field, depth))]
        _put(message, field, drawn)
    return message


def _put(message: Message, field: FieldDescriptor, drawn: list[Any]) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend(drawn)
    elif field.message_type is not None:
        for value in drawn:
            getattr(message, field.name).CopyFrom(value)
    else:
        for value in drawn:
            setattr(message, field.name, value)


# On the wire


def varint(value: int) -> bytes:
    """As protobuf writes it; negative numbers take ten bytes."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tagged(number: int, payload: bytes) -> bytes:
    """A field with a length."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def _unknown_fields(count: int) -> bytes:
    return tagged(1999, b"?") * count


def _nested(depth: int) -> bytes:
    raw = b""
    for _ in range(depth):
        raw = tagged(5, raw)
    return raw


# What may happen to a message on its way. Each takes the bytes and a number that decides.
MANGLERS: Final[tuple[Callable[[bytes, int], bytes], ...]] = (
    lambda raw, _: raw + _unknown_fields(3),
    lambda raw, _: raw + _unknown_fields(100_000),
    lambda raw, at: raw[: at % (len(raw) + 1)],
    lambda raw, at: raw[:at] + bytes([at % 256]) + raw[at + 1 :],
    lambda raw, at: raw + tagged(at % 16 + 1, b"\xff\xfe\x80"),
    lambda raw, at: raw + tagged(at % 16 + 1, b"\xed\xa0\x80"),
    lambda raw, at: raw + varint(at % 16 + 1 << 3) + varint(-1),
    lambda raw, at: raw + varint(at % 16 + 1 << 3) + b"\xff" * 11,
    lambda raw, at: raw + varint(at % 16 + 1 << 3 | at % 8),
    lambda raw, at: raw + varint(at % 16 + 1 << 3 | 2) + varint(2**31),
    lambda raw, _: raw + _nested(200),
    lambda raw, _: raw * 2,
    lambda _, at: at.to_bytes(4, "big") * (at % 64),
    lambda raw, at: raw + tagged(3, b"x" * (at * 5000)),
    lambda raw, at: raw + tagged(4, tagged(1, varint(at) * (at * 100))),
)


@st.composite
def wire(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """A message's bytes, one in three mangled."""
    raw = draw(messages(descriptor)).SerializeToString()
    if draw(st.integers(0, 2)):
        return raw
    mangle = draw(st.sampled_from(MANGLERS))
    return mangle(raw, draw(st.integers(0, 999)))
