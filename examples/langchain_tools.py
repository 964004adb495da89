"""LangChain's chat model with tools and typed answers: `python examples/langchain_tools.py "…"`.

`with_structured_output` asks for a JSON Schema, `bind_tools` for calls; kaiten holds both to it.
"""

import os
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field

QUESTION = " ".join(sys.argv[1:]) or "Two plates of crab, please."
CARD = {"crab": 12, "eel": 15, "octopus": 9}
Dish = Literal["crab", "eel", "octopus"]


class Order(BaseModel):
    """What a guest wants."""

    dish: Dish
    plates: int = Field(ge=1, le=20)


@tool
def price_of(dish: Dish) -> int:
    """What one plate of a dish costs."""
    return CARD[dish]


base_url: Any = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
api_key: Any = os.environ.get("OPENAI_API_KEY", "any")
name = OpenAI(base_url=base_url, api_key=api_key).models.list().data[0].id
model = ChatOpenAI(
    model=name, base_url=base_url, api_key=api_key, temperature=0, seed=1, max_completion_tokens=256
)

messages: list[Any] = [HumanMessage(QUESTION)]
# Strict: no properties but those of the function.
call = model.bind_tools([price_of], tool_choice="price_of", strict=True).invoke(messages)
messages.append(call)
for each in call.tool_calls:
    result = price_of.invoke(each)
    print(f"{each['name']}({each['args']}) -> {result.content}")
    messages.append(result)
# Now the model decides: words, or another call.
for chunk in model.bind_tools([price_of]).stream(messages):
    print(chunk.text, end="", flush=True)
print()
print(repr(model.with_structured_output(Order).invoke(QUESTION)))
