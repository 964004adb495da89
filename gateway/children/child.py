"""A child of `pool`: answers what it is asked, until its parent is gone.

Frames on stdin and stdout: 4 bytes of length, then JSON. It imports little: a gateway starts
several.
"""

import json
import os
import resource
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final

LENGTH: Final = struct.Struct("<I")
REASON_CHARS_MAX: Final = 200
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Refused(Exception):
    """What was asked cannot be done. The text is for the client, after the subject's name.

    `at`: because of which of several things that were asked; None: of none of them.
    """

    def __init__(self, reason: str, at: int | None = None) -> None:
        super().__init__(reason)
        self.at = at


def frame(message: Mapping[str, Any]) -> bytes:
    """Its length, then the message as JSON."""
    # What is no character (a lone surrogate) is not let in; a template that makes one is told.
    content = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    return LENGTH.pack(len(content)) + content


def answered(answer: Answer, question: Mapping[str, Any]) -> bytes:
    """A frame, whatever happens, short of what ends the process."""
    try:
        return frame(answer(question))
    except Refused as error:
        return _refusal(str(error), {} if error.at is None else {"at": error.at})
    except MemoryError:
        reason = "outgrew its memory"
    except (KeyboardInterrupt, SystemExit):
        raise
    # A fault of a library in Rust is no Exception: its panics are not.
    except BaseException as error:
        reason = f"says: {type(error).__name__}: {error}"
    return _refusal(reason, {})


def _refusal(reason: str, more: Mapping[str, int]) -> bytes:
    return frame({"error": reason[:REASON_CHARS_MAX].encode("utf-8", "replace").decode(), **more})


def serve(begin: Callable[[Mapping[str, Any]], Answer], memory_bytes_max: int) -> None:
    """Set up once, then one answer per question until stdin ends with the parent."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # SIGINT from a terminal reaches the whole group; the child ends when its stdin does.
    with suppress(KeyboardInterrupt):
        try:
            _answer_all(begin, sys.stdin.buffer, sys.stdout.buffer)
        except BrokenPipeError:
            # The parent was killed while it waited. At its end Python would write once more.
            os._exit(0)


def _answer_all(
    begin: Callable[[Mapping[str, Any]], Answer], questions: BinaryIO, answers: BinaryIO
) -> None:
    if (setup := _read(questions)) is None:
        return
    answer = begin(setup)
    answers.write(frame({}))
    answers.flush()
    while (question := _read(questions)) is not None:
        answers.write(answered(answer, question))
        answers.flush()


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(head)[0]))
    return message
