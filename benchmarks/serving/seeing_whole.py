"""What metrics, traces and watchers cost a whole stack: processor time of its processes per token.

    python -m benchmarks.serving.seeing_whole [--pairs 8] [--sequences 256] [--only spans] [--save]

One stack with and one without, which take turns: with, without, without, with, … so that each has
the machine to itself, and what else the machine does changes little between the two of a pair. Of
each process, microseconds per token with and without, the median of all turns; of `service` (all
but the worker, whose time is the model's) and the `whole` also the ratio of each pair: their
median, and the least and the greatest; `speed` is that of tokens per second.
Metrics: all pages open, fetched every ten seconds, beside none. Spans: beside metrics, sampled as
by default, sent to a collector in a process of its own, whose time does not count; to one that
answers each export after five seconds; and to an address where nobody is. Watched: one stack, with
and without five open pages of `/v1/watch`, as the page opens them; quickly: with ten events a
second in place of four.
"""

import argparse
import multiprocessing
import re
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Final

import httpx

from benchmarks.recording import record
from benchmarks.serving.stack import cpu_s
from tests.support.collector import collecting
from tests.support.served import Served

CHOICES: Final = 16
TOKENS: Final = 80
WARM_TOKENS: Final = 20
FETCH_S: Final = 10.0
WAIT_S: Final = 60.0
# The exporter's own patience with a collector is ten seconds.
SLOW_S: Final = 5.0
# A snapshot, and what is told when a watch is left for one that others have.
EVENTS_BEFORE: Final = 4
WORKER: Final = "gpu_worker"
SPEED: Final = "tokens_per_s"
SERVICE: Final = "service"
WHOLE: Final = "whole"
ROLES: Final = ("scheduler_svc", "gateway", WORKER)
# Of one turn with, and one without.
Pair = tuple[dict[str, float], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a stack is served."""

    words: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    watchers: int = 0
    # Of those, between two events.
    interval_ms: int = 250


def collect(pipe: Connection, answers_after_s: float) -> None:
    """In a process of its own, until it hears something: then it says how many spans it has."""
    with collecting(answers_after_s=answers_after_s) as collector:
        pipe.send(collector.address)
        pipe.recv()
        pipe.send(len(collector.spans))


class Collecting:
    """A collector in a process of its own."""

    def __init__(self, answers_after_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=collect, args=(theirs, answers_after_s))
        self._process.start()
        self.address: str = self._ours.recv()

    def stop(self) -> int:
        """How many spans it has."""
        self._ours.send(None)
        count = int(self._ours.recv())
        self._process.join()
        return count


class Fetching:
    """Each page, as often as the shipped Prometheus does, for as long as the block lasts; the wait
    that is left goes on in the next one.
    """

    def __init__(self, pages: Sequence[str]) -> None:
        self._pages, self._left_s = pages, FETCH_S / 2
        self._over = threading.Event()

    def __enter__(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while True:
                began_s = time.monotonic()
                if self._over.wait(self._left_s):
                    self._left_s -= min(self._left_s, time.monotonic() - began_s)
                    return
                self._left_s = FETCH_S
                for page in self._pages:
                    client.get(page).raise_for_status()


def generate(url: str, sequences: int, tokens: int) -> int:
    """All at once; how many tokens came."""

    def ask(_: int) -> int:
        body = {
            "model": "kaiten-mini",
            "prompt": "The chef said",
            "n": CHOICES,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
        return int(reply.json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(sequences // CHOICES) as pool:
        return sum(pool.map(ask, range(sequences // CHOICES)))


class Stack:
    """Served with these words, in this environment."""

    def __init__(self, kind: Kind, sequences: int, folder: Path) -> None:
        self._sequences = sequences
        room = ["--slots", str(sequences), "--num-blocks", str(sequences * 20)]
        self._served = Served(folder, *kind.words, *room, environ=kind.environ)
        ports = _ports(self._served.said)
        self._fetching = Fetching([f"http://127.0.0.1:{port}/metrics" for port in ports])
        generate(self._served.http_url, sequences, WARM_TOKENS)

    def spent_us(self, kind: Kind) -> dict[str, float]:
        """Of processor time, per token, by process, while so many watch."""
        served, over = self._served, threading.Event()
        pid, url = served.process.pid, served.http_url
        with ThreadPoolExecutor(max(1, kind.watchers)) as lookers, self._fetching:
            begun = threading.Barrier(kind.watchers + 1)
            looking = [
                lookers.submit(watch, url, kind.interval_ms, begun, over)
                for _ in range(kind.watchers)
            ]
            begun.wait(WAIT_S)
            before_s, began_s = cpu_s(pid), time.perf_counter()
            tokens = generate(url, self._sequences, TOKENS)
            after_s, took_s = cpu_s(pid), time.perf_counter() - began_s
            over.set()
            for each in looking:
                each.result()
        spent = {
            role: (after_s[role] - before_s.get(role, 0.0)) / tokens * 1e6
            for role in after_s
            if role != "client"
        }
        spent[SERVICE] = sum(us for role, us in spent.items() if role != WORKER)
        spent[WHOLE] = spent[SERVICE] + spent[WORKER]
        return spent | {SPEED: tokens / took_s}

    def stop(self) -> None:
        self._served.stop()
        self._served.__exit__(None, None, None)


def turns(one: Kind, other: Kind, sequences: int, pairs: int) -> list[Pair]:
    """What each spent. Those that are served alike are one stack."""
    with tempfile.TemporaryDirectory() as folder:
        stacks: dict[str, Stack] = {}
        try:
            for kind in (one, other):
                served = f"{kind.words} {kind.environ}"
                if served not in stacks:
                    stacks[served] = Stack(kind, sequences, Path(folder) / str(len(stacks)))
            first, last = next(iter(stacks.values())), [*stacks.values()][-1]
            found = []
            for at in range(pairs):
                order = [(first, one), (last, other)][:: 1 if at % 2 == 0 else -1]
                spent = [stack.spent_us(kind) for stack, kind in order]
                found.append((spent[at % 2], spent[1 - at % 2]))
                sys.stderr.write(f"{compared(found[-1:])}\n")
            return found
        finally:
            for stack in stacks.values():
                stack.stop()


def watch(url: str, interval_ms: int, begun: threading.Barrier, over: threading.Event) -> None:
    """As a dashboard does, until it is over; what it reads is thrown away. It has begun once it is
    told what has changed.
    """
    path = f"{url}/v1/watch?rows=true&interval_ms={interval_ms}"
    with httpx.stream("GET", path, timeout=WAIT_S) as reply:
        events = reply.raise_for_status().iter_raw()
        for _ in range(EVENTS_BEFORE):
            next(events)
        begun.wait(WAIT_S)
        for _ in events:
            if over.is_set():
                return


def _ports(said: str) -> list[str]:
    shown = re.search(r"metrics +(http.*)", said)
    return re.findall(r":(\d+)", shown[1]) if shown else []


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument(
        "--only", action="append", help="of metrics, spans, slow, nobody, watched, watched_quickly"
    )
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    collectors = [Collecting(answers_after_s) for answers_after_s in (0.0, SLOW_S)]
    nothing = Kind(environ={"KAITEN_GATEWAY_METRICS": "false"})
    metrics = Kind(words=["--metrics-port", "0"])
    settings: Mapping[str, tuple[Kind, Kind]] = {
        "metrics": (metrics, nothing),
        "spans": (replace(metrics, environ=to(collectors[0].address)), metrics),
        "slow": (replace(metrics, environ=to(collectors[1].address)), metrics),
        "nobody": (replace(metrics, environ=to("http://127.0.0.1:9")), metrics),
        "watched": (replace(metrics, watchers=5), metrics),
        "watched_quickly": (replace(metrics, watchers=5, interval_ms=100), metrics),
    }
    found: dict[str, object] = {}
    for name, (one, other) in settings.items():
        if not chosen.only or name in chosen.only:
            sys.stderr.write(f"{name}\n")
            found[name] = compared(turns(one, other, chosen.sequences, chosen.pairs))
    figures: dict[str, object] = {
        "sequences": chosen.sequences,
        "tokens": TOKENS,
        "pairs": chosen.pairs,
        **found,
        "spans_received": [collector.stop() for collector in collectors],
    }
    record("seeing_whole", figures, save=chosen.save)


def compared(found: Sequence[Pair]) -> dict[str, object]:
    """With and without, by process. `added_ms_per_s`: what `service` spent more, by the second, as
    what is done so many times a second costs a slow stack more of each token's time.
    `added_share`: the same of the whole, the worker's time taken as that without.
    """
    told: dict[str, object] = {}
    with_us, without_us = [
        {role: median(pair[at][role] for pair in found) for role in (*ROLES, SERVICE, WHOLE, SPEED)}
        for at in (0, 1)
    ]
    for role in ROLES:
        told[role] = [round(with_us[role], 1), round(without_us[role], 1)]
    for role in (SERVICE, WHOLE):
        ratios = [one[role] / other[role] for one, other in found]
        told[role] = {
            "us": [round(with_us[role], 1), round(without_us[role], 1)],
            "ratio": round(median(ratios), 4),
            "from_to": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    speeds = [one[SPEED] / other[SPEED] for one, other in found]
    told["speed"] = {
        "ratio": round(median(speeds), 4),
        "from_to": [round(min(speeds), 3), round(max(speeds), 3)],
    }
    told[SPEED] = [round(with_us[SPEED]), round(without_us[SPEED])]
    added = median((one[SERVICE] - other[SERVICE]) * one[SPEED] / 1000 for one, other in found)
    share = median((one[SERVICE] - other[SERVICE]) / other[WHOLE] for one, other in found)
    return told | {"added_ms_per_s": round(added, 1), "added_share": round(share, 4)}


def to(collector: str) -> Mapping[str, str]:
    """Spans go there."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_METRICS_EXPORTER": "none"}


if __name__ == "__main__":
    main()
