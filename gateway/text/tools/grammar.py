"""What an output that must be tool calls may be, in llguidance's Lark. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gateway.text.tools.formats import ToolFormat

ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}
# Within the arguments: a blank, or a line's beginning.
A_LITTLE_SPACE: Final = {"whitespace_pattern": r"( |\n[ \t]{0,40})?"}


class Function(NamedTuple):
    """`parameters`: a JSON Schema of the arguments; None: any object."""

    name: str
    parameters: Mapping[str, Any] | None


def calls_grammar(
    tools: ToolFormat,
    functions: Sequence[Function],
    marker_ids: Mapping[str, int],
    *,
    is_one: bool,
) -> str:
    """One call at least, of these functions. `marker_ids`: of markers that are control tokens."""

    def text(literal: str) -> str:
        token_id = marker_ids.get(literal)
        return json.dumps(literal) if token_id is None else f"<[{token_id}]>"

    begin = [text(tools.begin)] if tools.begin and not tools.begins_bare else []
    end = [text(tools.end)] if tools.end else []
    space = [text(tools.space)] if tools.space else []
    if tools.is_list:
        many = [] if is_one else ['(", " call)*']
        start = [*begin, text("["), "call", *many, text("]"), *end]
    elif tools.begins_bare:
        start = ["call"] if is_one else ["call", '("; " call)*']
    else:
        one = [*begin, *space, "call", *space, *end]
        start = one if is_one else [*one, "(", *space, *one, ")*"]
    rules = [f"start: {' '.join(start)}"]
    calls = " | ".join(f"call_{index}" for index in range(len(functions)))
    rules.append(f"call: {calls}")
    for index, each in enumerate(functions):
        schema = {**(each.parameters or ANY_ARGUMENTS), "x-guidance": A_LITTLE_SPACE}
        said = f"arguments_{index}"
        if tools.name_ends:
            call = [text(each.name), text(tools.name_ends), said]
        else:
            name = json.dumps(each.name, ensure_ascii=False)
            call = [text(f'{{"name": {name}, "{tools.arguments}": '), said, text("}")]
        rules.append(f"call_{index}: {' '.join(call)}")
        rules.append(f"{said}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join(rules)
