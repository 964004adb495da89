"""Chats: turns, the tools that are offered, and how often which kind of chat comes.

Pure, as grammar.py is: a seed is a corpus.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tools.mini import exchanges, grammar, orders

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn. An assistant's is a text, or the call of a tool."""

    role: Role
    content: str = ""
    call: orders.Call | None = None

    def message(self) -> dict[str, Any]:
        """In the shape every chat template takes."""
        if self.call is None:
            return {"role": self.role, "content": self.content}
        function = {"name": self.call.name, "arguments": dict(self.call.arguments)}
        return {
            "role": self.role,
            "content": None,
            "tool_calls": [{"type": "function", "function": function}],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """`turns` end with the assistant's. `tools` are as a client of OpenAI's writes them."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


# Of answers beside tools, so that a chat with them fits into a row of training.
_ANSWER_CHARS_MAX: Final = 600


def chat(rng: random.Random) -> Chat:
    kinds, weights = zip(*_KINDS, strict=True)
    tell: Callable[[random.Random], Chat] = rng.choices(kinds, weights)[0]
    return tell(rng)


def talk(rng: random.Random) -> Chat:
    """One or two exchanges, sometimes after a system turn."""
    bound = grammar.bind(rng)
    told = [grammar.question(rng, bound)]
    if rng.random() < 0.35:
        if bound["dish"] in told[0][0] and rng.random() < 0.6:
            told.append(grammar.follow_up(rng, bound))
        else:
            told.append(grammar.question(rng))
    turns = _system(rng)
    for asked, answered in told:
        turns += _exchange(rng, asked, answered)
    return Chat(turns=tuple(turns))


def json_talk(rng: random.Random) -> Chat:
    """One to three questions that are answered in JSON, or one of two that is."""
    if rng.random() < 0.15:
        turns = [Turn(role="system", content=orders.JSON_SYSTEM)]
        told = [orders.as_json(rng, is_wished=False) for _ in range(rng.randint(1, 3))]
    else:
        turns = _system(rng)
        told = [orders.as_json(rng) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            told[rng.randrange(len(told))] = grammar.question(rng)
    for asked, answered in told:
        turns += _exchange(rng, asked, answered)
    return Chat(turns=tuple(turns))


def tool_talk(rng: random.Random) -> Chat:
    """One to three exchanges with tools at hand, of which some questions need one."""
    tools, names = orders.offer(rng)
    turns = _system(rng)
    for _ in range(rng.choices((1, 2, 3), (30, 40, 30))[0]):
        if names and rng.random() < 0.65:
            turns += called(rng, rng.choice(names))
        else:
            turns += without_call(rng, names)
    return Chat(turns=tuple(turns), tools=tools)


def called(rng: random.Random, name: str, *, is_held_out: bool = False) -> list[Turn]:
    """What a guest wants, the call, what the tool told, and that in words."""
    asked, call = orders.wish(rng, name, is_held_out=is_held_out)
    told, answered = orders.outcome(rng, call)
    return [
        Turn(role="user", content=_as_typed(rng, asked)),
        Turn(role="assistant", call=call),
        Turn(role="tool", content=told),
        Turn(role="assistant", content=answered),
    ]


def without_call(rng: random.Random, names: tuple[str, ...]) -> list[Turn]:
    """A question that none of these tools is for. One of which the tool is not there comes often:
    nothing else tells that tools have to be looked for.
    """
    missing = [name for name in (orders.PRICE_OF, orders.ORDER) if name not in names]
    if missing and rng.random() < 0.5:
        return _exchange(rng, *orders.without_tool(rng, rng.choice(missing)))
    while True:
        asked, answered = grammar.question(rng)
        if len(answered) < _ANSWER_CHARS_MAX and not orders.is_for_tool(answered):
            return _exchange(rng, asked, answered)


def _system(rng: random.Random) -> list[Turn]:
    if rng.random() < 0.15:
        return [Turn(role="system", content=rng.choice(exchanges.SYSTEM))]
    return []


def _exchange(rng: random.Random, asked: str, answered: str) -> list[Turn]:
    return [
        Turn(role="user", content=_as_typed(rng, asked)),
        Turn(role="assistant", content=answered),
    ]


def _as_typed(rng: random.Random, asked: str) -> str:
    """People leave out capitals and final stops; so does a part of the corpus."""
    if rng.random() < 0.1:
        asked = asked.lower()
    if rng.random() < 0.1:
        asked = asked.rstrip("?.!")
    return asked


_KINDS: Final[tuple[tuple[Callable[[random.Random], Chat], int], ...]] = (
    (talk, 60), (json_talk, 13), (tool_talk, 27),
)  # fmt: skip
