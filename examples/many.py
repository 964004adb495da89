"""A hundred prompts at once: each gets its seat in the batch as soon as one is free.

Run it twice, with `at_once=1` the second time, to see what batching is worth on your machine.
"""

import asyncio
import os
import time

from kaiten.client import AsyncClient, Completion

PROMPTS = [f"Guest number {number} sits down and" for number in range(100)]


async def main(at_once: int = 100) -> None:
    address = os.environ.get("KAITEN_ADDRESS", "127.0.0.1:50051")
    key = os.environ.get("KAITEN_API_KEY")
    began_s, waited_s = time.perf_counter(), []

    def on_done(completion: Completion) -> None:
        waited_s.append(time.perf_counter() - began_s)

    # What is more than the service takes at once is offered again when it says so.
    async with AsyncClient(address, api_key=key) as client:
        answers = await client.complete_all(
            PROMPTS, at_once=at_once, on_done=on_done, max_tokens=32, temperature=0.8, seed=1
        )
    took_s = time.perf_counter() - began_s
    tokens = sum(answer.usage.output_tokens for answer in answers)
    cached = sum(answer.usage.cached_tokens for answer in answers)
    print(f"{PROMPTS[0]}{answers[0].text}")
    print(f"{tokens} tokens in {took_s:.1f} s: {tokens / took_s:.0f} tokens/s")
    print(f"half were done after {sorted(waited_s)[len(waited_s) // 2]:.1f} s")
    print(f"{cached} prompt tokens were not computed again")


asyncio.run(main())
