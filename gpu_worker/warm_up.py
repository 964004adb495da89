"""Steps that a worker runs before it is ready, so that no request pays for being the first.

They read and write nobody's blocks, and no row: on a device that holds the rows, theirs are
padding.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gpu_worker.device import (
    FloatArray,
    IntArray,
    LogitEdits,
    RowEnds,
    SamplingColumns,
    StepInputs,
)
from gpu_worker.draft import RowLimits
from gpu_worker.resident_device import ResidentDevice

_TOKENS: Final = 32
_ROWS: Final = 4
_TOP_LOGPROBS: Final = 5
_NOBODY: Final = -1
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
    compute(step_of(decode, limits, edits=_every_edit(len(decode), limits.vocab_size)))


def make_ready(
    device: ResidentDevice, on_recorded: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Whatever step comes next finds all it needs compiled, recorded and allocated."""
    limits = device.limits
    warm_up(lambda step: device.launch(step).result(), limits)
    device.record(on_recorded)
    # Last, as recording gives back what torch keeps for later: now no step need ask for memory.
    device.launch(largest_step(limits, context=limits.context_tokens)).result()
    device.finish()


def largest_step(limits: RowLimits, *, context: int | None = None) -> StepInputs:
    """As many rows as there are slots, as many tokens as a step may have, all with one logit row.

    The first row has all tokens that the others leave. `context`: how long rows are at least.
    """
    rows = min(limits.slots, limits.step_tokens)
    first = min(limits.step_tokens - (rows - 1), limits.context_tokens)
    return step_of([first, *[1] * (rows - 1)], limits, context=context)


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
    compute: Callable[[StepInputs], object], limits: RowLimits, limit_s: float | None
) -> int:
    """How many tokens a step may have in which somebody decodes, by running some.

    However slow they are, a full batch of decodes leaves room for as many tokens of prompts.
    """
    if limit_s is None or limits.slots == 1:
        return limits.step_tokens

    def seconds_of(tokens: int) -> float:
        step = largest_step(replace(limits, step_tokens=tokens))
        # The least of them: whatever else the machine does only adds.
        return min(_seconds(lambda: compute(step)) for _ in range(_TIMES))

    least = min(2 * limits.slots, limits.step_tokens)
    return tokens_within(limit_s, seconds_of, least=least, most=limits.step_tokens)


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def step_of(
    counts: Sequence[int],
    limits: RowLimits,
    *,
    logprobs: int = -1,
    edits: LogitEdits | None = None,
    context: int | None = None,
) -> StepInputs:
    """Rows that all read block 0 and write nowhere; half of them sample with noise.

    `context`: how long each row is, if longer than its own tokens.
    """
    rows, per_row = len(counts), np.array(counts, np.int64)
    starts = np.concatenate([[0], np.cumsum(per_row)])
    width = -(-(context or max(counts)) // limits.block_size)
    contexts = np.maximum(per_row, context or 0)
    return StepInputs(
        slots=np.full(rows, _NOBODY, np.int64),
        serials=np.zeros(rows, np.uint64),
        counts=per_row,
        query_starts=starts.astype(np.int32),
        context_lengths=contexts.astype(np.int32),
        block_tables=np.zeros((rows, width), np.int32),
        token_ids=np.zeros(starts[-1], np.int64),
        positions=np.concatenate([np.arange(count) for count in counts]),
        kv_slots=np.full(starts[-1], -1, np.int64),
        sampled_rows=np.arange(rows),
        sampled_tokens=starts[1:] - 1,
        sampling=SamplingColumns(
            temperature=(np.arange(rows) % 2).astype(np.float32),
            top_k=np.full(rows, min(8, limits.vocab_size), np.int64),
            top_p=_all(rows, 0.9),
            min_p=_all(rows, 0.0),
            seed=np.zeros(rows, np.int64),
            choice=np.zeros(rows, np.int64),
            position=np.zeros(rows, np.int64),
            logprobs=np.full(rows, logprobs, np.int64),
            edits=edits,
        ),
        ends=_ends(per_row),
    )


def _every_edit(rows: int, vocab_size: int) -> LogitEdits:
    """One of each kind in every row: each kind has a kernel of its own."""
    each, first = np.arange(rows), np.zeros(rows, np.int64)
    return LogitEdits(
        bias_rows=each,
        bias_ids=first,
        biases=_all(rows, 0.5),
        seen_rows=each,
        seen_ids=first,
        seen_counts=_all(rows, 1.0),
        repetition=_all(rows, 1.1),
        presence=_all(rows, 0.1),
        frequency=_all(rows, 0.1),
        forbidden_rows=each,
        forbidden_ids=np.full(rows, vocab_size - 1),
        allowed_rows=each,
        allowed_ids=first,
    )


def _all(rows: int, value: float) -> FloatArray:
    return np.full(rows, value, np.float32)


def _ends(counts: IntArray) -> RowEnds:
    rows = len(counts)
    return RowEnds(
        joined=np.zeros(rows, np.int64),
        known=counts,
        limit=counts,
        masked_until=np.zeros(rows, np.int64),
        stops=np.zeros((rows, 0), np.int64),
    )
