"""Steps that a worker runs before it is ready, so that no request pays for being the first.

Of a device that holds the rows itself some are padding, which is compiled and computes nothing;
where it matters what they compute, they are seated: rows of the device, until it is cleared.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.step_types import (
    FLOAT_COLUMNS,
    AheadRunner,
    ModelRunner,
    RowChanges,
    StepInputs,
    StepSamples,
)
from gpu_worker.runner.dummy_steps import every_edit, largest_step, step_of, worst_step
from gpu_worker.runner.graph_runner import GraphRunner

_TOKENS: Final = 32
_ROWS: Final = 4
_TOP_LOGPROBS: Final = 5
_NO_STOP: Final = -1
_TIMES: Final = 2


def warm_up(compute: Callable[[StepInputs], object], limits: RowLimits) -> None:
    """Run a prefill, a mixed step, and decode steps: plain, with log-probabilities, with edits.

    Small ones: threads, scratch memory, compiled kernels and the library's plans come with the
    first step of a kind, whatever its size.
    """
    longest = min(_TOKENS, limits.step_tokens, limits.context_tokens)
    decode = [1] * min(_ROWS, limits.slots)
    compute(step_of([longest], limits))
    compute(step_of([min(2, longest), 1][: limits.slots], limits))
    compute(step_of(decode, limits))
    compute(step_of(decode, limits, logprobs=min(_TOP_LOGPROBS, limits.vocab_size)))
    compute(step_of(decode, limits, edits=every_edit(len(decode), limits.vocab_size)))


def make_ready(
    runner: GraphRunner, on_recorded: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Whatever step comes next finds all it needs compiled, recorded and allocated."""
    limits = runner.limits
    warm_up(lambda step: runner.launch(step).result(), limits)
    runner.record(on_recorded)
    # Last, as recording gives back what torch keeps for later: now no step need ask for memory.
    # Seated, so that a kernel that fails on this device does so before it is relied on.
    launch_seated(runner, worst_step(limits))()
    runner.clear()
    runner.finish()


def launch_seated(runner: GraphRunner, step: StepInputs) -> Callable[[], StepSamples]:
    """Make the rows of the step rows of the device; returns what launches it and waits for it.

    Nobody else may be there. They own what blocks there are, in turns.
    """
    rows, limits = step.row_count, runner.limits
    slots = np.arange(rows)
    contexts, sampling = step.context_lengths.astype(np.int64), step.sampling
    each = -(-contexts // limits.block_size)
    tables = limits.slots * np.arange(limits.groups)[:, None] + slots
    spans = zip((tables * limits.table_width).flat, np.tile(each, limits.groups), strict=True)
    places = np.concatenate([np.arange(at, at + count) for at, count in spans])
    zeros = np.zeros(rows, np.int64)
    # So far from its limit that its token does not end it.
    ints = (
        zeros + 1, contexts, contexts - step.counts, contexts + 2, contexts, zeros, zeros,
        sampling.top_k, sampling.seed, sampling.choice, sampling.logprobs, zeros,
    )  # fmt: skip
    floats = (sampling.temperature, sampling.top_p, sampling.min_p)
    seated = RowChanges(
        slots=slots,
        ints=np.stack(ints),
        floats=np.stack([*floats, *np.zeros((len(FLOAT_COLUMNS) - len(floats), rows), np.float32)]),
        stops=np.full((rows, 1), _NO_STOP, np.int32),
        places=places,
        blocks=(np.arange(len(places)) % limits.block_count).astype(np.int32),
    )
    # Swaps and a copy too: a device loads what copies when the first is made.
    first_host_block = limits.block_count
    out_and_in = ((0, first_host_block), (first_host_block, 0))
    runner.apply(seated, out_and_in if limits.host_block_count else (), ((0, 0),))
    runner.finish()
    return lambda: runner.launch(replace(step, slots=slots)).result()


def tokens_within(
    limit_s: float, seconds_of: Callable[[int], float], *, least: int, most: int
) -> int:
    """How many tokens, in [least, most], a step may have that is to end within `limit_s`.

    Doubles them until it does not, and takes what lies between on a straight line. `seconds_of` a
    number of tokens runs such a step.
    """
    count, seconds = least, seconds_of(least)
    fewer, before_s = count, seconds
    while seconds <= limit_s and count < most:
        fewer, before_s = count, seconds
        count = min(2 * count, most)
        seconds = seconds_of(count)
    if seconds <= limit_s or count == least:
        return count
    return fewer + int((count - fewer) * (limit_s - before_s) / (seconds - before_s))


def mixed_tokens(
    runner: ModelRunner | AheadRunner, limits: RowLimits, limit_s: float | None
) -> int:
    """How many tokens a step may have in which somebody decodes, by running some.

    However slow they are, a full batch of decodes leaves room for as many tokens of prompts. On a
    device that holds the rows they share a full pool, as padding would cost nothing.
    """
    if limit_s is None or limits.slots == 1:
        return limits.step_tokens
    is_ahead = isinstance(runner, GraphRunner)
    shared = limits.block_count * limits.block_size // limits.slots
    context = max(1, min(shared, limits.context_tokens)) if is_ahead else None

    def seconds_of(tokens: int) -> float:
        step = largest_step(replace(limits, step_tokens=tokens), context=context)
        # The least of them: whatever else the machine does only adds.
        return min(_seconds(_begin(runner, step)) for _ in range(_TIMES))

    least = min(limits.slots * (limits.slot_tokens + 1), limits.step_tokens)
    found = tokens_within(limit_s, seconds_of, least=least, most=limits.step_tokens)
    if isinstance(runner, GraphRunner):
        runner.clear()
    return found


def _begin(runner: ModelRunner | AheadRunner, step: StepInputs) -> Callable[[], StepSamples]:
    """What computes the step, honestly: the rows of `launch_seated` go on, so seats are new."""
    if isinstance(runner, GraphRunner):
        return launch_seated(runner, step)
    assert not isinstance(runner, AheadRunner)
    return partial(runner.execute, step)


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s
