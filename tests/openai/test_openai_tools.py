"""The shipped model calls its two tools because it was asked to, not because a grammar makes it."""

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.support.whole_stack import MODEL

DISH: dict[str, Any] = {"type": "string"}


def tool(name: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


PRICE_OF = tool("price_of", dish=DISH)
ORDER = tool("order", dish=DISH, plates={"type": "integer"})
TOOLS = [PRICE_OF, ORDER]


def told(client: OpenAI, *messages: Any, **asked: Any) -> Any:
    """The one choice of a greedy answer."""
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=200, **asked
    )
    return reply.choices[0]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


CALLS = [
    ("How much is the eel?", "price_of", {"dish": "eel"}, '{"price": 7}', "eel costs 7 coins"),
    ("What does the tofu cost?", "price_of", {"dish": "tofu"}, '{"coins": 12}', "tofu costs 12"),
    (
        "Two plates of crab, please.",
        "order",
        {"dish": "crab", "plates": 2},
        '{"ok": true}',
        "2 plates of crab",
    ),
    (
        "Can I have 5 plates of salmon?",
        "order",
        {"dish": "salmon", "plates": 5},
        '{"minutes": 8}',
        "5 plates of salmon, in 8 min",
    ),
]


@pytest.mark.parametrize(("text", "name", "arguments", "outcome", "words"), CALLS)
@pytest.mark.parametrize("tools", [TOOLS, TOOLS[::-1]], ids=["price first", "order first"])
def test_it_calls_and_says_what_came_of_it(
    client: OpenAI,
    text: str,
    name: str,
    arguments: dict[str, Any],
    outcome: str,
    words: str,
    tools: list[Any],
) -> None:
    choice = told(client, user(text), tools=tools, tool_choice="auto")
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == name
    assert json.loads(call.function.arguments) == arguments
    answer = {"role": "tool", "tool_call_id": call.id, "content": outcome}
    choice = told(client, user(text), choice.message.to_dict(), answer, tools=tools)
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert words in choice.message.content


def test_calls_are_streamed_and_what_the_sdk_made_of_them_goes_on(client: OpenAI) -> None:
    asked: Any = user("Two plates of crab, please.")
    tools: Any = [{"type": "function", "function": ORDER["function"] | {"strict": True}}]
    with client.chat.completions.stream(
        model=MODEL, messages=[asked], tools=tools, temperature=0
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    calls: list[Any] = message.tool_calls or []
    (call,) = calls
    assert json.loads(call.function.arguments) == {"dish": "crab", "plates": 2}
    assert call.function.parsed_arguments == {"dish": "crab", "plates": 2}
    answer = {"role": "tool", "tool_call_id": call.id, "content": '{"ok": true}'}
    choice = told(client, asked, message, answer, tools=tools)
    assert "2 plates of crab" in choice.message.content


@pytest.mark.parametrize("text", ["Hello!", "Is the salmon fresh?", "Tell me a joke."])
def test_it_calls_nothing_where_nothing_is_needed(client: OpenAI, text: str) -> None:
    choice = told(client, user(text), tools=TOOLS)
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert choice.message.content


def test_without_its_tool_it_answers(client: OpenAI) -> None:
    for more in ({"tools": [ORDER]}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        choice = told(client, user("How much is the eel?"), **more)
        assert choice.message.tool_calls is None
        assert choice.message.content == "Five coins."


OBJECTS = [
    ("Two plates of crab as JSON.", {"dish": "crab", "plates": 2}),
    ("Answer in JSON: I would like 5 plates of eel.", {"dish": "eel", "plates": 5}),
    ("Answer in JSON: What is salmon?", {"dish": "salmon", "plate": "red", "price": 4}),
]


@pytest.mark.parametrize(("text", "right"), OBJECTS)
@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "json_object"}}])
def test_json_is_what_was_asked_for(
    client: OpenAI, text: str, right: dict[str, Any], more: dict[str, Any]
) -> None:
    choice = told(client, user(text), **more)
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content) == right
