"""Ids of requests as answers over HTTP carry them: which kind of answer it is, then its own."""

from typing import Final

CHAT: Final = "chatcmpl-"
COMPLETION: Final = "cmpl-"
RESPONSE: Final = "resp_"


def own_ids(id: str) -> tuple[str, ...]:
    """What a request may be called of which somebody has this id: as it is, for a client chooses
    its ids and one may begin so, or without what the answer put before it.
    """
    bare = (id.removeprefix(kind) for kind in (CHAT, COMPLETION, RESPONSE) if id.startswith(kind))
    return (id, *filter(None, bare))
