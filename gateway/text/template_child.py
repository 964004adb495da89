"""A child of `template_process`: renders what it is asked, until its parent is gone.

It imports little: a gateway starts several.
"""

import json
import resource
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final

from gateway.text.chat_template import ChatTemplate, TemplateFailed
from gateway.text.control_texts import ControlTexts

MEMORY_BYTES_MAX: Final = 512 << 20
LENGTH: Final = struct.Struct("<I")
REASON_CHARS_MAX: Final = 200


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(stream.read(LENGTH.unpack(head)[0]))
    return message


def frame(message: Mapping[str, Any]) -> bytes:
    """Its length, then the message as JSON."""
    # What is no character (a lone surrogate) is not let in; a template that makes one is told.
    content = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
    return LENGTH.pack(len(content)) + content


class _Renderer:
    """What a child does with a question."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._template = ChatTemplate(setup["source"], setup["names"])
        self._controls = ControlTexts(setup["control_texts"])
        self._text_bytes_max: int = setup["text_bytes_max"]

    def answer(self, question: Mapping[str, Any]) -> bytes:
        """A frame, whatever the template does, short of what ends the process."""
        try:
            return frame({"pieces": self._pieces(question)})
        except TemplateFailed as error:
            reason = str(error)
        except MemoryError:
            reason = "it outgrew its memory"
        except (KeyboardInterrupt, SystemExit):
            raise
        # A fault of minijinja's own is no Exception: Rust panics are not.
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        return frame({"error": reason[:REASON_CHARS_MAX].encode("utf-8", "replace").decode()})

    def _pieces(self, question: Mapping[str, Any]) -> list[str]:
        messages, options = self._hide(question["messages"]), self._hide(question["options"])
        pieces = self._controls.split(self._template.render(messages, **options))
        size_bytes = sum(len(piece.encode()) for piece in pieces)
        if size_bytes > self._text_bytes_max:
            limit = f"at most {self._text_bytes_max} bytes, got {size_bytes}"
            raise TemplateFailed(f"the rendered prompt must have {limit}")
        return pieces

    def _hide(self, value: Any) -> Any:
        """In all texts of it, keys of a client's objects among them."""
        if isinstance(value, str):
            return self._controls.hide(value)
        if isinstance(value, dict):
            return {self._controls.hide(key): self._hide(item) for key, item in value.items()}
        return [*map(self._hide, value)] if isinstance(value, list) else value


def main() -> None:
    """The child: set up once, then one reply per question until stdin ends with the parent."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(questions)
    if setup is None:
        return
    renderer = _Renderer(setup)
    answers.write(frame({}))
    answers.flush()
    while (question := _read(questions)) is not None:
        answers.write(renderer.answer(question))
        answers.flush()


if __name__ == "__main__":
    # SIGINT from a terminal reaches the whole group; the child ends when its stdin does.
    with suppress(KeyboardInterrupt):
        main()
