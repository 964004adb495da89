"""The Lua scripts: each validates first, writes last, and may be sent again with the same
arguments.

Every script but `bind` starts by comparing the store nonce, so no write ever lands in a store that
is not ours.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    """Source text and the name the server knows it by."""

    name: str
    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


def _text(name: str) -> str:
    return (FOLDER / f"{name}.lua").read_text(encoding="utf-8")


def _read(name: str) -> Script:
    return Script(name, _text(name))


def _with_shelf(name: str) -> Script:
    """With what shelf.lua defines, behind the flags."""
    flags, _, text = _text(name).partition("\n")
    return Script(name, f"{flags}\n{_text('shelf')}\n{text}")


BIND: Final = _read("bind")
SUBMIT: Final = _read("submit")
CANCEL: Final = _read("cancel")
WAIT: Final = _read("wait")
FORGET: Final = _read("forget")
ELECT: Final = _read("elect")
RENEW: Final = _read("renew")
RESIGN: Final = _read("resign")
COMMIT: Final = _read("commit")
FOLD: Final = _read("fold")
READ: Final = _read("read")
HISTORY: Final = _read("history")
BATCH_NEW: Final = _with_shelf("batch_new")
BATCH_MOVE: Final = _read("batch_move")
BATCH_LINE: Final = _read("batch_line")
BATCH_HOLD: Final = _read("batch_hold")
FILE_CHUNK: Final = _read("file_chunk")
FILE_KEEP: Final = _with_shelf("file_keep")
FILE_DROP: Final = _with_shelf("file_drop")
CONVERSATION_KEEP: Final = _with_shelf("conversation_keep")
# The same in a store that is full: something may leave it by that, or then.
CONVERSATION_LET_IN: Final = Script(
    "conversation_let_in", CONVERSATION_KEEP.text.replace("#!lua\n", "#!lua flags=allow-oom\n", 1)
)
CONVERSATION_DROP: Final = _with_shelf("conversation_drop")
SHELF_PAGE: Final = _with_shelf("shelf_page")
BARRIER: Final = _read("barrier")
PERMITTED: Final = _read("permitted")

# Whoever gets their reply builds upon it: a client, or the next step.
PROMISES: Final = frozenset(
    {
        *(SUBMIT, CANCEL, FORGET, COMMIT, BATCH_NEW, BATCH_MOVE, BATCH_LINE, FILE_KEEP, FILE_DROP),
        *(CONVERSATION_KEEP, CONVERSATION_LET_IN, CONVERSATION_DROP),
    }
)
