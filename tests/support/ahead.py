"""The same plans through a device in turns with the host and through one that is a step ahead.

played = play(in_turns, scheduler, draw_cut)      plans made as results come in
replay(one_ahead, played)                         the same plans, steps still on their way
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BlockTable, Join, Plan, RowSampling, StepOutcome, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.model.decoder import Decoder
from gpu_worker.model.kv_scales import read_scales
from gpu_worker.model.weights import Weights, load_weights
from gpu_worker.runner.device_streams import (
    CpuStreams,
    DeviceStreams,
    NotRecorded,
    streams_for,
)
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.kv_cache import (
    PoolSize,
    allocate_host_blocks,
    allocate_pages,
    block_bytes,
)
from gpu_worker.runner.stepping import InTurns, OneAhead, Stepper
from kernels.kv import fp8
from kernels.linear.packed_linear import WeightDtype
from tests.support.mini_scheduler import MiniScheduler

CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A plan, its results, and whether something newer cut its lease short."""

    plan: Plan
    results: list[StepResult]
    is_cut: bool


class Counting(CpuStreams):
    """Counts what is launched, and refuses to record more than it is told."""

    def __init__(self, *, recorded_max: int = 1 << 30) -> None:
        super().__init__()
        self.launches = self.uploads = self.recorded = 0
        self._recorded_max = recorded_max

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.recorded == self._recorded_max:
            raise NotRecorded("operation not permitted when stream is capturing")
        self.recorded += 1

        def launch() -> None:
            self.launches += 1
            # The device's, not the host's.
            with _disable_current_modes():
                run()

        return launch

    def mark(self) -> Callable[[], None]:
        # Of each upload.
        self.uploads += 1
        return super().mark()


class Model:
    """A checkpoint in memory, for any number of devices."""

    def __init__(
        self,
        folder: Path,
        limits: RowLimits,
        *,
        dtype: torch.dtype = torch.float32,
        weight_dtype: WeightDtype = "auto",
        is_kv_fp8: bool = False,
        is_deterministic: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.limits, self.device = limits, device
        self.config = read_config(folder)
        self.dtype = dtype
        self.kv_dtype = fp8.DTYPE if is_kv_fp8 else self.dtype
        with Checkpoint(folder) as checkpoint:
            self.kv_scales = read_scales(checkpoint, self.config) if is_kv_fp8 else None
            self.weights: Weights = load_weights(
                checkpoint,
                self.config,
                dtype=self.dtype,
                device=device,
                weight_dtype=weight_dtype,
                is_deterministic=is_deterministic,
            )

    def in_turns(self) -> InTurns:
        return InTurns(Rows(self.limits), self.turn_device())

    def turn_device(self) -> EagerRunner:
        return EagerRunner(*self.decoder(), self.host_blocks())

    def one_ahead(self) -> OneAhead:
        return OneAhead(Rows(self.limits), self.resident())

    def resident(self, streams: DeviceStreams | None = None) -> GraphRunner:
        streams, host_blocks = streams or streams_for(self.device), self.host_blocks()
        streams.pin(host_blocks)
        device = GraphRunner(*self.decoder(), self.limits, streams, host_blocks=host_blocks)
        device.record()
        return device

    def decoder(self) -> tuple[Decoder, torch.Tensor]:
        pages = allocate_pages(self.config, self._pool, self.kv_dtype, self.device)
        decoder = Decoder(
            self.config,
            self.weights,
            pages,
            context_tokens=self.limits.context_tokens,
            kv_scales=self.kv_scales,
        )
        return decoder, pages

    def host_blocks(self) -> torch.Tensor:
        return allocate_host_blocks(self.config, self._pool, self.kv_dtype)

    @property
    def _pool(self) -> PoolSize:
        limits = self.limits
        return PoolSize(
            block_count=limits.block_count,
            block_size=limits.block_size,
            block_bytes=block_bytes(self.config, limits.block_size, self.kv_dtype),
            context_tokens=limits.context_tokens,
            host_block_count=limits.host_block_count,
        )


@dataclass
class LateScheduler(MiniScheduler):
    """Hears of finished rows only after the next plan, as one that plans ahead does.

    Until then they hold their slots and get blocks like any other.
    """

    unheard: list[tuple[int, Any]] = field(default_factory=list)
    asked: dict[int, tuple[Sequence[int], RowSampling]] = field(default_factory=dict)

    def submit(
        self, prompt: Sequence[int], params: RowSampling, *, committed: Sequence[int] = ()
    ) -> int:
        sequence_id = super().submit(prompt, params, committed=committed)
        self.asked[sequence_id] = (prompt, params)
        return sequence_id

    def preempt(self, slot: int) -> None:
        """The row leaves with the next plan, and joins again as soon as there is room."""
        row = self.running[slot]
        if row.is_finished or any(row is other for _, other in self.unheard):
            return
        row.is_finished = True
        prompt, params = self.asked[row.sequence_id]
        known = [*prompt, *self.outputs[row.sequence_id]]
        self.waiting.append((row.sequence_id, known, len(prompt), params))

    def next_plan(self) -> Plan | None:
        heard, self.unheard = self.unheard, []
        made = super().next_plan()
        for slot, row in heard:
            if slot in self.running and self.running[slot] is row:
                row.is_finished = True
        return made or (super().next_plan() if heard else None)

    def on_outcome(self, computed: Plan, step: int, outcome: StepOutcome) -> None:
        super().on_outcome(computed, step, outcome)
        for slot, _ in outcome.errors:
            # Until it is heard of, the row has a token more, and blocks for it.
            self.running[slot].known += 1
        for slot in {slot for slot, _ in (*outcome.finished, *outcome.errors)}:
            self.running[slot].is_finished = False
            self.unheard.append((slot, self.running[slot]))


@dataclass
class ReplacingScheduler(LateScheduler):
    """Has a full block of every row copied, as far as blocks are free, and with the next plan the
    copy takes its place; the block itself may be given away by that very plan.
    """

    # Row, index, and the copy that was made.
    copied: list[tuple[Any, int, int]] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)

    def next_plan(self) -> Plan | None:
        slots = {id(row): slot for slot, row in self.running.items()}
        replaced, self.copied = self.copied, []
        for row, index, block in replaced:
            own = row.blocks[index]
            row.blocks[index] = block
            if id(row) in slots:
                # Lowest first in line.
                self._free.append(own)
                self.given_up.add(own)
            else:
                # It has left meanwhile, with its own.
                self._free.append(block)
        done = {slot: (row, row.done) for slot, row in self.running.items()}
        made = super().next_plan()
        if made is None:
            return None
        copies = []
        for slot, (row, tokens) in done.items():
            full = tokens // self.limits.block_size
            if self.running.get(slot) is row and full and len(self._free) > self._promised():
                block, index = self._free.pop(0), made.plan_id % full
                copies.append((row.blocks[index], block))
                self.copied.append((row, index, block))
        return dataclasses.replace(
            made,
            copies=tuple(copies),
            replacements=tuple(
                (slots[id(row)], index, block, 0)
                for row, index, block in replaced
                if id(row) in slots and self.running.get(slots[id(row)]) is row
            ),
        )


@dataclass
class SwappingScheduler(LateScheduler):
    """Keeps the full blocks of who is preempted in the host's memory until the row joins again.

    What they leave is given away by the plan that swaps them out, also to who is swapped in by it.
    """

    # Of rows that wait, by sequence id.
    kept: dict[int, list[int]] = field(default_factory=dict)
    _swaps: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        first = self.limits.block_count
        self._host_free = list(range(first, first + self.limits.host_block_count))

    def preempt(self, slot: int) -> None:
        row, before = self.running[slot], len(self.waiting)
        super().preempt(slot)
        if len(self.waiting) > before:
            full = min(row.done // self.limits.block_size, len(self._host_free))
            kept = self.kept[row.sequence_id] = [self._host_free.pop() for _ in range(full)]
            self._swaps += zip(row.blocks, kept, strict=False)

    def next_plan(self) -> Plan | None:
        if (made := super().next_plan()) is None:
            return None
        swaps, self._swaps = self._swaps, []
        return dataclasses.replace(made, swaps=tuple(swaps))

    def _joins(self) -> list[Join]:
        return [self._swapped_in(join) for join in super()._joins()]

    def _swapped_in(self, join: Join) -> Join:
        row, kept = self.running[join.slot], self.kept.pop(join.sequence_id, [])
        row.blocks = [self._free.pop() for _ in kept]
        row.done = len(kept) * self.limits.block_size
        self._swaps += zip(kept, row.blocks, strict=True)
        self._host_free += kept
        return dataclasses.replace(
            join, num_computed_tokens=row.done, block_tables=(BlockTable(tuple(row.blocks)),)
        )


def play(
    stepper: Stepper,
    scheduler: MiniScheduler,
    steps_before_cut: Callable[[], int],
    before_plan: Callable[[], None] = lambda: None,
) -> list[Played]:
    """Everything submitted, to its end. A lease is cut after so many steps."""
    played: list[Played] = []
    while True:
        before_plan()
        if (plan := scheduler.next_plan()) is None:
            return played
        results: list[StepResult] = []
        most = steps_before_cut()
        stepper.run(plan, 0, results.append, partial(_is_cut, results, most))
        stepper.land()
        for result in results:
            scheduler.on_outcome(plan, result.step, result.outcome)
        is_natural = len(results) == plan.lease_steps or len(results) < most
        played.append(Played(plan=plan, results=results, is_cut=not is_natural))


def _is_cut(results: Sequence[StepResult], most: int) -> bool:
    """Asked after a step whose result is not among them yet."""
    return len(results) + 1 >= most


def replay(stepper: Stepper, played: list[Played], lands: Callable[[], bool]) -> None:
    """The same plans give the same results, whenever the host comes to read them."""
    seen: list[StepResult] = []
    for item in played:
        stepper.run(item.plan, 0, seen.append, _Waiting(item))
        if lands():
            stepper.land()
    stepper.land()
    expected = [without_times(result) for item in played for result in item.results]
    told = [without_times(result) for result in seen]
    # A library's products may depend, in the last bit, on how many rows they have, with padding.
    assert _numbers(told) == pytest.approx(_numbers(expected), abs=1e-4)
    assert _without_numbers(told) == _without_numbers(expected)


def _numbers(results: Sequence[StepResult]) -> list[float]:
    outcomes = [result.outcome for result in results]
    samples = [one for each in outcomes for one in each.logprobs]
    prompts = [one for each in outcomes for one in each.prompt_logprobs]
    told = [number for one in samples for number in (one.logprob, *one.top_logprobs)]
    return told + [number for one in prompts for number in (*one.logprobs, *one.top_logprobs)]


def _without_numbers(results: Sequence[StepResult]) -> list[StepResult]:
    def bare(outcome: StepOutcome) -> StepOutcome:
        samples = [
            dataclasses.replace(one, logprob=0.0, top_logprobs=tuple(0.0 for _ in one.top_logprobs))
            for one in outcome.logprobs
        ]
        prompts = [
            dataclasses.replace(
                one,
                logprobs=tuple(0.0 for _ in one.logprobs),
                top_logprobs=tuple(0.0 for _ in one.top_logprobs),
            )
            for one in outcome.prompt_logprobs
        ]
        return dataclasses.replace(outcome, logprobs=tuple(samples), prompt_logprobs=tuple(prompts))

    return [dataclasses.replace(result, outcome=bare(result.outcome)) for result in results]


class _Waiting:
    """Says that something newer waits when it did."""

    def __init__(self, played: Played) -> None:
        self._asked = 0
        self._played = played

    def __call__(self) -> bool:
        self._asked += 1
        return self._played.is_cut and self._asked >= len(self._played.results)


def without_times(result: StepResult) -> StepResult:
    zeros = dict.fromkeys(("wait_us", "forward_us", "sample_us"), 0)
    timings = dataclasses.replace(result.timings, is_graph=False, **zeros)
    return dataclasses.replace(result, timings=timings)
