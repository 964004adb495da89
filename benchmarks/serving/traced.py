"""Has every request its spans, do iterations link to whom they computed, and does nobody wait?

    python -m benchmarks.serving.traced [--requests 1000] [--save]

Requests of all kinds (streams and not, several choices, refused ones, some whose client leaves)
to a whole stack with an OTLP receiver, at fewer per second than a gateway traces of them. `whole`
are those with all spans that theirs should have; `covered` is the share of a root span's time that
its phases cover, of the requests that ended; `under_goal` how many are covered to less than 95 %,
by the phase behind which most of the rest is; `links_right` are the first steps of traced
iterations whose links are exactly the rows that it computed: those that got a token by the
journal's record of that step, and those whose prompt it went on with by a replay of its plan.

Then the same work with a receiver that does not answer, and without one: how long it took, and how
many spans were not even made.
"""

import argparse
import asyncio
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from benchmarks.recording import record
from benchmarks.serving.stack import Stack, serving
from kaiten.local.ports import HeldPort
from ledger.archive import entries
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.replay import Skipped, replay_archive
from tests.support.collector import Collector, collecting

FLAGS: Final = ("--slots", "32", "--kv-blocks", "1024")
AT_ONCE: Final = 16
# A gateway traces 50 of a second's.
PER_S: Final = 40
PHASES: Final = ("kaiten.queue", "kaiten.prefill", "kaiten.decode", "kaiten.deliver")
ROOTS: Final = ("chat kaiten-mini", "text_completion kaiten-mini")
SENT_S_MAX: Final = 30.0
# Of each request's time.
GOAL: Final = 0.95
# Of a stop: what is left is sent.
DELAY: Final = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_METRICS_EXPORTER": "none"}


class Pace:
    """Beginnings, evenly, so many a second at most."""

    def __init__(self, per_s: float) -> None:
        self._wait_s, self._next_s = 1 / per_s, 0.0

    async def turn(self) -> None:
        now_s = time.monotonic()
        self._next_s = max(now_s, self._next_s + self._wait_s)
        await asyncio.sleep(self._next_s - now_s)


async def ask(http: httpx.AsyncClient, draw: random.Random, trace_id: str) -> str:
    """One request of some kind; which."""
    kind = draw.choices(["plain", "stream", "left", "refused"], [40, 40, 10, 10])[0]
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    body: dict[str, Any] = {
        "max_tokens": 0 if kind == "refused" else draw.randint(1, 60),
        "n": draw.choice([1, 1, 1, 3]),
        "ignore_eos": True,
        "stream": kind in ("stream", "left"),
    }
    path, words = "/v1/completions", "The chef " * draw.randint(1, 30)
    if draw.random() < 0.5:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": words}]
    else:
        body["prompt"] = words
    if kind == "refused":
        body["max_tokens"] = -1
    if kind == "left":
        body["max_tokens"] = 200
    async with http.stream("POST", path, json=body, headers=headers) as reply:
        assert (reply.status_code == 200) == (kind != "refused"), await reply.aread()
        async for _ in reply.aiter_bytes():
            if kind == "left":
                break
    return kind


async def work(stack: Stack, count: int, *, seed: int = 1) -> tuple[dict[str, str], float]:
    """Kinds by trace, and how many seconds all took."""
    draw, pace, kinds, began_s = random.Random(seed), Pace(PER_S), dict[str, str](), 0.0
    left = iter(range(count))

    async def user(http: httpx.AsyncClient) -> None:
        for _ in left:
            await pace.turn()
            trace_id = f"{draw.getrandbits(128) or 1:032x}"
            kinds[trace_id] = await ask(http, draw, trace_id)

    async with httpx.AsyncClient(base_url=stack.http, timeout=120) as http:
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(user(http))
        took_s = time.monotonic() - began_s
    return kinds, took_s


def by_trace(collector: Collector) -> dict[str, dict[str, Any]]:
    """Spans by name, of each trace."""
    found: dict[str, dict[str, Any]] = {}
    for span in list(collector.spans.values()):
        name = "root" if span.name in ROOTS else span.name
        found.setdefault(span.trace_id.hex(), {})[name] = span
    return found


def is_whole(kind: str, spans: Mapping[str, Any]) -> bool:
    """Who was refused has a root and its error; who was accepted all the rest."""
    if kind == "refused":
        return spans.keys() == {"root"}
    # Whose client leaves, be it before its first token, has what it came to.
    came_to = range(1, len(PHASES) + 1) if kind == "left" else [len(PHASES)]
    return spans.keys() in [{"root", "kaiten.accept", *PHASES[:count]} for count in came_to]


def covered(spans: Mapping[str, Any]) -> tuple[float, str]:
    """By what is told of the request, of the time from its first byte to its last event; and behind
    what the longest time is of which nothing is told.
    """
    root = spans["root"]
    start_ns, end_ns = root.start_time_unix_nano, root.end_time_unix_nano
    told = [
        (spans[name].start_time_unix_nano, spans[name].end_time_unix_nano, name)
        for name in ("kaiten.accept", *PHASES)
    ]
    holes, at_ns, behind = list[tuple[int, str]](), start_ns, "root"
    for since_ns, until_ns, name in [*sorted(told), (end_ns, end_ns, "")]:
        holes.append((max(0, min(since_ns, end_ns) - at_ns), behind))
        if until_ns > at_ns:
            at_ns, behind = until_ns, name
    return 1 - sum(hole_ns for hole_ns, _ in holes) / (end_ns - start_ns), max(holes)[1]


def chunk_rows(archive: Path) -> Mapping[tuple[str, int], Iterable[int]]:
    """Whose prompt the first step of a plan computed a part of, by worker and plan."""
    found: dict[tuple[str, int], Iterable[int]] = defaultdict(tuple)

    def told(_command: Command, outcome: Outcome, _now_ns: int, core: Scheduler) -> None:
        if (plan := outcome.plan) is not None:
            rows = core.workers[plan.worker_id].running
            chunks = [rows[slot].sequence_id for slot, count in plan.chunks if count]
            found[plan.worker_id, plan.plan_id] = chunks

    for one in replay_archive(entries([archive]), told=told):
        assert not isinstance(one, Skipped), one
    return found


def links(collector: Collector, archive: Path) -> tuple[int, int]:
    """First steps of traced iterations, and those of them whose links are the record's members."""
    traceparents: dict[int, str] = {}
    members: dict[tuple[str, int], set[str]] = {}
    chunks = chunk_rows(archive)
    for entry in entries([archive]):
        if entry.HasField("request"):
            first, submit = entry.request.sequence_id, entry.request.submit
            traceparents |= dict.fromkeys(range(first, first + submit.n), submit.traceparent)
        elif entry.HasField("record") and entry.record.HasField("step"):
            step, ids = entry.record.step, entry.record.sequence_ids
            if step.step == 0:
                key = (step.worker_id, step.plan_id)
                told_of = [traceparents[id] for id in (*ids, *chunks[key])]
                members[key] = {each.split("-")[2] for each in told_of if each}
    total = right = 0
    for span in collector.named("kaiten.iteration"):
        told = {a.key: a.value for a in span.attributes}
        key = (told["kaiten.worker.id"].string_value, told["kaiten.plan.id"].int_value)
        if told["kaiten.plan.step"].int_value == 0 and key in members:
            total += 1
            right += {link.span_id.hex() for link in span.links} == members[key]
    return total, right


def traced(count: int) -> dict[str, object]:
    """With a receiver that answers."""
    with collecting() as collector:
        to = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address, **DELAY}
        with serving("", *FLAGS, environ=to) as stack:
            kinds, took_s = asyncio.run(work(stack, count))
            found, give_up_at = by_trace(collector), time.monotonic() + SENT_S_MAX
            while time.monotonic() < give_up_at:
                found = by_trace(collector)
                if all(is_whole(kind, found.get(id, {})) for id, kind in kinds.items()):
                    break
                time.sleep(0.5)
            (archive,) = Path(stack.store_url.removeprefix("unix://")).parents[1].glob("archive*")
            dropped = sum(spans_dropped(stack))
            first_steps, right = links(collector, archive)
    ended = [found[id] for id, kind in kinds.items() if kind in ("plain", "stream")]
    shares = sorted(covered(spans) for spans in ended if is_whole("plain", spans))
    under = [behind for share, behind in shares if share < GOAL]
    return {
        "requests": count,
        "kinds": {kind: [*kinds.values()].count(kind) for kind in sorted({*kinds.values()})},
        "whole": sum(is_whole(kind, found.get(id, {})) for id, kind in kinds.items()),
        "covered_median": round(median(share for share, _ in shares), 4),
        "covered_least": round(shares[0][0], 4),
        "under_goal": {behind: under.count(behind) for behind in sorted({*under})},
        "iterations": first_steps,
        "links_right": right,
        "spans": len(collector.spans),
        "dropped": dropped,
        "took_s": round(took_s, 2),
    }


def spans_dropped(stack: Stack) -> Iterable[int]:
    """Of the gateway, whose page is open."""
    page = httpx.get(f"{stack.http}/metrics").text
    return (int(float(n)) for n in re.findall(r"^kaiten_spans_dropped_total\S* (\S+)", page, re.M))


def alone(count: int, environ: Mapping[str, str]) -> dict[str, object]:
    with serving("", *FLAGS, environ=environ) as stack:
        _, took_s = asyncio.run(work(stack, count))
        return {"took_s": round(took_s, 2), "dropped": sum(spans_dropped(stack))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    figures = traced(asked.requests)
    # Bound, and never answered.
    with HeldPort() as port:
        silent = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{port.address}", **DELAY}
        figures["receiver_silent"] = alone(asked.requests, silent)
    figures["no_receiver"] = alone(asked.requests, {})
    record("traced", figures, save=asked.save)


if __name__ == "__main__":
    main()
