"""A step that failed as a whole, run row by row, so that only the rows to blame fail."""

from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np
import structlog
import torch

from gpu_worker.batch.plans import StepOutcome
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import DeviceLost, StepInputs, StepSamples

log = structlog.get_logger()


def noted(error: Exception, inputs: StepInputs) -> Exception:
    """The error, logged. Without its frames: what they hold may be the memory that was missing."""
    reason = str(error).strip().partition("\n")[0]
    log.error("step.failed", rows=inputs.row_count, reason=reason, exc_info=error)
    return error.with_traceback(None)


def step_alone(
    rows: Rows,
    together: StepInputs,
    error: Exception,
    attempt: Callable[[StepInputs], StepSamples | Exception],
) -> StepOutcome:
    """What became of its rows, none of which has gone on. `attempt` runs a step to its end.

    When every one of several rows fails it is the device, not the rows: that ends the worker. So
    does memory that is full for one row alone, which would fail whoever comes next too: elsewhere,
    or here after a new start, the same row finds what the largest step takes.
    """
    outcomes = []
    certain = together.counts if together.drafts is None else together.counts - together.drafts
    for slot, count in zip(together.slots.tolist(), certain.tolist(), strict=True):
        if rows.is_idle(slot):
            # It had ended in a step that was not read when this one was asked for.
            continue
        counts = np.zeros(rows.limits.slots, np.int64)
        counts[slot] = count
        inputs = rows.step_inputs(counts)
        samples = attempt(inputs)
        if isinstance(samples, StepSamples):
            outcomes.append(rows.advance(inputs, samples))
        elif isinstance(samples, torch.OutOfMemoryError):
            raise DeviceLost(
                "the GPU's memory is full in a step of one row; this process ends, so that its "
                "requests are computed elsewhere; find who else uses the GPU, or lower "
                "--gpu-memory-share"
            ) from samples
        else:
            rows.fail(slot)
            text = f"the step failed for this row: {type(samples).__name__}"
            outcomes.append(StepOutcome(slots=(), token_ids=(), errors=((slot, text),)))
    if len(outcomes) > 1 and all(outcome.errors for outcome in outcomes):
        raise error
    return _merged(outcomes)


def _merged(outcomes: Iterable[StepOutcome]) -> StepOutcome:
    parts = tuple(outcomes)
    return StepOutcome(
        slots=tuple(chain.from_iterable(part.slots for part in parts)),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        finished=tuple(chain.from_iterable(part.finished for part in parts)),
        errors=tuple(chain.from_iterable(part.errors for part in parts)),
        unsatisfiable=tuple(chain.from_iterable(part.unsatisfiable for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
    )
