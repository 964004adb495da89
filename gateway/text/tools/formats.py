"""How each family of models writes tool calls and reasoning: data, as their templates have it.

A new family is an entry here, unless it writes calls as none of these does.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """What stands around a call, and how the call itself is written: an object of JSON."""

    # Begins a call, or a list of calls.
    begin: str
    # After it; empty: the call ends by itself.
    end: str = ""
    # One list of all calls, and not markers around each.
    is_list: bool = False
    # Where an answer that is nothing but JSON is a call, too.
    begins_bare: bool = False
    # Between a name, which is then no part of the JSON, and the arguments.
    name_ends: str = ""
    arguments: str = "arguments"
    # As the family's own client writes it around the JSON.
    space: str = ""
    # Characters of a call's id, which some templates insist on; 0: call_ and 24 more.
    id_chars: int = 0
    # In a template: all of these, and none of those, where it is one of this family's.
    told_by: tuple[str, ...]
    not_by: tuple[str, ...] = ()

    def is_of(self, template: str) -> bool:
        has_all = all(told in template for told in self.told_by)
        return has_all and not any(told in template for told in self.not_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    begin: str
    end: str


TOOL_FORMATS: Final[dict[str, ToolFormat]] = {
    # Qwen 2.5 and 3, Hermes 2 and 3.
    "hermes": ToolFormat(
        begin="<tool_call>",
        end="</tool_call>",
        space="\n",
        told_by=("<tool_call>",),
        # GLM and Qwen Coder write XML between the same markers.
        not_by=("<arg_key>", "<function="),
    ),
    "mistral-v11": ToolFormat(
        begin="[TOOL_CALLS]", name_ends="[ARGS]", id_chars=9, told_by=("[TOOL_CALLS]", "[ARGS]")
    ),
    "mistral": ToolFormat(
        begin="[TOOL_CALLS]", is_list=True, id_chars=9, told_by=("[TOOL_CALLS]",)
    ),
    "phi4": ToolFormat(
        begin="<|tool_call|>", end="<|/tool_call|>", is_list=True, told_by=("<|/tool_call|>",)
    ),
    "granite": ToolFormat(begin="<|tool_call|>", is_list=True, told_by=("<|tool_call|>",)),
    "jamba": ToolFormat(
        begin="<tool_calls>", end="</tool_calls>", is_list=True, told_by=("<tool_calls>",)
    ),
    "nemotron": ToolFormat(
        begin="<TOOLCALL>", end="</TOOLCALL>", is_list=True, told_by=("<TOOLCALL>",)
    ),
    "llama3": ToolFormat(
        begin="<|python_tag|>",
        begins_bare=True,
        arguments="parameters",
        told_by=('"parameters": \'', "<|eot_id|>"),
    ),
    # Gemma 3, and whoever is told in words alone to answer with an object: no template says so.
    "json": ToolFormat(begin="", begins_bare=True, arguments="parameters", told_by=("\0",)),
}
REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "think": ReasoningFormat(begin="<think>", end="</think>"),
    "mistral": ReasoningFormat(begin="[THINK]", end="[/THINK]"),
}


def tool_format_of(template: str) -> str:
    """Of a chat template; empty: it knows no tools, or writes calls as none of these."""
    found = (name for name, each in TOOL_FORMATS.items() if each.is_of(template))
    return next(found, "") if "tools" in template else ""


def reasoning_format_of(template: str) -> str:
    """Of a chat template; empty: it tells of none."""
    return next((name for name, each in REASONING_FORMATS.items() if each.end in template), "")
