"""Orders out of sentences, as objects: each answer parses, whatever the model knows.

All sentences at once, in one batch; the schema is compiled once.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

SENTENCES = sys.argv[1:] or ["Two plates of crab, please.", "An octopus for me!", "No, thanks."]


class Order(BaseModel):
    dish: Literal["crab", "eel", "octopus", "nothing"]
    plates: int = Field(ge=0, le=20)


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "any"),
)
model = client.models.list().data[0].id


def order_of(sentence: str) -> Order | None:
    reply = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": sentence}],
        response_format=Order,
        temperature=0,
    )
    return reply.choices[0].message.parsed


with ThreadPoolExecutor() as pool:
    for sentence, order in zip(SENTENCES, pool.map(order_of, SENTENCES), strict=True):
        print(f"{order!r:45} {sentence}")
