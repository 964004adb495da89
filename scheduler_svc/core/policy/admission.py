"""Admission: may the sequence whose turn it is start on this worker now? None, or why not."""

from collections.abc import Callable
from typing import NamedTuple

from scheduler_svc.core.outcome import Why


class AdmissionView(NamedTuple):
    """What an admission rule may look at: a candidate and the worker it would join."""

    # Sequences that ran before this plan, and those that this plan has admitted.
    running: int
    joining: int
    block_count: int
    blocks_free: int
    # Blocks to take for the tokens known now; those of cached prefixes in use are spared.
    blocks_now: int
    # Blocks to take for the longest the sequence can become, and what those in the batch may still
    # come to need, each at its longest.
    blocks_worst: int
    worst_case_need: int
    # Blocks that a sequence takes at a block border.
    group_count: int
    # It was preempted before, and too often to be preempted again.
    was_preempted: bool
    is_reserved: bool
    # All blocks of it and of those like it in the batch, each at its longest; 0: it is not.
    blocks_reserved: int
    # Of the candidate's request.
    priority: int
    # Until the batch is certain to have ended; a look at every row, for rules that ask.
    steps_to_batch_end: Callable[[], int]


def whenever_it_fits(view: AdmissionView) -> Why | None:
    """Continuous batching: a slot is taken as soon as it is free.

    One block of each layer group stays free per sequence in the batch, so that the newcomer does
    not preempt at the next block border; two for one that was preempted, or it would soon be again.
    Those that may not be preempted again are never more than the pool holds at their longest: the
    others, who are preempted for them, need not wait.
    """
    if view.is_reserved and view.blocks_reserved > view.block_count:
        return Why.RESERVED
    is_wary = view.was_preempted and not view.is_reserved
    spare = (view.running + view.joining) * view.group_count * (2 if is_wary else 1)
    return None if view.blocks_now + spare <= view.blocks_free else Why.BLOCKS


def guaranteed_no_evict(view: AdmissionView) -> Why | None:
    """Everybody's longest is reserved: nobody is ever preempted (TensorRT-LLM's
    GUARANTEED_NO_EVICT).
    """
    fits = view.blocks_worst + view.worst_case_need <= view.blocks_free
    return None if fits else Why.WORST_CASE


def safety_margin(view: AdmissionView, *, permille: int) -> Why | None:
    """As `whenever_it_fits`, and so much of the pool stays free for the batch to grow into
    (transformers' FIFO scheduler). An empty batch needs no margin.
    """
    if (why := whenever_it_fits(view)) is not None or not view.running + view.joining:
        return why
    margin = -(-view.block_count * permille // 1000)
    return None if view.blocks_now + margin <= view.blocks_free else Why.MARGIN


def wait_for_batch_end(view: AdmissionView, *, steps: int, priority: int) -> Why | None:
    """As `whenever_it_fits`, but a batch that is sure to end within so many steps is waited for, so
    that the next one starts together. Who is more urgent than `priority` joins at once.
    """
    if view.running and view.priority <= priority and view.steps_to_batch_end() <= steps:
        return Why.BATCH
    return whenever_it_fits(view)


def when_all_are_done(view: AdmissionView) -> Why | None:
    """Static batching, the old way.

    Fill an empty batch, reserve the worst case, run until all are done.
    """
    return Why.BATCH if view.running else guaranteed_no_evict(view)
