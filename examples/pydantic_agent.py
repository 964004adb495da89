"""An agent by Pydantic AI whose answer is an object: `python examples/pydantic_agent.py "Order?"`.

Where an answer must be an object, Pydantic AI asks for a call, and kaiten holds calls that must be
made to their schema: nothing has to be asked twice.
"""

import asyncio
import os
import sys
from typing import Literal

from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import Tool, ToolDefinition

QUESTION = " ".join(sys.argv[1:]) or "Two plates of crab, please."
CARD = {"crab": 12, "eel": 15, "octopus": 9}
Dish = Literal["crab", "eel", "octopus"]


class Order(BaseModel):
    """Tell the kitchen."""

    dish: Dish
    plates: int = Field(ge=1, le=20)


def price_of(dish: Dish) -> int:
    """What one plate of a dish costs."""
    return CARD[dish]


async def once(context: RunContext[None], tool: ToolDefinition) -> ToolDefinition | None:
    """Small models like to ask again and again."""
    return tool if context.run_step == 1 else None


async def main() -> None:
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    api_key = os.environ.get("OPENAI_API_KEY", "any")
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        name = (await client.models.list()).data[0].id
        agent = Agent(
            OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client)),
            tools=[Tool(price_of, prepare=once)],
            output_type=ToolOutput(Order, name="order"),
            model_settings={"temperature": 0, "seed": 1, "max_tokens": 256},
        )
        result = await agent.run(QUESTION)
    for message in result.all_messages():
        for part in message.parts:
            if part.part_kind == "tool-call":
                print(f"{part.tool_name}({part.args_as_dict()})")
    print(repr(result.output))


asyncio.run(main())
