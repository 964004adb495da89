"""What is answered, as bytes: JSON, and server-sent events of JSON."""

from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
# A comment: nobody reads it, but proxies see that the stream lives.
PING: Final = b": ping\n\n"
ENCODER: Final = msgspec.json.Encoder()


def to_json(reply: Any) -> bytes:
    """A Struct, or whatever else JSON can say."""
    return ENCODER.encode(reply)


def to_event(reply: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + ENCODER.encode(reply) + b"\n\n"
