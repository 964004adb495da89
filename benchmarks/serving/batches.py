"""What a batch gets of a machine, and what it takes from those who are live.

    python -m benchmarks.serving.batches [--lines N] [--slots N] [--batch-gap-ms G] [--whole]
        [--save]

The shipped model behind a whole stack, in turns: the lines as a batch, and as a crowd of live
requests of as many at once. Then a few live streams alone and beside a batch: the time to their
first token and the gaps between tokens. Ratios of one run. With `--whole` only the last: live
streams for a while alone, for as long as a batch of all lines takes, and alone again; and what the
steps took, by the archive (`batch_room.py`).
"""

import argparse
import asyncio
import io
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, Final

import httpx

from benchmarks.recording import record
from benchmarks.serving.batch_room import room
from benchmarks.serving.stack import Stack, cpu_s, serving
from kaiten.client import AsyncClient

TURNS: Final = 3
TOKENS: Final = 24
LIVE, LIVE_TOKENS, LIVE_ROUNDS = 4, 96, 8
URL: Final = "/v1/completions"
POLL_S: Final = 0.05
ENDS: Final = ("failed", "expired", "cancelled")
# So many live requests, one after the other of each stream, while no line is answered: none will
# be, for they go on until the batch is over.
STUCK_REQUESTS: Final = 50 * LIVE


def body(number: int) -> dict[str, Any]:
    return {"prompt": f"Guest {number} sits down and", "max_tokens": TOKENS, "ignore_eos": True}


async def as_batch(client: httpx.AsyncClient, lines: int) -> str:
    """Begun; its id."""
    content = "\n".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": URL, "body": body(n)})
        for n in range(lines)
    )
    form = {"file": ("lines.jsonl", io.BytesIO(content.encode()))}
    file = await client.post("/v1/files", files=form, data={"purpose": "batch"})
    asked = {"input_file_id": file.json()["id"], "endpoint": URL, "completion_window": "24h"}
    return str((await client.post("/v1/batches", json=asked)).json()["id"])


async def cancelled(client: httpx.AsyncClient, batch: str) -> None:
    found = (await client.post(f"/v1/batches/{batch}/cancel")).json()
    while found["status"] == "cancelling":
        await asyncio.sleep(POLL_S)
        found = (await client.get(f"/v1/batches/{batch}")).json()


async def as_crowd(client: httpx.AsyncClient, lines: int, slots: int) -> None:
    room = asyncio.Semaphore(2 * slots)

    async def one(number: int) -> None:
        async with room:
            (await client.post(URL, json=body(number))).raise_for_status()

    await asyncio.gather(*(one(number) for number in range(lines)))


@dataclass(slots=True)
class Seen:
    """Milliseconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "first_p50_ms": round(median(self.first), 2),
            "first_p99_ms": round(quantiles(self.first, n=100)[98], 2),
            "gap_p50_ms": round(median(self.gaps), 2),
            "gap_p99_ms": round(quantiles(self.gaps, n=100)[98], 2),
        }


async def live(stack: Stack, seen: Seen, rounds: int | None = LIVE_ROUNDS) -> None:
    """A few streams, one after the other each; None: until this is cancelled."""

    async def one(client: AsyncClient, number: int) -> None:
        for turn in itertools.count():
            if turn == rounds:
                return
            moments = [time.perf_counter()]
            async with client.generate(
                f"Guest {number} asks", max_tokens=LIVE_TOKENS, ignore_eos=True
            ) as generation:
                moments += [time.perf_counter() async for _ in generation]
            waits = [1000 * (after - before) for before, after in pairwise(moments)]
            seen.first.append(waits[0])
            seen.gaps += waits[1:]

    async with AsyncClient(stack.grpc) as client:
        await asyncio.gather(*(one(client, number) for number in range(LIVE)))


class Stuck(Exception):
    """What keeps a batch from its end does not go away by itself."""


async def over(client: httpx.AsyncClient, batch: str, lines: int) -> None:
    """Stuck: it ended otherwise."""
    async for _ in answered(client, batch, lines):
        pass


async def answered(client: httpx.AsyncClient, batch: str, lines: int) -> AsyncIterator[int]:
    """How many lines are, again and again until all are. Stuck: it ended otherwise."""
    while True:
        found = (await client.get(f"/v1/batches/{batch}")).json()
        if found["status"] == "completed":
            assert found["request_counts"] == {"total": lines, "completed": lines, "failed": 0}
            return
        if found["status"] in ENDS:
            raise Stuck(f"the batch ended as {found['status']}: {found['errors']}")
        yield found["request_counts"]["completed"]
        await asyncio.sleep(POLL_S)


async def over_beside(client: httpx.AsyncClient, batch: str, lines: int, seen: Seen) -> None:
    """As `over`, beside live streams that go on until then. Stuck, too: it gets nowhere."""
    most = since = told = 0
    async for count in answered(client, batch, lines):
        if count > most:
            most, since = count, len(seen.first)
        elif len(seen.first) > since + STUCK_REQUESTS:
            raise Stuck(
                f"{most} of {lines} lines are answered, and none was beside the last "
                f"{STUCK_REQUESTS} live requests, whose gaps are {median(seen.gaps):.1f} ms in the "
                "median: --batch-gap-ms may be less than they take by themselves"
            )
        if (twentieth := 20 * count // lines) > told:
            told = twentieth
            say(f"{count} of {lines} lines, {len(seen.first)} live requests")


def say(what: str) -> None:
    """To who waits: a busy machine needs minutes for each of these."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {what}\n")


async def measured(stack: Stack, lines: int, slots: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"batch": [], "crowd": []}
    costs: dict[str, list[float]] = {"batch": [], "crowd": []}
    alone, beside, shared = Seen(), Seen(), list[float]()
    async with httpx.AsyncClient(base_url=stack.http, timeout=600) as client:
        await as_crowd(client, lines // 4, slots)
        for turn in range(TURNS):
            say(f"turn {turn + 1} of {TURNS}")
            for way in rates:
                before, begun = cpu_s(stack.pid), time.perf_counter()
                if way == "batch":
                    await over(client, await as_batch(client, lines), lines)
                else:
                    await as_crowd(client, lines, slots)
                spent = sum(cpu_s(stack.pid).values()) - sum(before.values())
                rates[way].append(lines * TOKENS / (time.perf_counter() - begun))
                costs[way].append(1e6 * spent / (lines * TOKENS))
            await live(stack, alone)
            batch = await as_batch(client, 8 * lines)
            begun = time.perf_counter()
            await live(stack, beside)
            seconds = time.perf_counter() - begun
            found = (await client.get(f"/v1/batches/{batch}")).json()
            shared.append(found["request_counts"]["completed"] * TOKENS / seconds)
            await cancelled(client, batch)
    rate = {way: round(median(each), 1) for way, each in rates.items()}
    return {
        "tokens_per_s": rate,
        "batch_of_crowd": round(rate["batch"] / rate["crowd"], 3),
        "cpu_us_per_token": {way: round(median(each), 1) for way, each in costs.items()},
        "live_alone": alone.figures(),
        "live_beside_a_batch": beside.figures(),
        "batch_tokens_per_s_beside_live": round(median(shared), 1),
    }


async def whole(stack: Stack, lines: int, slots: int) -> dict[str, Any]:
    alone, beside = Seen(), Seen()
    async with httpx.AsyncClient(base_url=stack.http, timeout=600) as client:
        await as_crowd(client, 4 * slots, slots)
        say("warm; live streams alone")
        await live(stack, alone, TURNS * LIVE_ROUNDS)
        say(f"{len(alone.first)} live requests alone")
        began_s = time.perf_counter()
        streaming = asyncio.create_task(live(stack, beside, None))
        await over_beside(client, await as_batch(client, lines), lines, beside)
        seconds = time.perf_counter() - began_s
        # What fails in it, fails here.
        streaming.cancel()
        with suppress(asyncio.CancelledError):
            await streaming
        await live(stack, alone, TURNS * LIVE_ROUNDS)
    return {
        "seconds": round(seconds, 1),
        "batch_tokens_per_s_beside_live": round(lines * TOKENS / seconds, 1),
        "live_requests": len(beside.first),
        "live_alone": alone.figures(),
        "live_beside_a_batch": beside.figures(),
        "load_after": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--batch-gap-ms", type=float, default=0)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    flags = ["--batch-gap-ms", str(asked.batch_gap_ms)] if asked.batch_gap_ms else []
    say("starts the stack")
    with serving("", "--slots", str(asked.slots), *flags) as stack:
        say("it is ready")
        measure = whole if asked.whole else measured
        figures = asyncio.run(measure(stack, asked.lines, asked.slots))
        # Read before the folder goes; the scheduler writes the last half second later.
        if asked.whole and asked.batch_gap_ms:
            (archive,) = stack.data.glob("archive-*")
            figures["steps"] = room(archive, asked.batch_gap_ms)
    sizes: dict[str, Any] = {"lines": asked.lines, "tokens": TOKENS, "slots": asked.slots}
    sizes["batch_gap_ms"] = asked.batch_gap_ms
    record("batches", sizes | figures, save=asked.save)


if __name__ == "__main__":
    main()
