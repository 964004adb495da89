"""A conversation by OpenAI's SDK, streamed: `python examples/chat.py "A question?"`."""

import os
import sys
from typing import Any

from openai import OpenAI

QUESTIONS = sys.argv[1:] or ["What do you recommend?", "And what comes with it?"]

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "any"),
)
model = client.models.list().data[0].id
messages: list[Any] = []
for question in QUESTIONS:
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    answer = ""
    stream = client.chat.completions.create(model=model, messages=messages, stream=True)
    for chunk in stream:
        text = chunk.choices[0].delta.content or ""
        print(text, end="", flush=True)
        answer += text
    print()
    messages.append({"role": "assistant", "content": answer})
