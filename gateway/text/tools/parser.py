"""What a model wrote, as content, reasoning and tool calls, piece by piece as it comes. Pure.

A call is told when it is complete: until then nobody can know that it is one. What begins like a
call and is none (broken JSON, another shape, cut off) is content, markers and all: nothing is lost,
and nothing of a call is ever content. Nothing is held back but a call that goes on, and the
beginning of a marker. Each character is read once.
"""

import json
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, NamedTuple

from gateway.text.tools.formats import ReasoningFormat, ToolFormat

SPACE: Final = " \t\r\n"
# Between calls that have no marker of their own.
SEPARATOR: Final = ";"
NAME_CHARS_MAX: Final = 128
OPENS: Final = "{["
DEPTHS: Final = {"{": 1, "[": 1, "}": -1, "]": -1}


class Call(NamedTuple):
    """`arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


class Said(NamedTuple):
    """What a piece of text brought."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class _Mode(Enum):
    # Nothing but white space so far, or since a call or the reasoning.
    BEGINNING = "beginning"
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    # Behind a call: its end marker may come.
    BEHIND = "behind"


class AnswerParser:
    """Of one choice. `id_of` its calls, by their number.

    White space beside markers belongs to them.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        id_of: Callable[[int], str],
        *,
        begins_in_reasoning: bool = False,
    ) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._id_of = id_of
        self._mode = _Mode.BEGINNING
        # Not told yet: of a call all of it, else white space and what may become a marker.
        self._held = ""
        # Of a call: what stood before it, and its value of JSON.
        self._marker = ""
        self._value = _Value()
        self._is_after_marker = False
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []
        self._count = 0
        if begins_in_reasoning and reasoning is not None:
            self._enter_reasoning("")

    def feed(self, text: str) -> Said:
        """More of the output."""
        self._held += text
        while self._step():
            pass
        return self._said()

    def flush(self) -> Said:
        """The output has ended."""
        while self._mode is _Mode.CALL:
            self._give_up()
            while self._step():
                pass
        held, self._held = self._held, ""
        if self._mode is _Mode.REASONING:
            self._thoughts.append(held.rstrip(SPACE))
        elif self._mode is _Mode.CONTENT or not self._is_after_marker:
            self._content.append(held)
        return self._said()

    def _said(self) -> Said:
        said = Said("".join(self._content), "".join(self._thoughts), tuple(self._calls))
        self._content, self._thoughts, self._calls = [], [], []
        return said

    def _step(self) -> bool:
        """Whether to go on with what is held."""
        match self._mode:
            case _Mode.BEGINNING:
                return self._begin()
            case _Mode.REASONING:
                return self._think()
            case _Mode.CONTENT:
                return self._go_on()
            case _Mode.CALL:
                return self._read_call()
            case _Mode.BEHIND:
                return self._leave_call()

    def _begin(self) -> bool:
        """White space says nothing yet."""
        begun = self._held.lstrip(SPACE)
        if not begun:
            return False
        reasoning = None if self._is_after_marker else self._reasoning
        if reasoning is not None and begun.startswith(reasoning.begin):
            self._enter_reasoning(begun[len(reasoning.begin) :])
            return True
        if reasoning is not None and reasoning.begin.startswith(begun):
            return False
        if self._tools is not None and self._tools.begins_bare and begun[0] in OPENS:
            self._enter_call(self._held[: -len(begun)], begun)
            return True
        if self._is_after_marker:
            self._held = begun
        self._mode = _Mode.CONTENT
        return True

    def _enter_reasoning(self, held: str) -> None:
        self._mode, self._held, self._is_after_marker = _Mode.REASONING, held, True

    def _think(self) -> bool:
        assert self._reasoning is not None
        if self._is_after_marker:
            self._held = self._held.lstrip(SPACE)
            self._is_after_marker = not self._held
        before, found, behind = self._held.partition(self._reasoning.end)
        if not found:
            self._tell(self._thoughts, self._reasoning.end)
            return False
        self._thoughts.append(before.rstrip(SPACE))
        self._mode, self._held, self._is_after_marker = _Mode.BEGINNING, behind, True
        return True

    def _go_on(self) -> bool:
        begin = self._tools.begin if self._tools is not None else ""
        before, found, behind = self._held.partition(begin) if begin else (self._held, "", "")
        if not found:
            self._tell(self._content, begin)
            return False
        told = before.rstrip(SPACE)
        self._content.append(told)
        self._enter_call(before[len(told) :] + begin, behind)
        return True

    def _tell(self, told: list[str], marker: str) -> None:
        """What is neither the beginning of the marker nor white space before it."""
        if not marker:
            told.append(self._held)
            self._held = ""
            return
        before = self._held[: len(self._held) - _could_begin(self._held, marker)].rstrip(SPACE)
        told.append(before)
        self._held = self._held[len(before) :]

    def _enter_call(self, marker: str, held: str) -> None:
        self._mode, self._marker, self._held = _Mode.CALL, marker, held
        self._value = _Value(self._tools.name_ends if self._tools is not None else "")

    def _read_call(self) -> bool:
        end = self._value.end_in(self._held)
        if end is None:
            return False
        assert self._tools is not None
        calls = _calls_of(self._held[:end], self._tools) if end else None
        if calls is None:
            self._give_up()
            return True
        for name, arguments in calls:
            self._calls.append(Call(self._id_of(self._count), name, arguments))
            self._count += 1
        self._mode, self._held, self._is_after_marker = _Mode.BEHIND, self._held[end:], True
        return True

    def _give_up(self) -> None:
        """It is no call: what was read of it is content, and what follows may be one."""
        end = self._value.read
        self._content.append(self._marker + self._held[:end])
        self._mode, self._held = _Mode.CONTENT, self._held[end:]

    def _leave_call(self) -> bool:
        assert self._tools is not None
        end, rest = self._tools.end, self._held.lstrip(SPACE + SEPARATOR)
        if end and rest.startswith(end):
            self._held, self._mode = rest[len(end) :], _Mode.BEGINNING
            return True
        if not rest or (end and end.startswith(rest)):
            return False
        self._held, self._mode = rest, _Mode.BEGINNING
        return True


class _Value:
    """Finds where a value of JSON ends, reading each character once."""

    def __init__(self, name_ends: str = "") -> None:
        self.read = 0
        self._name_ends = name_ends
        self._depth = 0
        self._is_in_text = self._is_escaped = False

    def end_in(self, held: str) -> int | None:
        """None: not yet. 0: there is no object and no list."""
        if self._name_ends:
            name, found, _ = held.partition(self._name_ends)
            if "\n" in name or len(name) > NAME_CHARS_MAX:
                return 0
            if not found:
                return None
            self.read, self._name_ends = len(name) + len(found), ""
        while self.read < len(held):
            char = held[self.read]
            self.read += 1
            if self._is_in_text:
                self._take_text(char)
            elif char == '"' and self._depth:
                self._is_in_text = True
            elif char in DEPTHS:
                self._depth += DEPTHS[char]
                if self._depth <= 0:
                    return self.read if not self._depth else 0
            elif not self._depth and char not in SPACE:
                return 0
        return None

    def _take_text(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_text = False


def _could_begin(text: str, marker: str) -> int:
    """Of the longest end of the text that a marker begins with, the length."""
    most = min(len(text), len(marker) - 1)
    return next((size for size in range(most, 0, -1) if marker.startswith(text[-size:])), 0)


def _calls_of(text: str, tools: ToolFormat) -> list[tuple[str, str]] | None:
    """Names and arguments; None: it is no call."""
    name = ""
    if tools.name_ends:
        name, _, text = text.partition(tools.name_ends)
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if name.strip():
        value = {"name": name.strip(), "arguments": value}
    calls = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _call_of(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    given = value.get("arguments", value.get("parameters"))
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            return None
    if given is None and not value.keys() & {"arguments", "parameters"}:
        return None
    if not isinstance(given, dict | None):
        return None
    return name, _text_of(given or {})


def _text_of(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half a surrogate pair, which JSON can carry and UTF-8 cannot.
        return json.dumps(arguments)
    return text


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if value - value == 0 else _refuse(text)
