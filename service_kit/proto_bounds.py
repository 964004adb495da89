"""How much a protobuf message would make, counted before anything is made of it. Pure.

Two bytes may be a message of its own, which takes fifty when parsed: four megabytes of them stop
everybody for a tenth of a second.
"""

from typing import Any, Final

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
WIDTHS: Final = {FIXED64: 8, FIXED32: 4}


def records(raw: bytes, kind: Any, most: int) -> int:
    """Fields of a message and of the messages in it, one more than `most` at most.

    `kind` is its descriptor. A list of numbers that is packed is one field. Of bytes that are no
    message only what comes before the fault is counted: to say so is the parser's.
    """
    count, spans = 0, [(0, len(raw), kind)]
    try:
        while spans:
            at, end, kind = spans.pop()
            while at < end and count <= most:
                count += 1
                key, at = _varint(raw, at)
                if key & 7 == LENGTH:
                    size, at = _varint(raw, at)
                    field = kind.fields_by_number.get(key >> 3)
                    if field is not None and field.message_type is not None:
                        spans.append((at, min(at + size, end), field.message_type))
                    at += size
                elif key & 7 == VARINT:
                    _, at = _varint(raw, at)
                else:
                    at += WIDTHS[key & 7]
    except (IndexError, KeyError):
        pass
    return count


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number there, and where it ends. IndexError: the bytes end first."""
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError(at)
