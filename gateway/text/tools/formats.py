"""How model families write tool calls and reasoning, as data: nothing else names families. Pure.

`JSON` below is `{"name": …, "arguments": {…}}`, with white space wherever JSON has it.
"""

import re
from dataclasses import dataclass
from typing import Final

# A name that a template reads; in a text of it, it may stand for anything.
TOOLS: Final = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """`begin` and `end` are around one call, or around a list of them (`is_list`)."""

    name: str
    begin: str
    # Empty: with its JSON a call is complete.
    end: str = ""
    is_list: bool = False
    # Written before the arguments; both names are read.
    arguments_key: str = "arguments"
    # Not empty: a call is its name, this, and the arguments; else it is JSON.
    arguments_mark: str = ""
    # After a name, with what the model takes for an id.
    id_mark: str = ""
    # An output that begins with `{` is a call without `begin`.
    is_bare: bool = False
    # Between calls that are neither in a list nor between marks of their own.
    separator: str = ""
    # Inside of the marks and between calls, as the model was trained to write.
    space: str = ""
    # Ids of so many letters and digits; 0: OpenAI's.
    id_chars: int = 0
    # A chat template of it has all of these, and none of those.
    signs: tuple[str, ...] = ()
    others_signs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """An output begins with `begin`, or its prompt ends with it. Behind `end` the answer begins."""

    name: str
    begin: str
    end: str


# In the order in which they are looked for.
TOOL_FORMATS: Final = (
    # [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]name[ARGS]{…}: tokenizers v11 and later.
    ToolFormat(
        name="mistral-v11",
        begin="[TOOL_CALLS]",
        arguments_mark="[ARGS]",
        id_mark="[CALL_ID]",
        id_chars=9,
        signs=("[TOOL_CALLS]", "[ARGS]"),
    ),
    # [TOOL_CALLS][JSON, JSON]: v3 and v7.
    ToolFormat(
        name="mistral", begin="[TOOL_CALLS]", is_list=True, id_chars=9, signs=("[TOOL_CALLS]",)
    ),
    # <|tool_call|>[JSON, JSON]<|/tool_call|>: Phi-4-mini.
    ToolFormat(
        name="phi4",
        begin="<|tool_call|>",
        end="<|/tool_call|>",
        is_list=True,
        signs=("<|tool_call|>", "<|/tool_call|>"),
    ),
    # The same without an end: Granite 3.
    ToolFormat(name="granite", begin="<|tool_call|>", is_list=True, signs=("<|tool_call|>",)),
    ToolFormat(
        name="jamba",
        begin="<tool_calls>",
        end="</tool_calls>",
        is_list=True,
        signs=("<tool_calls>",),
    ),
    ToolFormat(
        name="nemotron", begin="<TOOLCALL>", end="</TOOLCALL>", is_list=True, signs=("<TOOLCALL>",)
    ),
    # <tool_call>\nJSON\n</tool_call>, as often as there are calls: Hermes, Qwen 2.5 and 3. Others
    # have XML between the same marks.
    ToolFormat(
        name="hermes",
        begin="<tool_call>",
        end="</tool_call>",
        space="\n",
        signs=("<tool_call>",),
        others_signs=("<function=", "<arg_key>"),
    ),
    # The whole output is JSON with "parameters": Llama 3.1 and later.
    ToolFormat(
        name="llama3",
        begin="<|python_tag|>",
        arguments_key="parameters",
        is_bare=True,
        separator=";",
        signs=("ipython", '"parameters"'),
    ),
    # The same, in a code block or not: as Google documents it for Gemma 3, whose own template knows
    # no tools.
    ToolFormat(
        name="json",
        begin="```json",
        end="```",
        arguments_key="parameters",
        is_bare=True,
        space="\n",
    ),
)
REASONING_FORMATS: Final = (
    ReasoningFormat(name="think", begin="<think>", end="</think>"),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
)
# What a setting says instead of a name.
AUTO: Final = "auto"
NONE: Final = "none"


def tool_format(template: str, name: str = AUTO) -> ToolFormat | None:
    """The named one, or the one in which a chat template writes earlier calls. None: none.

    KeyError: there is no such name.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return {each.name: each for each in TOOL_FORMATS}[name]

    for each in TOOL_FORMATS:
        is_like = each.signs and all(sign in template for sign in each.signs)
        if is_like and not any(sign in template for sign in each.others_signs):
            return each
    return None


def reasoning_format(template: str, name: str = AUTO) -> ReasoningFormat | None:
    """As `tool_format`. A template that never writes the end mark has no such part."""
    if name == NONE:
        return None
    if name != AUTO:
        return {each.name: each for each in REASONING_FORMATS}[name]
    return next((each for each in REASONING_FORMATS if each.end in template), None)


def knows_tools(template: str) -> bool:
    """Whether a chat template looks at the tools it is given."""
    return TOOLS.search(template) is not None
