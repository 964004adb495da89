"""A model's output as it grows: what of it is answer, what reasoning, what tool calls. Pure.

However the text is cut, the pieces say the same. Held back is only what could still become a mark,
and the beginning of a call up to its arguments. There it is decided: JSON that names no function
of the request, or has no arguments where they belong, is text after all, marks included. Once a
call has begun it stays one; its arguments are told as they come, and if the model breaks them off
or writes no JSON there, the client gets just that. White space next to a mark belongs to the mark.
"""

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from gateway.text.tools.calls import Closing, NoCall, head_of
from gateway.text.tools.formats import ReasoningFormat, ToolFormat

# More white space in a row is told at once, wherever it stands.
SPACE_CHARS_MAX: Final = 64
# After a complete call: brackets that models sometimes write once too often.
LEFT_OVER: Final = re.compile(r"[\s}\]]*")


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegins(NamedTuple):
    """`call` counts those of an output. Its arguments follow before the next one begins."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A part of the arguments' JSON, as the model wrote it."""

    call: int
    fragment: str


Piece = Content | Reasoning | CallBegins | CallArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """How one output is to be read. Without `tools` there are no calls, whatever it says."""

    tools: ToolFormat | None = None
    # Functions that may be called.
    names: frozenset[str] = frozenset()
    reasoning: ReasoningFormat | None = None
    # The prompt ends with the mark that begins the reasoning.
    begins_in_reasoning: bool = False
    # The output ends with the first call.
    is_single_call: bool = False
    # A grammar leaves reasoning and calls, so what is cut off before it is a call is no answer.
    must_call: bool = False


class OutputParser:
    """One output's. Invariant: what is `held` is short, however long the output."""

    def __init__(self, speech: Speech, id_of: Callable[[int], str]) -> None:
        """`id_of`: the id of the call with this index."""
        self._speech = speech
        self._id_of = id_of
        self.held = ""
        # What led to a call that has not begun: told if there is none.
        self._candidate = ""
        self._skips_space = speech.begins_in_reasoning
        self._closing = Closing("")
        self._pieces: list[Piece] = []
        self.call_count = 0
        # It begins with such a part, which may go on.
        self.has_reasoning = False
        self._step: Callable[[], bool] = self._start
        if speech.reasoning is not None and speech.begins_in_reasoning:
            self.has_reasoning = True
            self._step = self._reasoning

    @property
    def is_in_reasoning(self) -> bool:
        return self._step == self._reasoning

    @property
    def has_begun(self) -> bool:
        """The part before the answer is over, or there is none."""
        return self._step not in (self._start, self._reasoning)

    @property
    def has_calls(self) -> bool:
        """There were calls, and none is broken off."""
        return self.call_count > 0 and self._step != self._arguments

    @property
    def is_single_call(self) -> bool:
        return self._speech.is_single_call and self._speech.tools is not None

    @property
    def is_over(self) -> bool:
        """Nothing that follows is of the output."""
        return self._step == self._over

    def feed(self, text: str) -> list[Piece]:
        """What became certain."""
        self.held += text
        # A step that could do something sets what comes next; False: it waits for more.
        while self.held and self._step():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def copied(self) -> Self:
        """As it stands, between two texts."""
        other = copy(self)
        other._step = getattr(other, self._step.__name__)
        other._closing = copy(self._closing)
        other._pieces = []
        return other

    def flush(self) -> list[Piece]:
        """The end of the output: what was held back."""
        text, self.held = self._candidate + self.held, ""
        self._candidate = ""
        if self._step == self._reasoning:
            self._tell(Reasoning(text))
        elif self._step == self._arguments:
            self._tell(CallArguments(self.call_count - 1, text))
        elif self._step in (self._start, self._content, self._head, self._list):
            self._tell(Content("" if self._speech.must_call else text))
        pieces, self._pieces = self._pieces, []
        return pieces

    def _start(self) -> bool:
        """The first that is no white space tells what the output begins with."""
        speech, said = self._speech, self.held.lstrip()
        reasoning = speech.reasoning
        if len(self.held) - len(said) <= SPACE_CHARS_MAX:
            if not said:
                return False
            if reasoning is not None and reasoning.begin.startswith(said[: len(reasoning.begin)]):
                if len(said) < len(reasoning.begin):
                    return False
                self.held = said[len(reasoning.begin) :]
                self.has_reasoning = True
                return self._go(self._reasoning, skips_space=True)
            if speech.tools is not None and speech.tools.is_bare and said[0] == "{":
                return self._go(self._head)
        return self._go(self._content)

    def _reasoning(self) -> bool:
        assert self._speech.reasoning is not None
        return self._until(self._speech.reasoning.end, Reasoning, self._after_reasoning)

    def _after_reasoning(self) -> bool:
        """There is one such part, but a call may still be bare."""
        tools, self.held = self._speech.tools, self.held.lstrip()
        if not self.held:
            return False
        is_bare = tools is not None and tools.is_bare and self.held[0] == "{"
        return self._go(self._head if is_bare else self._content)

    def _content(self) -> bool:
        tools = self._speech.tools
        if tools is None:
            self._tell(Content(self.held))
            self.held = ""
            return False
        return self._until(tools.begin, Content, self._list if tools.is_list else self._head)

    def _until(self, mark: str, kind: type[Content | Reasoning], then: Callable[[], bool]) -> bool:
        """Tell what stands before a mark, all but white space, and go on behind it."""
        if self._skips_space:
            self.held = self.held.lstrip()
            self._skips_space = not self.held
        found = self.held.find(mark)
        is_found = found >= 0
        end = _without_space(self.held, found if is_found else _held_from(self.held, mark))
        self._tell(kind(self.held[:end]))
        self.held = self.held[end:]
        if not is_found:
            return False
        found -= end
        if kind is Content:
            self._candidate = self.held[: found + len(mark)]
        self.held = self.held[found + len(mark) :]
        return self._go(then)

    def _list(self) -> bool:
        """One call without the list will do."""
        match = re.match(r"\s*\[?", self.held)
        assert match is not None
        self._candidate += match[0]
        self.held = self.held[match.end() :]
        return bool(match[0].endswith("[") or self.held) and self._go(self._head)

    def _head(self) -> bool:
        tools = self._speech.tools
        assert tools is not None
        try:
            head = head_of(self.held, self._speech.names, tools)
        except NoCall:
            self._tell(Content(self._candidate))
            self._candidate = ""
            return self._go(self._content)
        if head is None:
            return False
        self._candidate = ""
        self.held = self.held[head.length :]
        index, self.call_count = self.call_count, self.call_count + 1
        self._tell(CallBegins(index, self._id_of(index), head.name))
        if not head.has_arguments:
            self._tell(CallArguments(index, "{}"))
            return self._go(self._over if self._speech.is_single_call else self._after_call)
        self._closing = Closing(tools.end)
        return self._go(self._arguments)

    def _arguments(self) -> bool:
        tools = self._speech.tools
        assert tools is not None
        end = self._closing.find(self.held)
        is_found = end is not None
        if end is None:
            is_held = tools.end and not self._closing.is_in_string
            end = _held_from(self.held, tools.end) if is_held else len(self.held)
        self._tell(CallArguments(self.call_count - 1, self.held[:end]))
        self.held = self.held[end:]
        if not is_found:
            return False
        if self._speech.is_single_call:
            return self._go(self._over)
        if tools.arguments_mark or (tools.end and self.held.startswith(tools.end)):
            return self._go(self._after_call)
        self._closing = Closing(tools.end, depth=1)
        return self._go(self._rest)

    def _rest(self) -> bool:
        """What a call says after its arguments, such as an id of its own."""
        tools = self._speech.tools
        assert tools is not None
        end = self._closing.find(self.held)
        if end is None:
            is_held = tools.end and not self._closing.is_in_string
            self.held = self.held[_held_from(self.held, tools.end) :] if is_held else ""
            return False
        self.held = self.held[end:]
        return self._go(self._after_call)

    def _after_call(self) -> bool:
        """Another call, the mark that ends it, or text."""
        tools = self._speech.tools
        assert tools is not None
        self.held = LEFT_OVER.sub("", self.held, count=1)
        between = "," if tools.is_list else tools.separator
        if between and self.held.startswith(between):
            self._candidate = between
            self.held = self.held.removeprefix(between)
            return self._go(self._head)
        if tools.end.startswith(self.held) and self.held != tools.end:
            return False
        self.held = self.held.removeprefix(tools.end)
        return self._go(self._content, skips_space=True)

    def _over(self) -> bool:
        self.held = ""
        return False

    def _go(self, step: Callable[[], bool], *, skips_space: bool = False) -> bool:
        self._step = step
        self._skips_space = skips_space
        return True

    def _tell(self, piece: Piece) -> None:
        if isinstance(piece, CallBegins) or piece[-1]:
            self._pieces.append(piece)


def _held_from(text: str, mark: str) -> int:
    """Where the longest suffix begins that could still become the mark."""
    for begin in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[begin:]):
            return begin
    return len(text)


def _without_space(text: str, end: int) -> int:
    return max(len(text[:end].rstrip()), end - SPACE_CHARS_MAX)
