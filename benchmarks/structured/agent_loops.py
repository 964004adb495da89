"""Agents that go on: loops of tool calls that are forced, in the format of every family.

    python -m benchmarks.structured.agent_loops [--turns 200] [--only qwen mistral] [--save]

Each family is a whole stack with a random model, the family's template, marks and tokenizer
(`checkpoints`), and OpenAI's client. An agent asks, the model must call, a function of this process
is called with what it wrote, its result goes back, and after some calls the model says something.
The conversation is the last few questions with all that came of them. A turn is streamed or whole,
in chat or in responses, with a tool by name or any, with one call or several.

turns      that had to call
calls      that were told; `parallel` turns told several, `thought` had reasoning before them
valid      turns all of whose calls are valid by their tools' schemas, and could be made
cut        turns that max_tokens cut off; they do not go on in the conversation. `heads`: of these,
           how many before the arguments of a call, of which that much is told as text
wrong      any other; each is listed
leaks      turns with content, which a turn that must call never has, or a mark in the reasoning
alike      turns asked a second time by the same seed, streamed where they were whole and the other
           way round, that told the same calls; of so many
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import openai
from jsonschema import Draft202012Validator
from openai import OpenAI

from benchmarks import recording
from benchmarks.structured.checkpoints import FAMILIES, Family, write
from kernels import native
from tests.support.tokenizers import token_id
from tests.support.whole_stack import MODEL, WholeStack

CALLS_EACH: Final = 4
QUESTIONS_KEPT: Final = 2
TOKENS_MAX: Final = 1000
WORDS_MAX: Final = 12
ASKED_TWICE: Final = 10
# Random models rarely end what they begin, and some of them nearly always say the same.
TEMPERATURE: Final = 2
BIAS: Final = 10
END_BIAS: Final = 5
THOUGHT_END: Final = "</think>"
CLOSING: Final = ('"', "}", THOUGHT_END)

_DISH: Final = {"enum": ["crab", "eel", "octopus"]}
PRICES: Final = {"crab": 12, "eel": 15, "octopus": 9}


class Tool(NamedTuple):
    """A function of this process and what its arguments are."""

    parameters: dict[str, Any]
    run: Callable[..., Any]


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": required} | closed


def _order(dish: str, plates: int, wishes: str | None = None) -> Any:
    return {"dish": dish, "plates": plates, "costs": PRICES[dish] * plates, "wishes": wishes}


def _seat(party: list[dict[str, Any]], at: str, terrace: bool = False) -> Any:
    return {"seats": len(party), "at": at, "names": [each["name"] for each in party]}


_GUEST: Final = _object(
    ["name"],
    name={"type": "string", "maxLength": 16},
    age={"type": "number", "minimum": 0, "maximum": 120},
)
_SEAT: Final = _object(
    ["party", "at"],
    party={"type": "array", "items": {"$ref": "#/$defs/guest"}, "minItems": 1, "maxItems": 3},
    at={"type": "string", "pattern": "^(1[89]|2[0-2]):[0-5][0-9]$"},
    terrace={"type": "boolean"},
)
_ORDER: Final = _object(
    ["dish", "plates"],
    dish=_DISH,
    plates={"type": "integer", "minimum": 1, "maximum": 20},
    wishes={"anyOf": [{"type": "string", "maxLength": 24}, {"type": "null"}]},
)
TOOLS: Final[Mapping[str, Tool]] = {
    "price_of": Tool(_object(["dish"], dish=_DISH), lambda dish: {"costs": PRICES[dish]}),
    "order": Tool(_ORDER, _order),
    "seat": Tool(_SEAT | {"$defs": {"guest": _GUEST}}, _seat),
    # Anything goes, braces, quotes and marks included.
    "note": Tool(_object(["text"], text={"type": "string"}), lambda text: {"chars": len(text)}),
    "bill": Tool(_object([]), lambda: 36.5),
}


class Call(NamedTuple):
    """As the client got it."""

    id: str
    name: str
    arguments: str


class Told(NamedTuple):
    """What a turn told."""

    calls: list[Call]
    content: str
    reasoning: str
    is_cut: bool


class Asked(NamedTuple):
    """How a turn is asked for. `name`: of the tool that must be called; empty: any."""

    number: int
    name: str
    is_single: bool
    is_streamed: bool
    is_response: bool

    @classmethod
    def of(cls, number: int) -> "Asked":
        name = list(TOOLS)[number // 3 % len(TOOLS)] if number % 3 == 2 else ""
        return cls(number, name, number % 4 == 1, number % 2 == 1, number % 5 == 4)


@dataclass
class Question:
    """What a user said, and what came of it."""

    text: str
    turns: list[list[tuple[Call, str]]] = field(default_factory=list)
    answer: str | None = None

    def messages(self) -> list[Any]:
        said: list[Any] = [{"role": "user", "content": self.text}]
        for turn in self.turns:
            calls = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for (id, name, arguments), _ in turn
            ]
            said.append({"role": "assistant", "content": None, "tool_calls": calls})
            said += [{"role": "tool", "tool_call_id": c.id, "content": got} for c, got in turn]
        return said + self._end()

    def items(self) -> list[Any]:
        said: list[Any] = [{"role": "user", "content": self.text}]
        for turn in self.turns:
            said += [
                {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
                for (id, name, arguments), _ in turn
            ]
            said += [
                {"type": "function_call_output", "call_id": c.id, "output": got} for c, got in turn
            ]
        return said + self._end()

    def _end(self) -> list[Any]:
        return [] if self.answer is None else [{"role": "assistant", "content": self.answer}]


class Agent:
    """One conversation with one model."""

    def __init__(self, client: OpenAI, family: Family, bias: Mapping[str, int]) -> None:
        self._client = client
        self._system: list[Any] = (
            [{"role": "system", "content": family.system}] if family.system else []
        )
        self._bias = dict(bias)
        self._questions: list[Question] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []

    def go(self, turns: int) -> None:
        for number in range(turns):
            if number % CALLS_EACH == 0:
                text = f"Table {number} wants something."
                self._questions = [*self._questions[-QUESTIONS_KEPT:], Question(text)]
            asked = Asked.of(number)
            try:
                is_taken = self._take(asked, self._ask(asked))
                if is_taken and number % ASKED_TWICE == 0:
                    self._ask_again(asked)
                if number % CALLS_EACH == CALLS_EACH - 1:
                    self._questions[-1].answer = self._answer(number)
            except openai.OpenAIError as error:
                self._note(asked, f"{type(error).__name__}: {error}", "")

    def _take(self, asked: Asked, told: Told) -> bool:
        """Whether the conversation goes on with it."""
        self.counts["turns"] += 1
        self.counts["calls"] += len(told.calls)
        self.counts["parallel"] += len(told.calls) > 1
        self.counts["thought"] += bool(told.reasoning)
        if told.is_cut:
            self.counts["cut"] += 1
            self.counts["heads"] += bool(told.content)
            return False
        self.counts["leaks"] += bool(told.content) or THOUGHT_END in told.reasoning
        try:
            results = [(call, made(call)) for call in told.calls]
            why = why_wrong(asked, told)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            self._note(asked, why, repr(told))
            return False
        self.counts["valid"] += 1
        self._questions[-1].turns.append(results)
        return True

    def _ask_again(self, asked: Asked) -> None:
        """The turn that was just taken is out of the conversation for as long as that lasts."""
        turns = self._questions[-1].turns
        taken = turns.pop()
        again = self._ask(asked._replace(is_streamed=not asked.is_streamed))
        turns.append(taken)
        self.counts["asked twice"] += 1
        self.counts["alike"] += [call[1:] for call, _ in taken] == [c[1:] for c in again.calls]

    def _note(self, asked: Asked, why: str, told: str) -> None:
        self.counts["wrong"] += 1
        self.wrong.append({"asked": str(asked), "why": why[:300], "told": told[:300]})

    def _ask(self, asked: Asked) -> Told:
        return self._respond(asked) if asked.is_response else self._chat(asked)

    def _chat(self, asked: Asked) -> Told:
        functions = [{"name": name, "parameters": t.parameters} for name, t in TOOLS.items()]
        named = {"type": "function", "function": {"name": asked.name}}
        fields: dict[str, Any] = {
            "model": MODEL,
            "messages": self._system + [m for each in self._questions for m in each.messages()],
            "tools": [{"type": "function", "function": each} for each in functions],
            "tool_choice": named if asked.name else "required",
            "parallel_tool_calls": not asked.is_single,
            "max_tokens": TOKENS_MAX,
            "seed": asked.number,
            "temperature": TEMPERATURE,
            "logit_bias": self._bias,
        }
        if asked.is_streamed:
            choice: Any = self._streamed(fields)
        else:
            choice = self._client.chat.completions.create(**fields).choices[0]
        calls = choice.message.tool_calls or ()
        return Told(
            [Call(each.id, each.function.name, each.function.arguments) for each in calls],
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", None) or "",
            choice.finish_reason == "length",
        )

    def _streamed(self, fields: dict[str, Any]) -> Any:
        try:
            with self._client.chat.completions.stream(**fields) as stream:
                return stream.get_final_completion().choices[0]
        except openai.LengthFinishReasonError as error:
            return error.completion.choices[0]

    def _respond(self, asked: Asked) -> Told:
        tools: list[Any] = [
            {"type": "function", "name": name, "parameters": tool.parameters}
            for name, tool in TOOLS.items()
        ]
        named = {"type": "function", "name": asked.name}
        fields: dict[str, Any] = {
            "model": MODEL,
            "input": self._system + [i for each in self._questions for i in each.items()],
            "tools": tools,
            "tool_choice": named if asked.name else "required",
            "parallel_tool_calls": not asked.is_single,
            "max_output_tokens": TOKENS_MAX,
            "temperature": TEMPERATURE,
            "extra_body": {"seed": asked.number, "logit_bias": self._bias},
        }
        if asked.is_streamed:
            # The helper's own question for the end knows no response that is incomplete.
            with self._client.responses.stream(**fields) as stream:
                events: list[Any] = list(stream)
            response: Any = events[-1].response
        else:
            response = self._client.responses.create(**fields)
        by_type: dict[str, list[Any]] = {}
        for item in response.output:
            by_type.setdefault(item.type, []).append(item)
        thoughts = [part.text for each in by_type.get("reasoning", ()) for part in each.content]
        calls = by_type.get("function_call", ())
        return Told(
            [Call(each.call_id, each.name, each.arguments) for each in calls],
            response.output_text,
            "".join(thoughts),
            response.status == "incomplete",
        )

    def _answer(self, number: int) -> str:
        """What the model says of it all. Its text is as random as the model."""
        messages = self._system + [m for each in self._questions for m in each.messages()]
        reply = self._client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=WORDS_MAX, seed=number
        )
        return reply.choices[0].message.content or ""


def made(call: Call) -> str:
    """What a function said. Anything it raises says that the call is wrong."""
    arguments, tool = json.loads(call.arguments), TOOLS[call.name]
    Draft202012Validator(tool.parameters).validate(arguments)
    return json.dumps(tool.run(**arguments))


def why_wrong(asked: Asked, told: Told) -> str:
    """Of a turn whose calls are valid, each by itself. Empty: nothing is."""
    if not told.calls:
        return "no call"
    if (asked.is_single or asked.name) and len(told.calls) > 1:
        return "more than one call"
    if asked.name and told.calls[0].name != asked.name:
        return "another tool"
    if len({call.id for call in told.calls}) < len(told.calls):
        return "two calls have one id"
    return "content beside the calls" if told.content else ""


def judge(folder: Path, family: Family, turns: int) -> Agent:
    """A stack for one family, which must be idle and without faults when its agent has gone."""
    tokenizer = write(folder / "model", family)
    names = [*CLOSING, *(f"<0x{ord(text):02X}>" for text in CLOSING if len(text) == 1)]
    ids = [tokenizer.token_to_id(each) for each in names]
    bias = {str(each): BIAS for each in ids if each is not None}
    bias[str(token_id(tokenizer, family.control[0]))] = END_BIAS
    flags = {"model": folder / "model"}
    with (
        WholeStack(
            folder / "stack",
            gateway_flags=flags | {"tool_format": family.tool_format},
            worker_flags=flags | {"kv_blocks": 4096},
        ) as stack,
        OpenAI(base_url=stack.door.openai, api_key="any", max_retries=0, timeout=120) as client,
    ):
        agent = Agent(client, family, bias)
        agent.go(turns)
        stack.check()
    return agent


def measure(turns: int, only: list[str]) -> dict[str, object]:
    told: dict[str, object] = {}
    wrong: list[dict[str, Any]] = []
    started = time.monotonic()
    for name, family in FAMILIES.items():
        if only and name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            agent = judge(Path(folder), family, turns)
        counts = agent.counts
        columns = (
            "turns",
            "valid",
            "cut",
            "wrong",
            "calls",
            "parallel",
            "thought",
            "leaks",
            "heads",
        )
        alike = f"{counts['alike']} of {counts['asked twice']}"
        told[name] = {column: counts[column] for column in columns} | {"alike": alike}
        wrong += [{"family": name} | each for each in agent.wrong]
        print(name, told[name], agent.wrong[:2], flush=True)
    return {"families": told, "wrong": wrong, "wall_s": round(time.monotonic() - started)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--only", nargs="+", default=[], choices=FAMILIES)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    native.build()
    recording.record("agent_loops", measure(asked.turns, asked.only), save=asked.save)


if __name__ == "__main__":
    main()
