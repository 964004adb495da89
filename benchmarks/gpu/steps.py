"""Steady decode steps as a share of their floor, and how long the device idles between them.

step     wall time from one result to the next, the worker a step ahead
floor    max(weight bytes / read rate, 2 * parameters * rows / matrix rate)
         + context * KV bytes / read rate, with the rates measured in the same run
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.floors import floors
from benchmarks.gpu.models import (
    Shape,
    limits_of,
    pages_of,
    random_weights,
    resident,
    shapes,
)
from benchmarks.serving.one_process import LEADER, greedy
from gpu_worker.batch.plans import BlockTable, Join, Plan, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.model.weights import Weights, made_deterministic
from gpu_worker.runner.step_graphs import ROWS_MIN, decode_buckets
from gpu_worker.runner.stepping import OneAhead
from kernels import dispatch

STEPS = 48
_KERNELS_NAMED = 8


def decode_steps(bench: Bench) -> None:
    read, rate = floors(bench)
    context = bench.sized(1024, 24)
    with quick_on_cpu(bench):
        for shape in shapes(bench):
            weights = random_weights(shape, bench)
            for rows in (2,) if bench.is_tiny else (1, 64, 256):
                results, at_s = run_steps(shape, weights, rows, context, bench)
                step_s = statistics.median(b - a for a, b in pairwise(at_s))
                device_s = statistics.median(r.timings.forward_us for r in results[2:]) / 1e6
                floor_s = floor(shape, rows, context + STEPS // 2, bench.dtype, read, rate)
                bench.row(
                    "decode steps", what=shape.name, rows=rows, context=context,
                    step_ms=step_s * 1e3, device_ms=device_s * 1e3, floor_ms=floor_s * 1e3,
                    of_floor=floor_s / step_s,
                )  # fmt: skip


def deterministic(bench: Bench) -> None:
    """What it costs that a row's bits do not depend on others; in turns."""
    context = bench.sized(1024, 24)
    with quick_on_cpu(bench):
        for shape in shapes(bench):
            weights = random_weights(shape, bench)
            ways = {"usual": weights}
            # What a CPU computes does not differ.
            ways["deterministic"] = made_deterministic(weights) if bench.is_gpu else weights
            for rows in (2,) if bench.is_tiny else (1, 64, 256):
                bench.free()
                pages: Tensor | None = None
                batches: dict[str, Batch] = {}
                for way, its_weights in ways.items():
                    batches[way] = Batch(shape, its_weights, rows, context, bench, pages)
                    pages = batches[way].pages
                found = bench.in_turns({way: each.step_s for way, each in batches.items()})
                step_s = {way: statistics.median(each) for way, each in found.items()}
                bench.row(
                    "deterministic", what=shape.name, rows=rows, context=context,
                    step_ms=step_s["deterministic"] * 1e3, usual_ms=step_s["usual"] * 1e3,
                    times=step_s["deterministic"] / step_s["usual"],
                )  # fmt: skip


def floor(
    shape: Shape, rows: int, context: int, dtype: torch.dtype, read: float, rate: float
) -> float:
    """Seconds."""
    weights_s = shape.parameters * dtype.itemsize / read
    compute_s = 2 * shape.parameters * rows / rate
    return max(weights_s, compute_s) + rows * context * shape.kv_bytes(dtype) / read


@contextmanager
def quick_on_cpu(bench: Bench) -> Iterator[None]:
    """Interpreted kernels are correct, and for whole models far too slow to try a script out."""
    dispatch.force(None if bench.is_gpu else "torch")
    yield
    dispatch.force(None)


class Batch:
    """A full batch of rows that know `context` tokens, on a runner that may run it many times."""

    def __init__(
        self, shape: Shape, weights: Weights, rows: int, context: int, bench: Bench,
        pages: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`pages`: of another of the same size, that does not run meanwhile."""
        self._rows, self._context, self._steps = rows, context, bench.sized(STEPS, 4)
        room = context + 2 * self._steps
        # As a worker of more slots computes so few.
        slots = max(rows, ROWS_MIN)
        self._limits = limits_of(shape, slots=slots, context=room, step_tokens=max(slots, 16))
        self.pages = pages_of(shape, self._limits, bench) if pages is None else pages
        self._runner = resident(
            shape, weights, self._limits, bench, decode_buckets([slots]), pages=self.pages
        )

    def lease(self) -> tuple[list[StepResult], list[float]]:
        """One lease from the start: (results, when each was there)."""
        stepper, blocks = OneAhead(Rows(self._limits), self._runner), self._limits.blocks_per_row
        results: list[StepResult] = []
        at_s: list[float] = []

        def on_result(result: StepResult) -> None:
            results.append(result)
            at_s.append(time.perf_counter())

        plan = full_batch(self._rows, self._context, self._steps, blocks)
        stepper.run(plan, 0, on_result, nobody)
        stepper.clear()
        assert len(results) == self._steps
        return results, at_s

    def step_s(self) -> float:
        """Median of a lease."""
        _, at_s = self.lease()
        return statistics.median(b - a for a, b in pairwise(at_s))


def run_steps(
    shape: Shape, weights: Weights, rows: int, context: int, bench: Bench
) -> tuple[list[StepResult], list[float]]:
    """One lease of a full batch: (results, when each was there)."""
    bench.free()
    return Batch(shape, weights, rows, context, bench).lease()


def nobody() -> bool:
    return False


def full_batch(rows: int, context: int, steps: int, blocks: int) -> Plan:
    """Rows that know `context` tokens and have all but the last of them done."""
    joins = tuple(
        Join(
            slot=slot,
            sequence_id=slot,
            token_ids=tuple((slot + 3 * at) % 90 for at in range(context)),
            prompt_tokens=context,
            num_computed_tokens=context - 1,
            block_tables=(BlockTable(tuple(range(slot * blocks, (slot + 1) * blocks))),),
            sampling=greedy(max_tokens=2 * steps),
        )
        for slot in range(rows)
    )
    return Plan(
        leader=LEADER,
        plan_id=1,
        lease_steps=steps,
        leaves=(),
        joins=joins,
        appends=(),
        copies=(),
        chunks=(),
        membership_checksum=sum((slot + 1) * (2 * slot + 1) for slot in range(rows)) % (1 << 64),
    )


def idle(bench: Bench) -> None:
    """The share of a steady stretch in which no kernel ran, by torch's profiler."""
    kind = ProfilerActivity.CUDA if bench.is_gpu else ProfilerActivity.CPU
    context = bench.sized(1024, 24)
    with quick_on_cpu(bench):
        for shape in shapes(bench):
            weights = random_weights(shape, bench)
            rows = bench.sized(64, 2)
            with profile(activities=[kind]) as profiled:
                run_steps(shape, weights, rows, context, bench)
            events = events_of(profiled, bench)
            spans = [(first, last) for first, last, _ in events]
            # The second half of the steps: before them graphs are recorded and the batch is sent.
            moves = [first for first, _, name in events if "advance_rows" in name]
            middle = spans[0][0] + 0.75 * (spans[-1][1] - spans[0][0])
            start = moves[-(STEPS // 2)] if len(moves) >= STEPS else middle
            late = [span for span in spans if span[0] >= start]
            bench.row(
                "idle in steady decode", what=shape.name, rows=rows, kernels=len(late),
                idle_percent=100 * (1 - busy(late) / max(1e-9, late[-1][1] - late[0][0])),
            )  # fmt: skip
            for name, share in shares([event for event in events if event[0] >= start]):
                bench.row(
                    "time of steady decode", what=shape.name, rows=rows, kernel=name[:60],
                    percent=100 * share,
                )  # fmt: skip


def events_of(profiled: profile, bench: Bench) -> list[tuple[float, float, str]]:
    """What ran on the device: (from, to, name) by start."""
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events() or ()  # type: ignore[no-untyped-call]
        if not bench.is_gpu or "CUDA" in str(event.device_type)
    )


def busy(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them ran; sorted by start."""
    total, end = 0.0, float("-inf")
    for first, last in spans:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def shares(events: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """The kernels that take most of the time, and their share of all of theirs."""
    times: dict[str, float] = {}
    for first, last, name in events:
        times[name] = times.get(name, 0.0) + last - first
    total = max(1e-9, sum(times.values()))
    most = sorted(times, key=lambda name: -times[name])[:_KERNELS_NAMED]
    return [(name, times[name] / total) for name in most]
