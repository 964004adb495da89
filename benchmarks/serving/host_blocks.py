"""Conversations that come back: what blocks in host memory save.

    python -m benchmarks.serving.host_blocks [--model PATH] [--rounds 2] [--save]

So many conversations take turns, a few at a time, and each turn is all of the conversation so far
with some words more. The pool has room for a third of them, so by its next turn a conversation is
gone from it. Three stacks in turns, and each has the same requests:

without     what is gone is computed again
host        it was copied to host memory, and is copied back (`--kv-host-memory-mb`)
large pool  nothing goes: what the second could come to at best

Of turns after the first: the share of prompt tokens that were found, the time to first token, and
all requests by time. Outputs are compared: they are the same.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.recording import record
from benchmarks.serving.stack import Stack, serving
from kaiten.client import AsyncClient

CONVERSATIONS, AT_ONCE, TURNS = 24, 4, 4
FIRST_TOKENS, MORE_TOKENS, OUTPUT_TOKENS = 512, 32, 32
BLOCK_SIZE, VOCAB_SIZE = 16, 1500
ALL_BLOCKS = CONVERSATIONS * (FIRST_TOKENS + TURNS * (MORE_TOKENS + OUTPUT_TOKENS)) // BLOCK_SIZE
SIDES = {
    "without": (str(ALL_BLOCKS // 3), "0"),
    "host": (str(ALL_BLOCKS // 3), "1500"),
    "large_pool": (str(ALL_BLOCKS), "0"),
}


@dataclass(slots=True)
class Seen:
    """Of turns after the first, but for `took_s` and `outputs`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    took_s: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)


@contextmanager
def side(model: str, name: str) -> Iterator[Stack]:
    blocks, host_mb = SIDES[name]
    flags = ("--slots", "8", "--block-size", str(BLOCK_SIZE), "--kv-blocks", blocks)
    with serving(model, *flags, "--kv-host-memory-mb", host_mb) as stack:
        yield stack


async def played(stack: Stack, round_: int) -> Seen:
    """All turns of all conversations, none of which an earlier round has had."""
    seen, gate = Seen(), asyncio.Semaphore(AT_ONCE)
    draw = np.random.default_rng(round_).integers
    told = [draw(10, VOCAB_SIZE, FIRST_TOKENS).tolist() for _ in range(CONVERSATIONS)]

    async def turn(client: AsyncClient, tokens: list[int], number: int) -> None:
        async with gate:
            asked_at, first_s = time.perf_counter(), 0.0
            async with client.generate(
                token_ids=tokens, max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0
            ) as generation:
                async for _ in generation:
                    first_s = first_s or time.perf_counter() - asked_at
                result = await generation.result()
        if number:
            seen.first_s.append(first_s)
            seen.prompt_tokens += len(tokens)
            seen.cached_tokens += result.usage.cached_tokens
        tokens += result.choices[0].token_ids

    async with AsyncClient(stack.grpc) as client:
        began_at = time.perf_counter()
        for number in range(TURNS):
            await asyncio.gather(*(turn(client, tokens, number) for tokens in told))
            for tokens in told:
                tokens += draw(10, VOCAB_SIZE, MORE_TOKENS).tolist()
        seen.took_s = time.perf_counter() - began_at
    seen.outputs = told
    return seen


def measured(model: str, rounds: int) -> dict[str, object]:
    kept: dict[str, list[Seen]] = {name: [] for name in SIDES}
    with ExitStack() as open_:
        stacks = {name: open_.enter_context(side(model, name)) for name in SIDES}
        for round_ in range(rounds):
            for name, stack in stacks.items():
                kept[name].append(asyncio.run(played(stack, round_)))
    same = [
        one.outputs == other.outputs
        for name in SIDES
        for one, other in zip(kept[name], kept["without"], strict=True)
    ]
    figures: dict[str, object] = {"are_outputs_the_same": all(same)}
    for name, some in kept.items():
        found = sum(one.cached_tokens for one in some) / sum(one.prompt_tokens for one in some)
        firsts = [first for one in some for first in one.first_s]
        figures[name] = {
            "found_share": round(found, 3),
            "first_token_p50_ms": round(1000 * median(firsts)),
            "took_s": round(median(one.took_s for one in some), 2),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    shape: dict[str, object] = {"conversations": CONVERSATIONS, "at_once": AT_ONCE, "turns": TURNS}
    shape |= {"model": Path(asked.model).name or "shipped", "rounds": asked.rounds}
    record("host_blocks", shape | measured(asked.model, asked.rounds), save=asked.save)


if __name__ == "__main__":
    main()
