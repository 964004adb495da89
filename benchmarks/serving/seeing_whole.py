"""What metrics, traces and watchers cost a whole stack: processor time of its processes per token.

    python -m benchmarks.serving.seeing_whole [--turns 5] [--sequences 256] [--save]

Two stacks side by side do the same work at the same time, one with and one without, so that
whatever else the machine does is there for both. Of each process: microseconds per token with,
without, and the one by the other.
Metrics: all pages open, fetched every ten seconds, beside none. Spans: beside metrics, sampled as
by default, sent to a collector in a process of its own, whose time does not count; and to an
address where nobody is. Watched: beside metrics, by five open pages of `/v1/watch` with ten events
a second; slowly: with the four that are told to who asks for no interval. What is done so many
times a second counts double here, as each stack has half of the machine.
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
WORKER: Final = "gpu_worker"
SPEED: Final = "tokens_per_s"
ROLES: Final = ("scheduler_svc", "gateway", WORKER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a stack is served."""

    words: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    watchers: int = 0
    # Of those, between two events.
    interval_ms: int = 100


def collect(pipe: Connection) -> None:
    """In a process of its own, until it hears something: then it says how many spans it has."""
    with collecting() as collector:
        pipe.send(collector.address)
        pipe.recv()
        pipe.send(len(collector.spans))


def fetch(pages: Sequence[str], over: threading.Event) -> None:
    """Each page, as often as the shipped Prometheus does; the first in the middle of its wait."""
    wait_s = FETCH_S / 2
    with httpx.Client(timeout=60) as client:
        while not over.wait(wait_s):
            wait_s = FETCH_S
            for page in pages:
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
    """Served with these words, in this environment, and looked at by so many."""

    def __init__(self, kind: Kind, sequences: int, folder: Path) -> None:
        self._kind, self._sequences = kind, sequences
        room = ["--slots", str(sequences), "--num-blocks", str(sequences * 20)]
        self._served = Served(folder, *kind.words, *room, environ=kind.environ)

    def spent_us(self, begin: threading.Barrier) -> dict[str, float]:
        """Of processor time, per token, by process; begun together with the other."""
        served, kind = self._served, self._kind
        generate(served.http_url, self._sequences, WARM_TOKENS)
        pages = [f"http://127.0.0.1:{port}/metrics" for port in _ports(served.said)]
        over, pid = threading.Event(), served.process.pid
        with ThreadPoolExecutor(1 + kind.watchers) as lookers:
            looking = [lookers.submit(fetch, pages, over)]
            looking += [
                lookers.submit(watch, served.http_url, kind.interval_ms, over)
                for _ in range(kind.watchers)
            ]
            begin.wait()
            before_s, began_s = cpu_s(pid), time.perf_counter()
            tokens = generate(served.http_url, self._sequences, TOKENS)
            after_s, took_s = cpu_s(pid), time.perf_counter() - began_s
            over.set()
        for each in looking:
            each.result()
        spent = {
            role: (after_s[role] - before_s.get(role, 0.0)) / tokens * 1e6
            for role in after_s
            if role != "client"
        }
        return spent | {SPEED: tokens / took_s}

    def stop(self) -> None:
        self._served.stop()
        self._served.__exit__(None, None, None)


def turn(kinds: Sequence[Kind], sequences: int) -> list[dict[str, float]]:
    """Microseconds of processor time per token of each."""
    begin = threading.Barrier(len(kinds))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(kinds)) as pool:
        stacks = [Stack(k, sequences, Path(folder) / str(n)) for n, k in enumerate(kinds)]
        try:
            return [*pool.map(lambda stack: stack.spent_us(begin), stacks)]
        finally:
            for stack in stacks:
                stack.stop()


def watch(url: str, interval_ms: int, over: threading.Event) -> None:
    """As a dashboard does, until it is over; what it reads is thrown away."""
    path = f"{url}/v1/watch?interval_ms={interval_ms}"
    with httpx.stream("GET", path, timeout=60) as reply:
        reply.raise_for_status()
        for _ in reply.iter_raw():
            if over.is_set():
                return


def _ports(said: str) -> list[str]:
    shown = re.search(r"metrics +(http.*)", said)
    return re.findall(r":(\d+)", shown[1]) if shown else []


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument(
        "--only", action="append", help="of metrics, spans, nobody, watched, watched_slowly"
    )
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    collector = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,))
    collector.start()
    nothing = Kind(environ={"KAITEN_GATEWAY_METRICS": "false"})
    metrics = Kind(words=["--metrics-port", "0"])
    settings: Mapping[str, tuple[Kind, Kind]] = {
        "metrics": (metrics, nothing),
        "spans": (replace(metrics, environ=to(ours.recv())), metrics),
        "nobody": (replace(metrics, environ=to("http://127.0.0.1:9")), metrics),
        "watched": (replace(metrics, watchers=5), metrics),
        "watched_slowly": (replace(metrics, watchers=5, interval_ms=250), metrics),
    }
    found: dict[str, object] = {}
    for name, pair in settings.items():
        if chosen.only and name not in chosen.only:
            continue
        turns = []
        for at in range(chosen.turns):
            order = 1 if at % 2 == 0 else -1
            one, other = turn(pair[::order], chosen.sequences)[::order]
            turns.append((one, other))
            sys.stderr.write(f"{name}: {compared(turns[-1:])}\n")
        found[name] = compared(turns)
    ours.send(None)
    figures: dict[str, object] = {
        "sequences": chosen.sequences,
        "tokens": TOKENS,
        **found,
        "spans_received": ours.recv(),
    }
    collector.join()
    record("seeing_whole", figures, save=chosen.save)


def compared(turns: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, object]:
    """With and without, all turns together, by process; `service` is all but the worker, whose
    time is the model's. `added_ms_per_s`: what `service` spent more, by the second, as what is done
    so many times a second costs a slow stack more of each token's time.
    """
    told: dict[str, object] = {}
    with_us, without_us = [
        {role: sum(turn[at][role] for turn in turns) / len(turns) for role in turns[0][at]}
        for at in (0, 1)
    ]
    for us in (with_us, without_us):
        us["service"] = sum(n for role, n in us.items() if role not in (WORKER, SPEED))
        us["whole"] = us["service"] + us[WORKER]
    for role in (*ROLES, "service", "whole"):
        one, other = with_us[role], without_us[role]
        told[role] = [round(one, 1), round(other, 1), round(one / other, 3)]
    told[SPEED] = [round(with_us[SPEED]), round(without_us[SPEED])]
    added_us = with_us["service"] - without_us["service"]
    told["added_ms_per_s"] = round(added_us * with_us[SPEED] / 1000, 1)
    return told


def to(collector: str) -> Mapping[str, str]:
    """Spans go there."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_METRICS_EXPORTER": "none"}


if __name__ == "__main__":
    main()
