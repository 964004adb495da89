"""The ladder from static to continuous batching with paged memory, on one and the same stack.

    python -m benchmarks.ladder.ladder [--repeats 2] [--requests 96] [--save]

Four rungs share one KV pool, except the second, which stands for memory without limit:

static, reserved        seats = pool / longest request; a batch runs until all of it is done
static, equal batch     as many seats as the last rung
continuous, reserved    seats as on the first rung, but a free one is taken at once
continuous, paged       memory is taken by the block, so that more seats fit into the same pool

The static rungs are batches of fixed shape (`static_batches`): rows that are done are computed to
the end of their batch, as a static engine does. All rungs take turns; a crowd is due at once,
lengths are forced. The gain of continuous over static with equal seats is set beside its law,
E[max of the batch] / E[length], taken from the very lengths. With --save table and plot of
docs/continuous-batching.md follow.
"""

import argparse
import asyncio
import heapq
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from benchmarks.ladder import ladder_page, page
from benchmarks.ladder.ladder_page import Cell, Gain
from benchmarks.ladder.static_batches import StaticBatches
from benchmarks.ladder.tally import Batches, Tally
from benchmarks.recording import record
from benchmarks.serving.stack import Stack, serving
from kaiten.bench.figures import Figures, figures_of
from kaiten.bench.laws import LAWS
from kaiten.bench.runner import Load
from kaiten.bench.targets import GrpcTarget, Target
from kaiten.bench.workload import Job, fill, scaled
from ledger import Ledger

PROMPT_TOKENS, OUTPUT_TOKENS_MAX = 16, 384
REQUEST_TOKENS_MAX = PROMPT_TOKENS + OUTPUT_TOKENS_MAX
# 128 blocks of the shipped model in bf16: 2048 tokens.
POOL_MB, POOL_TOKENS = 4, 2048
AMPLE_MB = 16
SEATS_RESERVED = POOL_TOKENS // REQUEST_TOKENS_MAX
SEATS_PAGED = 16
VOCAB_SIZE = 1500
# The law, and what its lengths are multiplied with to fit a small model's context.
CROWDS = {
    "uniform": ("uniform", 1 / 8),
    "exponential": ("exponential-1536", 1 / 4),
    "conversation": ("azure-conversation", 1 / 8),
    "code": ("azure-code", 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way of batching."""

    name: str
    seats: int
    is_static: bool = False
    pool_mb: int = POOL_MB


RUNGS = (
    Rung(name="static, reserved", seats=SEATS_RESERVED, is_static=True),
    Rung(name="static, equal batch", seats=SEATS_PAGED, is_static=True, pool_mb=AMPLE_MB),
    Rung(name="continuous, reserved", seats=SEATS_RESERVED),
    Rung(name="continuous, paged", seats=SEATS_PAGED),
)
# Same seats, static and continuous.
PAIRS = ((RUNGS[0], RUNGS[2]), (RUNGS[1], RUNGS[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One crowd on one rung, once."""

    figures: Figures
    batches: Batches


def crowd_of(name: str, requests: int) -> tuple[Job, ...]:
    """Short prompts, outputs by the law."""
    law, factor = CROWDS[name]
    rng = np.random.default_rng(7)
    shapes = [
        replace(
            shape,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=min(shape.output_tokens, OUTPUT_TOKENS_MAX),
        )
        for shape in (scaled(shape, factor) for shape in LAWS[law].draw(rng, requests))
    ]
    return fill(shapes, rng, VOCAB_SIZE)


def static_steps(lengths: Sequence[int], seats: int) -> int:
    """Each batch takes as long as its longest member."""
    return sum(max(lengths[start : start + seats]) for start in range(0, len(lengths), seats))


def law(lengths: Sequence[int], seats: int) -> float:
    """E[max of the batch] / E[length]: the gain when the queue never ends."""
    return static_steps(lengths, seats) * seats / sum(lengths)


def law_to_the_end(lengths: Sequence[int], accepted: Sequence[int], seats: int) -> float:
    """The gain for just these requests, `accepted` in that order by the continuous run: at the end
    seats stand empty however they are filled."""
    free_at = [0] * seats
    for length in accepted:
        heapq.heappush(free_at, heapq.heappop(free_at) + length)
    return static_steps(lengths, seats) / max(free_at)


def static_kv_waste(lengths: Sequence[int], seats: int) -> float:
    """Of the memory reserved while batches run, the part without a token that is still of use."""
    used = sum(length * PROMPT_TOKENS + length * (length + 1) // 2 for length in lengths)
    taken = sum(
        max(batch) * len(batch) * REQUEST_TOKENS_MAX
        for batch in (lengths[start : start + seats] for start in range(0, len(lengths), seats))
    )
    return 1 - used / taken


async def measure(stack: Stack, rung: Rung, jobs: Sequence[Job]) -> Measured:
    """Serve the crowd once, reading the journal meanwhile: old records are folded away soon."""
    ledger = await Ledger.connect(stack.store_url)
    target: Target = GrpcTarget(stack.grpc)
    if rung.is_static:
        target = StaticBatches(target, rung.seats)
    try:
        await target.prepare()
        cell, lease = await ledger.cell()
        assert cell is not None
        assert lease is not None
        tally = Tally(
            slots=rung.seats,
            block_tokens=cell.model.block_size,
            block_count=cell.model.block_count,
            prompt_tokens=len(jobs[0].prompt),
            reserve_tokens=REQUEST_TOKENS_MAX,
        )
        reading = asyncio.create_task(_read(ledger, lease.journal_seq, tally, len(jobs)))
        load = Load(target, timeout_s=300.0)
        outcomes = await load.open_loop(jobs, [0.0] * len(jobs))
        await asyncio.wait_for(reading, 30.0)
    finally:
        await target.close()
        await ledger.close()
    figures = figures_of(outcomes)
    assert figures.requests_ok == len(jobs), figures.errors
    assert not figures.wrong_length
    return Measured(figures=figures, batches=tally.result())


async def _read(ledger: Ledger, after_seq: int, tally: Tally, requests: int) -> None:
    """Every record until so many requests have ended."""
    while requests:
        records = await ledger.journal_read(after_seq, block_ms=200, count=200)
        seqs = [after_seq, *(each.seq for each in records)]
        assert all(b == a + 1 for a, b in pairwise(seqs)), "records were folded before being read"
        after_seq = seqs[-1]
        tally.add(records)
        requests -= sum(len(each.finished) for each in records)


async def climb(requests: int, repeats: int) -> dict[tuple[str, str], list[Measured]]:
    """All rungs at once, in turns, for each crowd."""
    crowds = {name: crowd_of(name, requests) for name in CROWDS}
    found: dict[tuple[str, str], list[Measured]] = {}
    with ExitStack() as open_stacks:
        memories = {(rung.seats, rung.pool_mb): rung for rung in RUNGS}
        stacks = {key: open_stacks.enter_context(_serving(r)) for key, r in memories.items()}
        for key, rung in memories.items():
            await measure(stacks[key], rung, crowds["code"][: 2 * rung.seats])  # warm
        for _ in range(repeats):
            for name, jobs in crowds.items():
                for rung in RUNGS:
                    measured = await measure(stacks[rung.seats, rung.pool_mb], rung, jobs)
                    found.setdefault((name, rung.name), []).append(measured)
                    rate = measured.figures.output_tokens_per_s
                    print(f"{name:14} {rung.name:22} {rate:8.0f} tok/s", flush=True)
    return found


def _serving(rung: Rung) -> AbstractContextManager[Stack]:
    return serving("", "--slots", str(rung.seats), "--kv-memory-mb", str(rung.pool_mb))


async def long_context() -> Batches:
    """KV waste where contexts are long beside a block: 512-token prompts, paged."""
    rng = np.random.default_rng(7)
    shapes = LAWS["exponential-512"].draw(rng, 24)
    shapes = [replace(shape, output_tokens=min(shape.output_tokens, 256)) for shape in shapes]
    jobs = fill(shapes, rng, VOCAB_SIZE)
    rung = Rung(name="", seats=8, pool_mb=AMPLE_MB)
    with _serving(rung) as stack:
        return (await measure(stack, rung, jobs)).batches


def cells_of(found: dict[tuple[str, str], list[Measured]], requests: int) -> list[Cell]:
    """Medians over the rounds."""
    rungs = {rung.name: rung for rung in RUNGS}
    return [
        _cell(crowd, rungs[name], rounds, lengths_of(crowd, requests))
        for (crowd, name), rounds in found.items()
    ]


def _cell(crowd: str, rung: Rung, rounds: Sequence[Measured], lengths: Sequence[int]) -> Cell:
    batches = [each.batches for each in rounds]
    figures = [each.figures for each in rounds]
    steps = median(each.steps for each in batches)
    waste = median(
        each.kv_waste_paged if rung is RUNGS[3] else each.kv_waste_reserved for each in batches
    )
    return Cell(
        crowd=crowd,
        rung=rung.name,
        seats=rung.seats,
        tokens_per_s=median(each.output_tokens_per_s for each in figures),
        latency_mean_s=median(each.latency_s.mean for each in figures),
        latency_p99_s=median(each.latency_s.p99 for each in figures),
        occupancy=sum(lengths) / (steps * rung.seats),
        padding_waste=1 - sum(lengths) / sum(batches[0].lengths),
        kv_waste=static_kv_waste(lengths, rung.seats) if rung.is_static else waste,
        steps=int(steps),
        preemptions=int(median(each.preemptions for each in batches)),
    )


def lengths_of(crowd: str, requests: int) -> list[int]:
    return [job.output_tokens for job in crowd_of(crowd, requests)]


def gains_of(
    found: dict[tuple[str, str], list[Measured]], cells: Sequence[Cell], requests: int
) -> list[Gain]:
    """Continuous over static with equal seats, beside the law."""
    by = {(cell.crowd, cell.rung): cell for cell in cells}
    gains = []
    for crowd in CROWDS:
        lengths = lengths_of(crowd, requests)
        for static, continuous in PAIRS:
            before, after = by[crowd, static.name], by[crowd, continuous.name]
            accepted = [each.batches.lengths for each in found[crowd, continuous.name]]
            gains.append(
                Gain(
                    crowd=crowd,
                    seats=static.seats,
                    law=law(lengths, static.seats),
                    law_to_the_end=median(
                        law_to_the_end(lengths, each, static.seats) for each in accepted
                    ),
                    in_steps=before.steps / after.steps,
                    in_throughput=after.tokens_per_s / before.tokens_per_s,
                    latency_mean=after.latency_mean_s / before.latency_mean_s,
                    latency_p99=after.latency_p99_s / before.latency_p99_s,
                )
            )
    return gains


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--save", action="store_true", help="keep results, plot and table")
    chosen = parser.parse_args()
    found = await climb(chosen.requests, chosen.repeats)
    cells = cells_of(found, chosen.requests)
    gains = gains_of(found, cells, chosen.requests)
    long = await long_context()
    figures = {
        "requests": chosen.requests,
        "repeats": chosen.repeats,
        "pool_tokens": POOL_TOKENS,
        "request_tokens_max": REQUEST_TOKENS_MAX,
        "cells": [asdict(cell) for cell in cells],
        "gains": [asdict(gain) for gain in gains],
        "kv_waste_long_context": round(long.kv_waste_paged, 4),
    }
    record("ladder", figures, save=chosen.save)
    table = ladder_page.table(cells, gains, long.kv_waste_paged)
    print(table)
    if chosen.save:
        ladder_page.draw(cells, gains, page.IMAGES / "ladder.svg")
        page.write_table("ladder", table)


if __name__ == "__main__":
    asyncio.run(main())
