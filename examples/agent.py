"""An agent with tools, by OpenAI's SDK: `python examples/agent.py "An order?"`.

Its first call is forced by a grammar, so `price_of` is called with a dish of the card whatever the
model has learned. From then on the model decides, until it answers in words. At temperature 0 the
same question leads to the same calls.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field, ValidationError

QUESTION = " ".join(sys.argv[1:]) or "What is the crab? I take two plates of it."
CARD = {"crab": 12, "eel": 15, "octopus": 9}
ROUNDS_MAX = 5


class PriceOf(BaseModel):
    """What one plate of a dish costs."""

    dish: Literal["crab", "eel", "octopus"]


class Order(BaseModel):
    """Tell the kitchen."""

    dish: Literal["crab", "eel", "octopus"]
    plates: int = Field(ge=1, le=20)


def price_of(asked: PriceOf) -> dict[str, Any]:
    return {"dish": asked.dish, "price": CARD[asked.dish]}


def order(asked: Order) -> dict[str, Any]:
    return {"ordered": asked.model_dump(), "costs": CARD[asked.dish] * asked.plates}


KNOWN: dict[str, tuple[type[Any], Callable[[Any], dict[str, Any]]]] = {
    "price_of": (PriceOf, price_of),
    "order": (Order, order),
}


def made(name: str, arguments: str) -> str:
    """What came of a call. Calls that nobody forced may be wrong: the model is told so."""
    body, function = KNOWN[name]
    try:
        return json.dumps(function(body.model_validate_json(arguments)))
    except ValidationError as error:
        return json.dumps({"error": str(error)})


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "any"),
)
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": QUESTION}]
choice: Any = {"type": "function", "function": {"name": "price_of"}}
for _ in range(ROUNDS_MAX):
    reply = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[pydantic_function_tool(body, name=name) for name, (body, _) in KNOWN.items()],
        tool_choice=choice,
        temperature=0,
        max_tokens=256,
    )
    message: Any = reply.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        said = made(call.function.name, call.function.arguments)
        print(f"{call.function.name}({call.function.arguments}) -> {said}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    choice = "auto"
