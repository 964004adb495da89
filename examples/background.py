"""A response that outlives its client.

    python examples/background.py ask "Tell me about soup."   # prints an id, and ends
    python examples/background.py read ID [SEQUENCE_NUMBER]   # now or later, here or elsewhere

Any process may die in between: the gateway that took it, the worker, the scheduler, the store.
"""

import os
import sys

from openai import OpenAI, omit


def ask(client: OpenAI, question: str) -> None:
    print(client.responses.create(input=question, background=True).id)


def read(client: OpenAI, response_id: str, after: str = "") -> None:
    """From behind an event that was read before: its number is on standard error."""
    start = int(after) if after else omit
    for event in client.responses.retrieve(response_id, stream=True, starting_after=start):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
            print(event.sequence_number, file=sys.stderr)
    print()


client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "any"),
)
match sys.argv[1:]:
    case ["ask", question]:
        ask(client, question)
    case ["read", response_id, *after]:
        read(client, response_id, *after)
    case _:
        sys.exit(__doc__)
