"""What the archive costs: bytes per token on disk, and CPU time of the scheduler per token.

    python -m benchmarks.core.bench_archive [--rows 1,16,128] [--rounds 3] [--tokens 300] [--save]

A real store, scheduler and mock worker that decodes `rows` sequences at 50 steps/s, with an archive
(of a scheduler that takes its time, `timed_archive`) and without, in turns. Two equal runs differ
by more than an archive costs, so `share` is the CPU time it took itself, in the loop and in its
thread, over that of the scheduler's process without one; both of medians.

Goals: at most 15 bytes a token, and 3 % more CPU seconds per token.
"""

import argparse
import asyncio
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.core import timed_archive
from benchmarks.recording import record
from ledger.archive import entries, segments
from tests.support.cluster import Cluster
from tests.support.processes import SCHEDULER

TIMED = "benchmarks.core.timed_archive"
STEP_MS = 20
PROMPT_TOKENS = 200
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load served once."""

    tokens: int
    records: int
    scheduler_s: float
    archive_bytes: int
    archive_s: float


async def serve(rows: int, tokens: int, *, is_kept: bool) -> Run:
    """All rows decode together; prompts are in it, as they are in life."""
    with tempfile.TemporaryDirectory(prefix="kaiten-archive-") as scratch:
        archive = Path(scratch) / "archive"
        blocks = -(-(PROMPT_TOKENS + tokens + 1) // BLOCK_SIZE) + 1
        worker_flags = {
            "slots": max(rows, 2),
            "step_ms": STEP_MS,
            "block_size": BLOCK_SIZE,
            "kv_blocks": blocks * max(rows, 2),
            "context_tokens": PROMPT_TOKENS + tokens + 1,
            "step_tokens": max(rows, 2) + 512,
        }
        flags: dict[str, object] = {"archive_dir": archive} if is_kept else {}
        async with Cluster(
            Path(scratch),
            worker_flags=worker_flags,
            scheduler_flags=flags,
            scheduler_module=TIMED if is_kept else SCHEDULER,
        ) as cluster:
            process = psutil.Process(cluster.schedulers[0].pid)
            before = sum(process.cpu_times()[:2])
            await cluster.submit_many(rows, prompt_tokens=PROMPT_TOKENS, max_tokens=tokens)
            await cluster.all_done()
            taken_s = sum(process.cpu_times()[:2]) - before
            cluster.is_checked = False
            cluster.schedulers[0].send(signal.SIGTERM)
            cluster.schedulers[0].join()
        found = [one.record for one in entries([archive]) if one.HasField("record")]
        return Run(
            tokens=rows * tokens,
            records=len(found),
            scheduler_s=taken_s,
            archive_bytes=sum(one.path.stat().st_size for one in segments([archive])),
            archive_s=timed_archive.cost_s(Path(scratch)) if is_kept else 0.0,
        )


async def measure(rows: int, tokens: int, rounds: int) -> dict[str, object]:
    kept, without = [], []
    for _ in range(rounds):
        without.append(await serve(rows, tokens, is_kept=False))
        kept.append(await serve(rows, tokens, is_kept=True))
    one = kept[-1]
    base_us = median(run.scheduler_s for run in without) / one.tokens * 1e6
    with_us = median(run.scheduler_s for run in kept) / one.tokens * 1e6
    own_us = median(run.archive_s for run in kept) / one.tokens * 1e6
    return {
        "rows": rows,
        "tokens": one.tokens,
        "records": one.records,
        "bytes_per_token": round(one.archive_bytes / one.tokens, 2),
        "scheduler_us_per_token": round(base_us, 2),
        "scheduler_us_per_token_with_archive": round(with_us, 2),
        "archive_us_per_token": round(own_us, 3),
        "archive_us_per_record": round(own_us * one.tokens / one.records, 1),
        "share": round(own_us / base_us, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="1,16,128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()

    async def run() -> list[dict[str, object]]:
        sizes = [int(text) for text in chosen.rows.split(",")]
        return [await measure(rows, chosen.tokens, chosen.rounds) for rows in sizes]

    record("archive", {"results": asyncio.run(run())}, save=chosen.save)


if __name__ == "__main__":
    main()
