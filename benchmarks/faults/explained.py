"""Is all of what a client waited for explained, while requests give way and parts die?

    python -m benchmarks.faults.explained [--requests 500] [--fault-every 40] [--save]

A whole stack with two workers whose KV blocks do not suffice for their slots, so that requests give
way to others. Random requests, streamed over HTTP, so many at once; after every so many ends comes
a fault, in turns: a worker dies by SIGKILL, the only scheduler does, the store stands still for a
second (SIGSTOP). Each request is explained at its end.

`within` are those whose intervals sum to what their client measured within 2 %, or within
`FLOOR_MS` if that is more; `within_gateway` the same beside what their gateway measured: what lies
between the two is the client's own time and its connection's. `unknown` is the share of all time
that no interval explains, `unknown_most` the greatest of any request, `over` how many are above
2 %: as it is told at their end, when a gateway has two archives replayed at a time for all who ask,
and as those are told who are asked for again one by one, `explain_s` each in the mean. `left_out`
nobody knows: the leader's last half second goes with it, and is in no archive.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Any, Final

import grpc
import psutil

from benchmarks.recording import record
from benchmarks.serving.stack import Stack, serving
from kaiten.v1.inference_service_pb2 import ExplainRequest
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase
from ledger import Ledger

# Slots for sixteen, blocks for five of the longest.
FLAGS: Final = ("--workers", "2", "--slots", "16", "--kv-blocks", "96", "--block-size", "16")
FAULTS: Final = ("worker", "leader", "store")
STORE_STOPPED_S: Final = 1.0
PROMPT_TOKENS: Final = (3, 200)
OUTPUT_TOKENS: Final = (20, 250)
SHARE: Final = 0.02
# The store's clock, which an arrival is stamped with, counts milliseconds, and so one is lost at
# either end.
FLOOR_MS: Final = 2.0
END: Final = b"data: [DONE]"
ID: Final = re.compile(rb'"id":"cmpl-([^"]+)"')
UNKNOWN: Final = TimelinePhase.TIMELINE_PHASE_UNKNOWN
ASKED_MAX: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A request as it was explained, and what its client measured."""

    id: str
    choice: ChoiceTimeline
    measured_ms: float

    def __post_init__(self) -> None:
        for one, other in pairwise(self.choice.intervals):
            assert one.end_unix_ns == other.start_unix_ns, self.choice

    @property
    def told_ms(self) -> float:
        return sum(map(length_ms, self.choice.intervals))

    @property
    def unknown(self) -> float:
        """Its share of what is told."""
        return sum(length_ms(i) for i in self.choice.intervals if i.phase == UNKNOWN) / self.told_ms


@dataclass
class Tally:
    """What was found of all requests."""

    explained: list[Explained] = field(default_factory=list)
    total: int = 0
    # How long each of those took that were asked for again.
    again_s: list[float] = field(default_factory=list)
    left_out: int = 0
    failed: int = 0
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))

    def figures(self) -> dict[str, object]:
        found = self.explained
        waits = sorted(each.measured_ms - each.told_ms for each in found)
        count = len(found)
        return {
            "within": round(sum(is_within(e.told_ms, e.measured_ms) for e in found) / count, 4),
            "within_gateway": round(
                sum(is_within(e.told_ms, e.choice.latency_ns / 1e6) for e in found) / count, 4
            ),
            "left_out": self.left_out,
            "failed": self.failed,
            "faults": self.faults,
            "preemptions": sum(each.choice.num_preemptions for each in found),
            "latency_ms_mean": round(sum(each.told_ms for each in found) / count, 1),
            "client_only_ms": [round(waits[int(q * (count - 1))], 2) for q in (0, 0.5, 0.99)],
        }


def unknown_figures(found: list[Explained]) -> dict[str, object]:
    """Of all these, and of the worst."""
    all_ms = sum(each.told_ms for each in found)
    return {
        "unknown": round(sum(each.unknown * each.told_ms for each in found) / all_ms, 4),
        "unknown_most": round(max(each.unknown for each in found), 4),
        "over": sum(each.unknown > SHARE for each in found),
    }


def shares(found: list[Explained]) -> dict[str, float]:
    """Of all time, by what it was spent on."""
    all_ms = sum(each.told_ms for each in found)
    whys: dict[str, float] = {}
    for interval in (i for each in found for i in each.choice.intervals):
        phase = TimelinePhase.Name(interval.phase).removeprefix("TIMELINE_PHASE_").lower()
        why = " ".join(filter(None, (phase, interval.why)))
        whys[why] = whys.get(why, 0.0) + length_ms(interval)
    return {why: round(ms / all_ms, 4) for why, ms in sorted(whys.items(), key=lambda w: -w[1])}


def is_within(told_ms: float, measured_ms: float) -> bool:
    return abs(told_ms - measured_ms) <= max(FLOOR_MS, SHARE * measured_ms)


def length_ms(interval: TimelineInterval) -> float:
    return (interval.end_unix_ns - interval.start_unix_ns) / 1e6


async def stream(stack: Stack, body: dict[str, Any]) -> tuple[str, float]:
    """Its id, and how long it took from the request's first byte to the answer's last.

    By hand: an HTTP library's own time would be the greater part of what is measured.
    """
    host, _, port = stack.http.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        began_ns = time.monotonic_ns()
        writer.write(head.encode() + content)
        first, tail = b"", b""
        while END not in tail:
            piece = await reader.read(1 << 16)
            if not piece:
                raise ConnectionError(f"an answer ended early: {first[:300]!r} … {tail!r}")
            first = first or piece
            if b'"id"' not in first:
                first += piece
            tail = (tail + piece)[-len(END) - 16 :]
        took_ms = (time.monotonic_ns() - began_ns) / 1e6
    finally:
        writer.close()
    found = ID.search(first)
    assert found is not None, first
    return found[1].decode(), took_ms


class Run:
    def __init__(self, stack: Stack, asked: argparse.Namespace, stub: InferenceServiceStub) -> None:
        self._stack, self._asked, self._stub = stack, asked, stub
        self._draw = random.Random(asked.seed)
        self._left = asked.requests
        self.tally = Tally()

    async def user(self) -> None:
        """One request after the other while some are left."""
        draw, tally = self._draw, self.tally
        while self._left:
            self._left -= 1
            length = draw.randint(*PROMPT_TOKENS)
            body = {
                "prompt": [7 + draw.randrange(1000) for _ in range(length)],
                "max_tokens": draw.randint(*OUTPUT_TOKENS),
                "ignore_eos": True,
                "stream": True,
            }
            await self._one(body)
            tally.total += 1
            if tally.total % self._asked.fault_every == 0:
                await self._fault(FAULTS[tally.total // self._asked.fault_every % len(FAULTS)])

    async def _one(self, body: dict[str, Any]) -> None:
        while True:
            try:
                id, measured_ms = await stream(self._stack, body)
                break
            except ConnectionError:
                # Refused while nobody leads or the store is away: asked again, as a client does.
                self.tally.failed += 1
                await asyncio.sleep(0.2)
        choice = await self._explained(id)
        if choice is None:
            self.tally.left_out += 1
        else:
            self.tally.explained.append(Explained(id=id, choice=choice, measured_ms=measured_ms))

    async def again(self) -> list[Explained]:
        """As they are told one by one, when nothing happens any more."""
        found = []
        for one in self.tally.explained:
            if one.unknown:
                began_s = time.monotonic()
                choice = await self._explained(one.id)
                assert choice is not None, one.id
                self.tally.again_s.append(time.monotonic() - began_s)
                one = Explained(id=one.id, choice=choice, measured_ms=one.measured_ms)
            found.append(one)
        return found

    async def _explained(self, id: str) -> ChoiceTimeline | None:
        """None: nobody knows it."""
        for _ in range(ASKED_MAX):
            try:
                response = await self._stub.Explain(ExplainRequest(request_id=id), timeout=90)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                # Many at once, or nobody leads now.
                if error.code() not in (
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    grpc.StatusCode.UNAVAILABLE,
                ):
                    raise
                await asyncio.sleep(0.5)
            else:
                choice: ChoiceTimeline = response.choices[0]
                return choice
        raise TimeoutError(f"{id} is not explained")

    async def _fault(self, what: str) -> None:
        signs = {"worker": "gpu_worker", "store": "valkey-server"}
        sign = signs.get(what) or await leader_address(self._stack)
        found = [
            process
            for process in psutil.Process(self._stack.pid).children(recursive=True)
            if any(sign in word for word in process.cmdline())
        ]
        assert found or what == "leader", f"there is no {what}"
        for process in found[:1] if sign else ():
            self.tally.faults[what] += 1
            process.send_signal(signal.SIGSTOP if what == "store" else signal.SIGKILL)
            if what == "store":
                await asyncio.sleep(STORE_STOPPED_S)
                process.send_signal(signal.SIGCONT)


async def leader_address(stack: Stack) -> str:
    """The path of its socket, which its command line names; empty: nobody leads now."""
    ledger = await Ledger.connect(stack.store_url)
    lease = await ledger.leader()
    await ledger.close()
    return lease.address.removeprefix("unix:") if lease is not None else ""


async def measure(stack: Stack, asked: argparse.Namespace) -> tuple[Tally, list[Explained]]:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        run = Run(stack, asked, InferenceServiceStub(channel))
        async with asyncio.TaskGroup() as group:
            for _ in range(asked.at_once):
                group.create_task(run.user())
        return run.tally, await run.again()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--fault-every", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with serving("", *FLAGS) as stack:
        tally, whole = asyncio.run(measure(stack, asked))
    record(
        "explained",
        {
            "requests": asked.requests,
            "at_once": asked.at_once,
            "seed": asked.seed,
            "flags": " ".join(FLAGS),
            **tally.figures(),
            "told": unknown_figures(tally.explained),
            "told_again": {
                **unknown_figures(whole),
                "asked_for": len(tally.again_s),
                "explain_s": round(mean(tally.again_s), 2) if tally.again_s else None,
                "share_of_time": shares(whole),
            },
        },
        save=asked.save,
    )


if __name__ == "__main__":
    main()
