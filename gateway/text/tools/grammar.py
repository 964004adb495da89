"""The grammar of an output whose calls keep to their schemas: Lark, as llguidance reads it. Pure.

Where a call must be made the output is nothing but calls. Else it is an answer, calls, or both:
free text up to the first mark of a call, or what else the client asked for. Behind its calls it
ends.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pydantic_core import from_json

from gateway.text.tools.formats import ReasoningFormat, ToolFormat
from gateway.values.white_space import A_LITTLE_SPACE

ANY_OBJECT: Final = '{"type": "object"}'


class Function(NamedTuple):
    """`parameters`: a JSON Schema, as JSON."""

    name: str
    parameters: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What may be called, and how a model writes it."""

    form: ToolFormat
    functions: Sequence[Function]
    # The id of the token that is this whole text, if there is one.
    token_of: Callable[[str], int | None]
    is_single: bool
    reasoning: ReasoningFormat | None = None
    begins_in_reasoning: bool = False


def forced_calls(calls: Calls) -> str:
    """One call of one of these functions, or several, behind a reasoning part if there is one."""
    # Who calls without marks was trained on one at a time.
    marked = f"{_mark(calls, calls.form.begin)} {_behind_begin(calls)}"
    return _grammar(calls, ["call" if calls.form.is_bare else marked])


def free_calls(calls: Calls, answer: str = "") -> str:
    """An answer, calls as above, or one behind the other. `answer`: in Lark what it must be, alone;
    empty: any text that is no call. Where calls need no marks there can be none."""
    form, behind = calls.form, _behind_begin(calls)
    begin = _mark(calls, form.begin)
    ways = []
    if form.is_bare:
        has_more = form.separator and not calls.is_single
        more = f" ({_quoted(form.separator + ' ')} call)*" if has_more else ""
        ways.append(f"call{more}")
    if answer:
        assert not form.is_bare, "a call would have to be told from an answer letter by letter"
        return _grammar(calls, [f"{begin} {behind}", "answer"], f"answer: {answer}")

    # What begins with a brace is read as a call where marks are not needed. A mark that is written
    # letter by letter is read as one, too: so no text has it, be it a token or not.
    some = r"/\s*[^\s{](?s:.*)|\s*/" if form.is_bare else "/(?s:.*)/"
    if calls.reasoning is not None and not calls.begins_in_reasoning:
        # The longest lexeme wins: text that may begin as the mark does would never let it.
        some += f" & ~/{_literal(calls.reasoning.begin)}(?s:.*)/"
    lines = [f"TEXT: {some} & ~/(?s:.*){_literal(form.begin)}(?s:.*)/"]
    if begin.startswith("<"):
        return _grammar(calls, [*ways, f"TEXT {begin} {behind}", "TEXT"], *lines)
    # Unless it is known by its end.
    lines += [f"BEFORE: {some}", f"before[suffix={begin}]: BEFORE"]
    return _grammar(calls, [*ways, f"before {behind}", "TEXT"], *lines)


def _grammar(calls: Calls, ways: Sequence[str], *lines: str) -> str:
    thought = _thought(calls.reasoning, calls.begins_in_reasoning)
    start = [f"start: {thought}output", "output: " + " | ".join(ways)]
    return "\n".join([*start, *lines, *_calls(calls)]) + "\n"


def _behind_begin(calls: Calls) -> str:
    """The rest of a call, and of all that follow it, behind the first mark."""
    form = calls.form
    space, end = _quoted(form.space), _mark(calls, form.end)
    if form.is_list:
        rest = "" if calls.is_single else ' (", " call)*'
        return f'"[" call{rest} "]" {end}'
    if form.is_bare:
        return f"{space} call {space} {end}"
    begin = _mark(calls, form.begin)
    rest = "" if calls.is_single else f" ({space} {begin} {space} call {space} {end})*"
    return f"{space} call {space} {end}{rest}"


def _calls(calls: Calls) -> Iterator[str]:
    form, functions = calls.form, calls.functions
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(functions)))
    for index, (name, parameters) in enumerate(functions):
        if form.arguments_mark:
            head, tail = f"{_quoted(name)} {_mark(calls, form.arguments_mark)}", ""
        else:
            head = _quoted(f'{{"name": {json.dumps(name)}, "{form.arguments_key}": ')
            tail = '"}"'
        yield f"call_{index}: {head} arguments_{index} {tail}"
        yield f"arguments_{index}: {schema(parameters, is_object=True)}"
    if calls.reasoning is not None:
        yield from _thoughts(calls, calls.reasoning)


def _thought(reasoning: ReasoningFormat | None, begins_in_reasoning: bool) -> str:
    if reasoning is None:
        return ""
    return "thought " if begins_in_reasoning else "(begin thought)? "


def _thoughts(calls: Calls, reasoning: ReasoningFormat) -> list[str]:
    """Anything up to the end mark, which is a token of its own or the first such text."""
    begin, end = _mark(calls, reasoning.begin), _mark(calls, reasoning.end)
    is_token = end.startswith("<")
    return [
        f"begin: {begin}",
        f"thought: until {end} SPACE" if is_token else "thought: until SPACE",
        "until: /(?s:.*)/" if is_token else f"until[suffix={end}]: /(?s:.*)/",
        r"SPACE: /\s{0,8}/",
    ]


def schema(text: str, *, is_object: bool = False, is_tight: bool = False) -> str:
    """JSON that keeps to a schema, in Lark. `is_object`: it is one, whatever it forgets to say.

    ValueError: the text is no JSON.
    """
    spaces = {"whitespace_flexible": False} if is_tight else {"whitespace_pattern": A_LITTLE_SPACE}
    said = from_json(text, allow_inf_nan=False)
    if not isinstance(said, dict):
        # Options stand in objects only.
        said = {} if said is True else {"enum": []}
    any_type = {"type": "object"} if is_object else {}
    return "%json " + json.dumps(any_type | said | {"x-guidance": spaces})


def _mark(calls: Calls, text: str) -> str:
    token_id = calls.token_of(text) if text else None
    return _quoted(text) if token_id is None else f"<[{token_id}]>"


def _literal(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
