"""Server-sent events, as bytes."""

from typing import Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
# A comment: nobody reads it, but proxies see that the stream lives.
PING: Final = b": ping\n\n"
encode: Final = msgspec.json.Encoder().encode


def sse(content: object) -> bytes:
    """One event: a model, or what is JSON already."""
    return b"data: " + encode(content) + b"\n\n"
