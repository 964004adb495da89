"""Server-sent events, as bytes."""

import json
from typing import Any, Final

DONE: Final = b"data: [DONE]\n\n"
# A comment: nobody reads it, but proxies see that the stream lives.
PING: Final = b": ping\n\n"


def sse(content: dict[str, Any]) -> bytes:
    """One event."""
    return (
        b"data: "
        + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        + b"\n\n"
    )
