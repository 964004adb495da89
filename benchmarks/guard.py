"""Has a hot path become much slower? Ratios, so that the machine hardly matters.

    python -m benchmarks.guard [--store]

Each probe's CPU time per unit is divided by that of a calibration loop, plain Python of the same
run, and compared with the ratio kept in benchmarks/results/guard.json. Only a large drop fails:
more than twice the kept ratio, in each of three attempts. --store keeps what was measured.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from benchmarks.core.bench_ledger import dispatch_us
from benchmarks.core.bench_scheduler import Bench
from benchmarks.recording import RESULTS, cpu_model, versions
from gateway.text.detokenizer import Detokenizer, Pieces
from gateway.text.stop_strings import StopMatcher
from kaiten.client.following import Following
from kaiten.mini import CHECKPOINT
from kaiten.v1 import inference_service_pb2 as pb
from ledger import Ledger

KEPT = RESULTS / "guard.json"
SCHEMA_VERSION = 1
SLOWER_MAX = 2.0
ATTEMPTS = 3
TURNS = 5
TOKENIZER = CHECKPOINT / "tokenizer.json"
STREAM_TOKENS = 4000


@dataclass(slots=True)
class _Cell:
    count: int = 0


def calibrate_us() -> float:
    """CPU time of one turn of a loop that does what Python services do: attributes, dicts, ints."""
    cells = {index: _Cell() for index in range(64)}
    turns = 40_000
    started_ns = time.thread_time_ns()
    for turn in range(turns):
        cell = cells[turn & 63]
        cell.count += turn
    return (time.thread_time_ns() - started_ns) / 1000 / turns


def timed_us(work: Callable[[], int]) -> float:
    """CPU time per unit; `work` returns how many it did."""
    started_ns = time.thread_time_ns()
    units = work()
    return (time.thread_time_ns() - started_ns) / 1000 / units


def core(load: str) -> Callable[[], float]:
    """Scheduler core: plan and commit, per row and step."""

    def probe() -> float:
        rows = 64
        return median(Bench(load, rows, 60).run()) / rows

    return probe


def follow() -> float:
    """Ledger: decoding a journal record and handing out its tokens, per token, half of it ours."""
    return asyncio.run(_follow())


async def _follow() -> float:
    ledger = await Ledger.connect("redis://127.0.0.1:1")  # Never opened: this is all decoding.
    try:
        return dispatch_us(ledger, 0.5)
    finally:
        await ledger.close()


def detokenize() -> float:
    """Gateway: text of one more token."""
    pieces = Pieces(Tokenizer.from_file(str(TOKENIZER)))
    token_ids = [10 + index * 37 % 1500 for index in range(STREAM_TOKENS)]
    for token_id in token_ids:
        pieces.get(token_id)

    def work() -> int:
        detokenizer = Detokenizer(pieces)
        for token_id in token_ids:
            detokenizer.feed((token_id,))
        return len(token_ids)

    return timed_us(work)


def stop_strings() -> float:
    """Gateway: looking for two stop strings in one more piece of text."""

    def work() -> int:
        matcher = StopMatcher(("\n\n", "</answer>"))
        for index in range(STREAM_TOKENS):
            matcher.feed("word <" if index % 7 == 0 else " another")
        return STREAM_TOKENS

    return timed_us(work)


def client_follow() -> float:
    """Client: one more delta of a stream."""
    deltas = [
        pb.GenerationEvent(delta=pb.Delta(position=index, token_count=1, text="word"))
        for index in range(STREAM_TOKENS)
    ]

    def work() -> int:
        following = Following(generate=pb.GenerateRequest(request_id="r"), resume_s=1.0)
        for delta in deltas:
            following.feed(delta)
        return len(deltas)

    return timed_us(work)


PROBES: Mapping[str, Callable[[], float]] = {
    "scheduler core, steady, per row and step": core("steady"),
    "scheduler core, crowded, per row and step": core("crowded"),
    "ledger follower, per token": follow,
    "gateway detokenizer, per token": detokenize,
    "gateway stop strings, per token": stop_strings,
    "client follower, per delta": client_follow,
}


def ratio_of(probe: Callable[[], float]) -> float:
    """The best of a few turns over the best calibration around them: noise only ever adds."""
    calibrations, found = [calibrate_us()], []
    for _ in range(TURNS):
        found.append(probe())
        calibrations.append(calibrate_us())
    return min(found) / min(calibrations)


def guarded(probe: Callable[[], float], kept: float | None) -> float:
    """The ratio; a bad one is only believed when it comes again."""
    ratio = ratio_of(probe)
    for _ in range(ATTEMPTS - 1):
        if kept is None or ratio <= kept * SLOWER_MAX:
            break
        ratio = min(ratio, ratio_of(probe))
    return ratio


def read_kept(path: Path = KEPT) -> dict[str, float]:
    """Empty before anything was stored."""
    if not path.exists():
        return {}
    ratios: dict[str, float] = json.loads(path.read_text())["ratios"]
    return ratios


def is_bad(ratio: float, kept: float | None) -> bool:
    return kept is not None and ratio > kept * SLOWER_MAX


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", action="store_true", help="keep these ratios from now on")
    chosen = parser.parse_args()
    kept = {} if chosen.store else read_kept()
    ratios = {name: guarded(probe, kept.get(name)) for name, probe in PROBES.items()}
    print(f"{'':44} {'ratio':>8} {'kept':>8} {'now/kept':>9}")
    for name, ratio in ratios.items():
        before = kept.get(name)
        beside = f"{before:8.2f} {ratio / before:9.2f}" if before else f"{'-':>8} {'-':>9}"
        print(f"{name:44} {ratio:8.2f} {beside}{'  SLOWER' if is_bad(ratio, before) else ''}")
    if chosen.store:
        content = {
            "schema": SCHEMA_VERSION,
            "day": time.strftime("%Y-%m-%d"),
            "cpu": cpu_model(),
            "versions": versions(),
            "unit": "CPU time per unit over that of one calibration turn",
            "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        }
        KEPT.write_text(json.dumps(content, indent=2) + "\n")
    return int(any(is_bad(ratio, kept.get(name)) for name, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
