"""Reads the JSON of tool calls in growing text: where a call's arguments begin, and where they end.

Pure. Only as much of JSON is looked at as that takes: what stands between is the model's word.
"""

import json
import re
from collections.abc import Collection
from typing import Final, NamedTuple

from gateway.text.tools.formats import ToolFormat

# Before the arguments there is a name and little else. What is longer is no call.
HEAD_CHARS_MAX: Final = 1024
ARGUMENTS: Final = ('"arguments"', '"parameters"')
MARKS: Final = frozenset("{}[]:,")
TOKEN: Final = re.compile(
    r"[ \t\r\n]*([{}\[\]:,]|\"(?:[^\"\\]|\\.)*\"|[-+.\w]+(?=[ \t\r\n,}\]]))", re.DOTALL
)
# What a token may look like that has not ended.
UNFINISHED: Final = re.compile(r"[ \t\r\n]*(?:\"(?:[^\"\\]|\\.)*\\?|[-+.\w]*)", re.DOTALL)
IN_STRING: Final = re.compile(r'["\\]')


class NoCall(Exception):
    """What began like a call is none: other JSON, no JSON, or a function that nobody offered."""


class _Unfinished(Exception):
    """It may become a call."""


class Head(NamedTuple):
    """A call up to its arguments, or all of a call that has none: so many characters."""

    name: str
    length: int
    has_arguments: bool


def head_of(text: str, names: Collection[str], form: ToolFormat) -> Head | None:
    """The head that a text begins with; None: it may have one yet. NoCall: it never will.

    A call names a known function first, then its arguments, which are an object.
    """
    try:
        return _marked(text, names, form) if form.arguments_mark else _object(text, names)
    except _Unfinished:
        if len(text) > HEAD_CHARS_MAX:
            raise NoCall from None
        return None


def _marked(text: str, names: Collection[str], form: ToolFormat) -> Head:
    said, mark, rest = text.partition(form.arguments_mark)
    name = said.partition(form.id_mark)[0].strip() if form.id_mark else said.strip()
    if not mark:
        # Already now it could be none of them: nobody waits for the mark in vain.
        if not any(each.startswith(name) or name.startswith(each) for each in names):
            raise NoCall
        raise _Unfinished
    if name not in names:
        raise NoCall
    tokens = _Tokens(text, len(text) - len(rest))
    tokens.take("{")
    return Head(name, tokens.position - 1, True)


def _object(text: str, names: Collection[str]) -> Head:
    tokens, name = _Tokens(text), ""
    tokens.take("{")
    mark = ","
    while mark == ",":
        key = tokens.next()
        tokens.take(":")
        value = tokens.next()
        if key in ARGUMENTS and name and value == "{":
            return Head(name, tokens.position - 1, True)
        if key in ARGUMENTS or value in MARKS:
            raise NoCall
        if key == '"name"':
            name = _string(value)
            if name not in names:
                raise NoCall
        mark = tokens.next()
    if mark != "}" or not name:
        raise NoCall
    return Head(name, tokens.position, False)


def _string(token: str) -> str:
    try:
        return str(json.loads(token, strict=False))
    except ValueError:
        raise NoCall from None


class _Tokens:
    """The tokens of JSON in a text that may have been cut."""

    def __init__(self, text: str, position: int = 0) -> None:
        self._text = text
        self.position = position

    def next(self) -> str:
        match = TOKEN.match(self._text, self.position)
        if match is not None:
            self.position = match.end()
            return match[1]
        if UNFINISHED.fullmatch(self._text, self.position):
            raise _Unfinished
        raise NoCall

    def take(self, token: str) -> None:
        if self.next() != token:
            raise NoCall


class Closing:
    """Finds where an object ends, in a text that comes in parts; each character is looked at once.

    `depth`: how many objects and lists are open already.
    """

    def __init__(self, end: str, depth: int = 0) -> None:
        """`end`: a mark that ends it too, unless it stands in a string; empty: none."""
        mark = f"|{re.escape(end)}" if end else ""
        self._outside = re.compile(f'["{{}}\\[\\]]{mark}')
        self._depth = depth
        self._is_escaped = False
        self.is_in_string = False

    def find(self, text: str) -> int | None:
        """Behind the bracket that closes it, or where the mark begins. None: not in this part."""
        position = 0
        if self._is_escaped and text:
            position, self._is_escaped = 1, False
        while match := (IN_STRING if self.is_in_string else self._outside).search(text, position):
            mark, position = match[0], match.end()
            if mark == '"':
                self.is_in_string = not self.is_in_string
            elif mark == "\\":
                self._is_escaped = position == len(text)
                position += 1
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position
            else:
                return match.start()
        return None
