"""Steps in which one row's prompt is computed while the others decode: most steps of a busy server.

step     wall time from one result to the next, every plan of one step, the worker a step ahead
device   from the step's begin to its end there; idle: of the profiled stretch, no kernel ran
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import (
    BLOCK_SIZE,
    Shape,
    limits_of,
    pages_of,
    random_weights,
    resident,
    shapes,
)
from benchmarks.gpu.steps import busy, events_of, full_batch, nobody, quick_on_cpu, shares
from gpu_worker.batch.plans import BlockTable, Join, Plan, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.model.weights import Weights
from gpu_worker.runner.step_graphs import Bucket
from gpu_worker.runner.stepping import OneAhead

STEPS, ROWS, CONTEXT, CHUNK = 12, 64, 1024, 512


def steps(bench: Bench) -> None:
    kind = ProfilerActivity.CUDA if bench.is_gpu else ProfilerActivity.CPU
    with quick_on_cpu(bench):
        for shape in shapes(bench):
            weights = random_weights(shape, bench)
            results, at_s = run(shape, weights, bench)
            with profile(activities=[kind]) as profiled:
                run(shape, weights, bench)
            events = events_of(profiled, bench)
            # By its end all that is made before the first step is done.
            late = [event for event in events if event[0] >= _middle(events)]
            spans = [(first, last) for first, last, _ in late]
            idle = 1 - busy(spans) / max(1e-9, max(last for _, last in spans) - spans[0][0])
            half = len(results) // 2
            bench.row(
                "mixed steps", what=shape.name, rows=results[-1].timings.rows,
                tokens=results[-1].timings.tokens_computed,
                step_ms=steady_s(at_s) * 1e3,
                device_ms=statistics.median(r.timings.forward_us for r in results[half:]) / 1e3,
                idle_percent=100 * idle, kernels_per_step=len(late) / half,
            )  # fmt: skip
            for name, share in shares(late):
                bench.row(
                    "time of mixed steps", what=shape.name, kernel=name[:60], percent=100 * share
                )


def _middle(events: list[tuple[float, float, str]]) -> float:
    """When half of the steps were through: the device's rows move on once in each."""
    moves = [first for first, _, name in events if "advance_rows" in name]
    return moves[-(len(moves) // 2)] if len(moves) > 1 else events[len(events) // 2][0]


class Mixed:
    """Rows that decode beside a prompt, on a runner that may compute them many times."""

    def __init__(
        self, shape: Shape, weights: Weights, bench: Bench, pages: Tensor | None = None
    ) -> None:
        """`pages`: of another that does not run meanwhile."""
        self._steps, self.rows = bench.sized(STEPS, 4), bench.sized(ROWS, 3)
        self.context, self.chunk = bench.sized(CONTEXT, 16), bench.sized(CHUNK, 5)
        # Decodes grow by a token a step, the prompt by a chunk.
        self._decode_blocks = -(-(self.context + 2 * self._steps) // BLOCK_SIZE)
        prompt_blocks = -(-(self.chunk * self._steps + self._steps) // BLOCK_SIZE)
        self._limits = limits_of(
            shape,
            slots=self.rows,
            context=max(self._decode_blocks, prompt_blocks) * BLOCK_SIZE,
            step_tokens=self.chunk + self.rows,
            pool=(self.rows * self._decode_blocks + prompt_blocks) * BLOCK_SIZE,
        )
        self.pages = pages_of(shape, self._limits, bench) if pages is None else pages
        recorded = [Bucket(self.rows, self._limits.step_tokens, is_decode=False)]
        self._runner = resident(shape, weights, self._limits, bench, recorded, pages=self.pages)

    def run(self) -> tuple[list[StepResult], list[float]]:
        """The whole prompt from its start: (results, when each was there)."""
        count, prompt = self._steps, self.chunk * self._steps
        stepper = OneAhead(Rows(self._limits), self._runner)
        results: list[StepResult] = []
        at_s: list[float] = []

        def on_result(result: StepResult) -> None:
            results.append(result)
            at_s.append(time.perf_counter())

        first = beside_decodes(
            self.rows, self.context, count, self._decode_blocks, prompt, self.chunk
        )
        for plan_id in range(1, count + 1):
            joins = first.joins if plan_id == 1 else ()
            stepper.run(replace(first, plan_id=plan_id, joins=joins), 0, on_result, nobody)
        stepper.clear()
        assert len(results) == count
        return results, at_s

    def step_s(self) -> float:
        """Median of a run."""
        _, at_s = self.run()
        return steady_s(at_s)


def steady_s(at_s: Sequence[float]) -> float:
    """Median of the steps between the first, which sends the batch, and the last, which has none
    behind it that is launched before.
    """
    return statistics.median(b - a for a, b in pairwise(at_s[1:-1]))


def run(shape: Shape, weights: Weights, bench: Bench) -> tuple[list[StepResult], list[float]]:
    """(results, when each was there)."""
    bench.free()
    return Mixed(shape, weights, bench).run()


def beside_decodes(
    rows: int, context: int, count: int, decode_blocks: int, prompt: int, chunk: int
) -> Plan:
    """One step; the last row has all of its prompt before it."""
    decodes = full_batch(rows - 1, context, count, decode_blocks)
    slot, first = rows - 1, (rows - 1) * decode_blocks
    tokens = tuple((7 * at) % 90 for at in range(prompt))
    blocks = tuple(range(first, first + -(-(prompt + count) // BLOCK_SIZE)))
    join = Join(
        slot=slot,
        sequence_id=slot,
        token_ids=tokens,
        prompt_tokens=prompt,
        num_computed_tokens=0,
        block_tables=(BlockTable(blocks),),
        sampling=decodes.joins[0].sampling,
    )
    checksum = decodes.membership_checksum + (slot + 1) * (2 * slot + 1)
    return replace(
        decodes,
        lease_steps=1,
        joins=(*decodes.joins, join),
        chunks=((slot, chunk),),
        membership_checksum=checksum % (1 << 64),
    )
