"""A machine with no time left that is otherwise well: does a cell on it say that it is well?

    python -m benchmarks.faults.saturated [--loops 12] [--askers 12] [--seconds 60] [--save]

`kaiten serve` of the shipped model beside `--loops` busy loops and `--askers` clients who ask again
as soon as they are answered, while `/ready` and `/health` are looked at. It fails unless every
request is answered, every look says that all is well, no worker is lost and no leader changed.
"""

import argparse
import asyncio
import time
from statistics import median
from typing import Final

import httpx

from benchmarks.recording import record
from benchmarks.serving.stack import Stack, serving
from kaiten.local.model_source import SHIPPED_NAME
from ledger import Lease, Ledger
from tools.children import busy_loops

ASKED: Final = {
    "model": SHIPPED_NAME,
    "prompt": "Once upon a time",
    "max_tokens": 40,
    "ignore_eos": True,
}
LOOK_EVERY_S: Final = 0.5
# Of an answer, on a machine without time.
SECONDS: Final = 120.0
# What the scheduler's log has of a worker that it gave up, or was about to.
LOST: Final = ("worker.lost", "worker.judged", "worker.late")


async def ask(http: httpx.AsyncClient, until_s: float, taken_s: list[float]) -> None:
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        reply = await http.post("/v1/completions", json=ASKED)
        reply.raise_for_status()
        assert reply.json()["usage"]["completion_tokens"] == ASKED["max_tokens"], reply.text
        taken_s += [time.monotonic() - began_s]


async def look(http: httpx.AsyncClient, until_s: float, taken_s: list[float]) -> None:
    while time.monotonic() < until_s:
        for path in ("/ready", "/health"):
            began_s = time.monotonic()
            reply = await http.get(path)
            assert reply.status_code == 200, f"{path} says {reply.text}"
            taken_s += [time.monotonic() - began_s]
        await asyncio.sleep(LOOK_EVERY_S)


async def lease_of(stack: Stack) -> Lease:
    ledger = await Ledger.connect(stack.store_url)
    lease = await ledger.leader()
    await ledger.close()
    assert lease is not None
    return lease


def said_of_workers(stack: Stack) -> list[str]:
    lines = (line for log in stack.data.rglob("*.log") for line in log.read_text().splitlines())
    return [line for line in lines if any(event in line for event in LOST)]


async def measure(stack: Stack, askers: int, seconds: float) -> dict[str, object]:
    before = await lease_of(stack)
    answers_s: list[float] = []
    looks_s: list[float] = []
    async with httpx.AsyncClient(base_url=stack.http, timeout=SECONDS) as http:
        until_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(look(http, until_s, looks_s))
            for _ in range(askers):
                tasks.create_task(ask(http, until_s, answers_s))
    after = await lease_of(stack)
    assert after.epoch == before.epoch, f"{before} was followed by {after}"
    assert not (said := said_of_workers(stack)), said
    return {
        "answered": len(answers_s),
        "answer_s": round(median(answers_s), 2),
        "answer_s_max": round(max(answers_s), 2),
        "looks": len(looks_s),
        "look_ms": round(1e3 * median(looks_s)),
        "look_ms_max": round(1e3 * max(looks_s)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--loops", type=int, default=12)
    parser.add_argument("--askers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    with serving() as stack, busy_loops(chosen.loops):
        figures = asyncio.run(measure(stack, chosen.askers, chosen.seconds))
    record(
        "saturated", {"loops": chosen.loops, "askers": chosen.askers} | figures, save=chosen.save
    )


if __name__ == "__main__":
    main()
