"""Conversations that chat templates differ over; what transformers and the gateway make of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.text.chat_template import ChatTemplate, TemplateFailed
from tests.support import warm_python

NAMES: Final = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
Message = Mapping[str, Any]


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call00{number:03}", "type": "function", "function": function}


CITY: Final = {"type": "string", "description": 'Where, as in "São Paulo" or 東京 <b>&\''}
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.\nNot of a country.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": CITY,
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 7.5},
                "items": {"type": "array", "items": {"type": "string"}, "nullable": True},
                "where": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}, "values": {"type": "boolean"}},
                    "required": ["lat"],
                },
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Final = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
        "return": {"type": "string"},
    },
}
TOOLS: Final = [WEATHER, CLOCK]

SYSTEM: Final = said("system", "You are brief. ")
HELLO: Final = said("user", "Hello!")
ASK: Final = said("user", "How is the weather in Paris?")
BOT: Final = said("assistant", "Hi. How may I help?")
ODD: Final = said(
    "user", " \n日本語 🍣 ñandú “x” <b>&'\"\\n {{ x }} {% y %} \u2028\u202e\tend \n\n"
)
ARGUMENTS: Final = {
    "city": "São Paulo",
    "days": 3,
    "at": 1.0,
    "is_sure": True,
    "unit": None,
    "items": ["a", {"b": 0.25}],
}
CALLS: Final = [call("get_weather", ARGUMENTS)]
RESULT: Final = said("tool", '{"sky": "clear"}', name="get_weather", tool_call_id="call00001")
TIME: Final = said("tool", "12:00 <b>", name="clock", tool_call_id="call00002")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One conversation, and what is known beside it."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


CASES: Final[dict[str, Case]] = {
    "user": Case(messages=[HELLO]),
    "system": Case(messages=[SYSTEM, HELLO]),
    "turns": Case(messages=[HELLO, BOT, ASK]),
    "system and turns": Case(messages=[SYSTEM, HELLO, BOT, ASK, BOT, HELLO]),
    "the assistant last": Case(messages=[SYSTEM, HELLO, BOT]),
    "unicode": Case(
        messages=[said("system", ODD["content"]), ODD, said("assistant", " 🍣\n"), ODD]
    ),
    "an empty system": Case(messages=[said("system", ""), HELLO]),
    "an empty turn": Case(messages=[said("user", ""), said("assistant", ""), HELLO]),
    "a developer": Case(messages=[said("developer", "Be kind."), HELLO]),
    "names": Case(
        messages=[said("user", "I am here", name="Ada"), BOT, said("user", "x", name="Bo")]
    ),
    "parts": Case(
        messages=[said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    ),
    "two users": Case(messages=[HELLO, ASK]),
    "reasoning": Case(
        messages=[HELLO, said("assistant", "Yes.", reasoning_content="Hm.\nOr no?"), ASK]
    ),
    "a thought in the text": Case(
        messages=[HELLO, said("assistant", "<think>\nHm.\n</think>\n\nYes."), ASK, BOT, HELLO]
    ),
    "no thinking": Case(messages=[HELLO], options={"enable_thinking": False, "thinking": False}),
    "thinking": Case(messages=[SYSTEM, HELLO], options={"enable_thinking": True, "thinking": True}),
    "an effort": Case(messages=[HELLO], options={"reasoning_effort": "high"}),
    "documents": Case(
        messages=[SYSTEM, ASK], options={"documents": [{"title": "Sky", "text": "Clear.\n"}]}
    ),
    "tools": Case(messages=[ASK], tools=TOOLS),
    "tools and system": Case(messages=[SYSTEM, HELLO, BOT, ASK], tools=TOOLS),
    "no tools": Case(messages=[ASK], tools=[]),
    "a call": Case(messages=[ASK, said("assistant", None, tool_calls=CALLS)], tools=TOOLS),
    "a result": Case(
        messages=[SYSTEM, ASK, said("assistant", "", tool_calls=CALLS), RESULT], tools=TOOLS
    ),
    "a call without content": Case(
        messages=[ASK, {"role": "assistant", "tool_calls": CALLS}, RESULT, BOT, HELLO], tools=TOOLS
    ),
    "a call beside text": Case(
        messages=[ASK, said("assistant", "Let me see.", tool_calls=CALLS), RESULT, BOT], tools=TOOLS
    ),
    "two calls": Case(
        messages=[
            ASK,
            said("assistant", None, tool_calls=[*CALLS, call("clock", {}, 2)]),
            RESULT,
            TIME,
            said("assistant", "Clear at noon."),
            HELLO,
        ],
        tools=TOOLS,
    ),
    "arguments as text": Case(
        messages=[
            ASK,
            said("assistant", None, tool_calls=[call("get_weather", json.dumps(ARGUMENTS))]),
            RESULT,
        ],
        tools=TOOLS,
    ),
    "a result without tools": Case(
        messages=[ASK, said("assistant", None, tool_calls=CALLS), RESULT]
    ),
    "a thought before a call": Case(
        messages=[
            ASK,
            said("assistant", "", reasoning_content="Look it up.", tool_calls=CALLS),
            RESULT,
        ],
        tools=TOOLS,
        options={"enable_thinking": True},
    ),
}

# What is said of each: a text, what raise_exception was told, or that it failed otherwise.
Outcome = tuple[str, str]
# `apply_chat_template` calls this, with the tokenizer's special tokens as further names.
ORACLE: Final = """
import json, sys, jinja2
from transformers.utils.chat_template_utils import render_jinja_template

def outcome(template, names, messages, tools, options):
    try:
        texts, _ = render_jinja_template(
            [messages], tools=tools, chat_template=template, **names, **options)
        return "text", texts[0]
    except Exception as error:
        if type(error) is jinja2.TemplateError:
            return "raised", str(error)
        return "failed", f"{type(error).__name__}: {error}"

asked = json.load(sys.stdin)
json.dump([
    [outcome(template, asked["names"], *case) for case in asked["cases"]]
    for template in asked["templates"]
], sys.stdout)
"""


def renderings() -> Iterator[tuple[str, Case, dict[str, Any]]]:
    """Each case with and without the prompt for an answer, and as an answer that goes on."""
    for name, case in CASES.items():
        for is_prompted in (True, False):
            options = {**case.options, "add_generation_prompt": is_prompted}
            yield f"{name}, {'prompted' if is_prompted else 'not prompted'}", case, options
        last = case.messages[-1]
        if isinstance(last.get("content"), str) and last["content"] and "tool_calls" not in last:
            going = {**case.options, "add_generation_prompt": False, "continue_final_message": True}
            yield f"{name}, going on", case, going


def oracle(templates: Sequence[str]) -> list[list[Outcome]]:
    """What transformers says of each template, in the order of `renderings`."""
    cases = [(case.messages, case.tools, options) for _, case, options in renderings()]
    asked = json.dumps({"names": NAMES, "templates": templates, "cases": cases})
    done = warm_python.run("-c", ORACLE, imports=warm_python.TRANSFORMERS, stdin=asked)
    assert done.code == 0, done.err[-2000:]
    return [[(kind, text) for kind, text in each] for each in json.loads(done.out)]


def ours(template: str) -> list[Outcome]:
    """What the gateway says, in the order of `renderings`."""
    try:
        compiled = ChatTemplate(template, NAMES)
    except TemplateFailed as error:
        return [("failed", str(error))] * len(list(renderings()))
    return [_outcome(compiled, case, options) for _, case, options in renderings()]


def _outcome(template: ChatTemplate, case: Case, options: Mapping[str, Any]) -> Outcome:
    names = {"tools": case.tools, **options}
    goes_on = names.pop("continue_final_message", False)
    try:
        return "text", template.render(case.messages, goes_on, **names)
    except TemplateFailed as error:
        return "raised", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"


def agree(own: Outcome, theirs: Outcome) -> bool:
    """Where transformers fails otherwise than by the template's own words, or leaves its mark of
    what goes on in the text, anything will do."""
    return own == theirs or theirs[0] == "failed" or "CONTINUE_FINAL_MESSAGE_TAG" in theirs[1]
