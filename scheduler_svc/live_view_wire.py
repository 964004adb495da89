"""What has changed between two views, as whoever watches is told it. Nothing else here.

A snapshot is what has changed since nothing, so there is one message and one way to write it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import attrgetter, eq
from typing import Final

from kaiten.v1.common_pb2 import LayerGroup
from kaiten.v1.watch_pb2 import (
    SEQUENCE_STATE_FORKING,
    SEQUENCE_STATE_PREEMPTED,
    SEQUENCE_STATE_RETIRING,
    SEQUENCE_STATE_RUNNING,
    SEQUENCE_STATE_WAITING,
    InFlightPlan,
    SequenceIdentity,
    SequencePassedOver,
    SequencePlace,
    SequenceTables,
    WatchedQueue,
    WatchedSequence,
    WatchedStep,
    WatchedSteps,
    WatchedWorker,
    WatchResponse,
)
from kaiten.v1.watch_pb2 import PassedOver as PassedOverMessage
from scheduler_svc.command_wire import configured_to_proto
from scheduler_svc.core.outcome import Why
from scheduler_svc.core.requests import Residency
from scheduler_svc.core.types import BlockId, Request, SlotIndex
from scheduler_svc.live_steps import StepNote
from scheduler_svc.live_view import Passed, SeenState, SequenceView, Table, View, WorkerView

# protobuf takes the names of an enum's values for them.
WHY_TO_PROTO: Final = {why: f"WHY_PASSED_OVER_{why.name}" for why in Why}
STATE_TO_PROTO: Final = {
    SeenState.WAITING: SEQUENCE_STATE_WAITING,
    SeenState.RUNNING: SEQUENCE_STATE_RUNNING,
    SeenState.PREEMPTED: SEQUENCE_STATE_PREEMPTED,
    SeenState.RETIRING: SEQUENCE_STATE_RETIRING,
    SeenState.FORKING: SEQUENCE_STATE_FORKING,
}


# 0 and 1 as they are written.
DIGITS: Final = bytes([ord("0"), ord("1"), *range(2, 256)])


def changes_to_proto(
    before: View | None, now: View, steps: Sequence[StepNote] = (), num_skipped: int = 0
) -> WatchResponse:
    """What is otherwise now; None: everything. `steps` are those in between, oldest first, behind
    so many that are not there any more.
    """
    moment = now.moment
    response = WatchResponse(
        is_snapshot=before is None,
        epoch=moment.epoch,
        seq=moment.seq,
        committed_seq=moment.committed_seq,
        unix_ns=moment.unix_ns,
    )
    if before is None or before.configured != now.configured:
        response.configured.CopyFrom(configured_to_proto(now.configured))
    if before is None or (before.queue, before.waiting) != (now.queue, now.waiting):
        response.queue.CopyFrom(WatchedQueue(sequence_ids=now.queue, length=now.waiting))
    workers = {} if before is None else before.workers
    sequences = {} if before is None else before.sequences
    response.workers.extend(
        _worker_to_proto(worker_id, worker)
        for worker_id, worker in now.workers.items()
        if workers.get(worker_id) != worker
    )
    response.worker_ids_gone.extend(one for one in workers if one not in now.workers)
    for sequence_id, view in now.sequences.items():
        if (known := sequences.get(sequence_id)) != view:
            _tell(response.sequences.add(sequence_id=sequence_id), known, view)
    response.sequence_ids_gone.extend(one for one in sequences if one not in now.sequences)
    response.steps.extend(steps_to_proto(steps, num_skipped))
    passed = {one.sequence for note in steps for one in note.members.values()}
    for sequence in sorted(passed, key=attrgetter("sequence_id")):
        sequence_id = sequence.sequence_id
        if sequence_id not in now.sequences and sequence_id not in sequences:
            identity = _identity_to_proto(sequence.live.request, sequence.choice)
            response.passed.append(WatchedSequence(sequence_id=sequence_id, identity=identity))
    return response


def steps_to_proto(notes: Sequence[StepNote], num_skipped: int) -> Iterator[WatchedSteps]:
    """By worker."""
    by_worker: dict[str, list[WatchedStep]] = {}
    members: dict[str, Mapping[SlotIndex, Residency]] = {}
    for note in notes:
        told = _step_to_proto(note, members.get(note.worker_id, {}))
        by_worker.setdefault(note.worker_id, []).append(told)
        members[note.worker_id] = note.members
    for worker_id, steps in by_worker.items():
        yield WatchedSteps(worker_id=worker_id, num_skipped=num_skipped, steps=steps)


def _step_to_proto(note: StepNote, before: Mapping[SlotIndex, Residency]) -> WatchedStep:
    result, plan, members = note.result, note.plan, note.members
    told = WatchedStep(
        plan_id=result.plan_id,
        step=result.step,
        answered_ns=note.answered_ns,
        step_us=result.step_us,
        chunk_slots=note.chunks.keys(),
        chunk_tokens=note.chunks.values(),
        num_tokens=len(result.tokens),
        finished_slots=[*result.finished, *result.errors],
        preempted_sequence_ids=plan.preempted,
        blocks_free=plan.blocks_free,
        waiting=plan.waiting,
    )
    # Steps of one plan have the very same batch.
    if members is not before:
        joins = [one for slot, one in members.items() if before.get(slot) is not one]
        told.leave_slots.extend(s for s, one in before.items() if members.get(s) is not one)
        told.join_slots.extend(one.slot for one in joins)
        told.join_sequence_ids.extend(one.sequence.sequence_id for one in joins)
    if len(result.slots) < len(members):
        told.tokenless_slots.extend(members.keys() - set(result.slots))
    return told


def _worker_to_proto(worker_id: str, worker: WorkerView) -> WatchedWorker:
    spec = worker.spec
    return WatchedWorker(
        worker_id=worker_id,
        address=worker.address,
        slots_max=spec.slots_max,
        block_size=spec.block_size,
        block_count=spec.block_count,
        blocks_free=worker.blocks_free,
        layer_groups=[LayerGroup(window_tokens=window or 0) for window in spec.windows],
        is_draining=worker.is_draining,
        is_late=worker.is_late,
        plans=[
            InFlightPlan(plan_id=plan_id, lease_steps=lease_steps, steps_answered=steps_answered)
            for plan_id, lease_steps, steps_answered in worker.plans
        ],
        passed_over=_passed_to_proto(worker.passed_over),
        cached_blocks=_bits(worker.cached),
        step_tokens_max=spec.step_tokens_max,
        mixed_tokens_max=spec.mixed_budget,
    )


def _bits(flags: bytes) -> bytes:
    """A bit per byte, the lowest first. By way of a number: it is read and written in C."""
    if not flags:
        return b""
    digits = flags[::-1].translate(DIGITS)
    return int(digits, 2).to_bytes(-(-len(flags) // 8), "little")


def _tell(message: WatchedSequence, before: SequenceView | None, now: SequenceView) -> None:
    """Only the parts that have changed. Written in place, which takes half as long as copies do."""
    if before is None:
        message.identity.CopyFrom(_identity_to_proto(now.request, now.choice))
    if before is None or before.counts != now.counts:
        counts = message.counts
        # Who has no tokens has counts, too.
        counts.SetInParent()
        counts.num_tokens, counts.num_scheduled_tokens, counts.num_computed_tokens = now.counts
    if before is None or before.place != now.place:
        state, worker_id, slot, num_preemptions = now.place
        message.place.CopyFrom(
            SequencePlace(
                state=STATE_TO_PROTO[state],
                worker_id=worker_id,
                slot=slot,
                num_preemptions=num_preemptions,
            )
        )
    tables = () if before is None else before.tables
    if before is None or tables != now.tables:
        _tell_tables(message.tables, tables, now.tables)
    if before is None or before.passed_over != now.passed_over:
        by = _passed_to_proto(now.passed_over)
        message.passed_over.CopyFrom(SequencePassedOver(by=by))


def _identity_to_proto(request: Request, choice: int) -> SequenceIdentity:
    num_prompt_tokens = len(request.prompt)
    return SequenceIdentity(
        id=request.id,
        choice=choice,
        priority=request.priority,
        arrived_ns=request.arrived_ns,
        num_prompt_tokens=num_prompt_tokens,
        tokens_max=num_prompt_tokens + request.max_tokens,
    )


def _tell_tables(message: SequenceTables, before: Sequence[Table], now: Sequence[Table]) -> None:
    # Who has given up all blocks is told to have none.
    message.SetInParent()
    for group, (num_skipped_blocks, blocks) in enumerate(now):
        known = before[group][1] if group < len(before) else ()
        same = _common(known[num_skipped_blocks:], blocks[num_skipped_blocks:])
        num_kept_blocks = num_skipped_blocks + same
        message.groups.add(
            num_skipped_blocks=num_skipped_blocks,
            num_kept_blocks=num_kept_blocks,
            block_ids=blocks[num_kept_blocks:],
        )


def _common(before: tuple[BlockId, ...], now: tuple[BlockId, ...]) -> int:
    """How many are the same from the front; as a rule all of those that were there."""
    if before == now[: len(before)]:
        return len(before)
    return sum(takewhile(bool, map(eq, before, now)))


def _passed_to_proto(passed_over: Iterable[Passed]) -> Iterator[PassedOverMessage]:
    for worker_id, stage, why in passed_over:
        yield PassedOverMessage(worker_id=worker_id, stage=stage, why=WHY_TO_PROTO[why])
