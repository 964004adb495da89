"""The grammar of an output that must call: Lark, as llguidance reads it. Pure."""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.text.tools.formats import ReasoningFormat, ToolFormat
from gateway.values.white_space import A_LITTLE_SPACE


class Function(NamedTuple):
    """`parameters`: a JSON Schema, as JSON."""

    name: str
    parameters: str


def forced_calls(
    form: ToolFormat,
    functions: Sequence[Function],
    token_of: Callable[[str], int | None],
    *,
    is_single: bool,
    reasoning: ReasoningFormat | None = None,
    begins_in_reasoning: bool = False,
) -> str:
    """One call of one of these functions, or several; before it a reasoning part where it has one.

    `token_of`: the id of the token that is this whole text, if there is one.
    """

    def mark(text: str) -> str:
        token_id = token_of(text) if text else None
        return _quoted(text) if token_id is None else f"<[{token_id}]>"

    lines = [f"start: {_thought(reasoning, begins_in_reasoning)}calls"]
    space, call = _quoted(form.space), "call"
    begin, end = mark(form.begin), mark(form.end)
    if form.is_list:
        rest = "" if is_single else ' (", " call)*'
        lines.append(f'calls: {begin} "[" call{rest} "]" {end}')
    elif form.is_bare:
        # Trained on one at a time.
        lines.append("calls: call")
    else:
        call = f"{begin} {space} call {space} {end}"
        rest = "" if is_single else f" ({space} {call})*"
        lines.append(f"calls: {call}{rest}")
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
    for index, (name, parameters) in enumerate(functions):
        if form.arguments_mark:
            head, tail = f"{_quoted(name)} {mark(form.arguments_mark)}", ""
        else:
            head = _quoted(f'{{"name": {json.dumps(name)}, "{form.arguments_key}": ')
            tail = '"}"'
        lines.append(f"call_{index}: {head} arguments_{index} {tail}")
        lines.append(f"arguments_{index}: %json {_object(parameters)}")
    if reasoning is not None:
        lines += _thoughts(reasoning, mark)
    return "\n".join(lines) + "\n"


def _thought(reasoning: ReasoningFormat | None, begins_in_reasoning: bool) -> str:
    if reasoning is None:
        return ""
    return "thought " if begins_in_reasoning else "(begin thought)? "


def _thoughts(reasoning: ReasoningFormat, mark: Callable[[str], str]) -> list[str]:
    """Anything up to the end mark, which is a token of its own or the first such text."""
    begin, end = mark(reasoning.begin), mark(reasoning.end)
    is_token = end.startswith("<")
    return [
        f"begin: {begin}",
        f"thought: until {end} SPACE" if is_token else "thought: until SPACE",
        "until: /(?s:.*)/" if is_token else f"until[suffix={end}]: /(?s:.*)/",
        r"SPACE: /\s{0,8}/",
    ]


def _object(parameters: str) -> str:
    """A schema of an object, which arguments are, whatever it forgets to say."""
    schema = json.loads(parameters)
    spaces = {"x-guidance": {"whitespace_pattern": A_LITTLE_SPACE}}
    return json.dumps({"type": "object"} | schema | spaces)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
