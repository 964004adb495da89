"""Does the death of a process change a text?

    python -m benchmarks.faults.kill_sweep [--paths native,avx2,torch] [--dtypes bf16,fp32]
        [--kills 9] [--at-most-s 600] [--streams 24] [--tokens 300] [--model PATH] [--save]
        [--serve="--kv-blocks 200 --kv-host-memory-mb 200"]

A whole stack per path of the CPU kernels and dtype. The same streams, half of them greedy and half
seeded, prompts of ragged lengths, are read once undisturbed and then once for each kill: a worker,
a scheduler or the store, in turns, dies by SIGKILL while all of them are under way. `changed` are
texts that differ from the undisturbed ones, of `texts` in all; the goal is 0 on every path that
claims to be exact. `--serve`: further flags of `kaiten serve`, such as a pool that is too small for
all. A sweep that has taken --at-most-s ends after the kill it is at, at least one.
"""

import argparse
import asyncio
import os
import random
import shlex
import signal
import time
from typing import Any, Final

import psutil

from benchmarks.recording import record
from benchmarks.serving.stack import Stack, serving
from kaiten.client import AsyncClient

# `--native` of the worker by the name of a path.
NATIVE: Final = {"native": "on", "avx2": "avx2", "torch": "off"}
VICTIMS: Final = ("worker", "scheduler", "valkey")
PROMPT_TOKENS: Final = (3, 200)
# A kill comes when the stream that is furthest has this share of its tokens.
WHEN: Final = (0.1, 0.8)


class Reading:
    """All streams at once."""

    def __init__(self, stack: Stack, streams: int, tokens: int) -> None:
        self._stack = stack
        self._tokens = tokens
        draw = random.Random(7)
        self._prompts = [
            [7 + draw.randrange(1000) for _ in range(draw.randint(*PROMPT_TOKENS))]
            for _ in range(streams)
        ]
        self._goal = 0
        self._reached = asyncio.Event()

    async def reaches(self, tokens: int) -> None:
        """Until a stream of those that are read from now on has so many."""
        self._goal = tokens
        self._reached.clear()
        await self._reached.wait()

    async def texts(self) -> list[tuple[int, ...]]:
        """The tokens of each."""
        async with AsyncClient(self._stack.grpc, resume_s=120.0) as client:
            return list(
                await asyncio.gather(*(self._read(client, n) for n in range(len(self._prompts))))
            )

    async def _read(self, client: AsyncClient, number: int) -> tuple[int, ...]:
        how: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        how |= {"seed": number} if number % 2 else {"temperature": 0}
        found: list[int] = []
        async with client.generate(
            token_ids=self._prompts[number], max_tokens=self._tokens, **how
        ) as generation:
            async for delta in generation:
                found += delta.token_ids
                if len(found) >= self._goal:
                    self._reached.set()
        assert len(found) == self._tokens
        return tuple(found)


async def kill(stack: Stack, victim: str, reading: Reading, at: int) -> None:
    await reading.reaches(at)
    found = [
        process
        for process in psutil.Process(stack.pid).children(recursive=True)
        if victim in " ".join(process.cmdline()[:4])
    ]
    assert found, f"there is no {victim}"
    for process in found[:1]:
        process.send_signal(signal.SIGKILL)


async def sweep(
    stack: Stack, kills: int, streams: int, tokens: int, at_most_s: float
) -> dict[str, Any]:
    reading, draw = Reading(stack, streams, tokens), random.Random(3)
    undisturbed = await reading.texts()
    assert undisturbed == await reading.texts(), "the undisturbed texts differ already"
    changed = dict.fromkeys(VICTIMS, 0)
    began_s, done = time.monotonic(), 0
    while done == 0 or (done < kills and time.monotonic() - began_s < at_most_s):
        victim = VICTIMS[done % len(VICTIMS)]
        at = round(draw.uniform(*WHEN) * tokens)
        _, texts = await asyncio.gather(kill(stack, victim, reading, at), reading.texts())
        changed[victim] += sum(a != b for a, b in zip(texts, undisturbed, strict=True))
        done += 1
    return {
        "kills": done,
        "texts": done * streams,
        "changed": sum(changed.values()),
        "changed_by": changed,
        "s_per_round": round((time.monotonic() - began_s) / done, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paths", default="native,avx2,torch")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--at-most-s", type=float, default=float("inf"))
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--model", default="")
    parser.add_argument("--serve", default="")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    for path in asked.paths.split(","):
        for dtype in asked.dtypes.split(","):
            environ = {**os.environ, "KAITEN_WORKER_NATIVE": NATIVE[path]}
            flags = ("--dtype", dtype, *shlex.split(asked.serve))
            with serving(asked.model, *flags, environ=environ) as stack:
                work = sweep(stack, asked.kills, asked.streams, asked.tokens, asked.at_most_s)
                figures = asyncio.run(work)
            sizes = {"path": path, "dtype": dtype}
            sizes |= {"streams": asked.streams, "tokens": asked.tokens, "model": asked.model}
            sizes |= {"serve": asked.serve}
            record("kill_sweep", sizes | figures, save=asked.save)


if __name__ == "__main__":
    main()
