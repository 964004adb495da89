"""What has changed between two views, as whoever watches is told it. Nothing else here.

A snapshot is what has changed since nothing, so there is one message and one way to write it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from operator import attrgetter, or_
from types import MappingProxyType
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
    WatchedQueue,
    WatchedSequence,
    WatchedStep,
    WatchedSteps,
    WatchedWorker,
    WatchResponse,
)
from kaiten.v1.watch_pb2 import PassedOver as PassedOverMessage
from scheduler_svc.command_wire import configured_to_proto
from scheduler_svc.core.requests import Residency
from scheduler_svc.core.types import Request, SlotIndex
from scheduler_svc.live_rows_wire import rows_to_proto, tell_one_by_one
from scheduler_svc.live_steps import StepNote
from scheduler_svc.live_view import (
    NO_ROWS,
    NOTHING,
    Passed,
    SeenState,
    View,
    WaitingView,
    WorkerView,
)
from scheduler_svc.wire import WHY_TO_PROTO

STATE_TO_PROTO: Final = {
    SeenState.WAITING: SEQUENCE_STATE_WAITING,
    SeenState.PREEMPTED: SEQUENCE_STATE_PREEMPTED,
    SeenState.FORKING: SEQUENCE_STATE_FORKING,
}


BY_SLOT: Final = attrgetter("slot")


def changes_to_proto(
    before: View | None,
    now: View,
    steps: Sequence[StepNote] = (),
    num_skipped: int = 0,
    *,
    takes_rows: bool = True,
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
    if before is None or (before.queue, before.queue_length) != (now.queue, now.queue_length):
        response.queue.CopyFrom(WatchedQueue(sequence_ids=now.queue, length=now.queue_length))
    before = before or NOTHING
    for worker_id, worker in now.workers.items():
        if before.workers.get(worker_id) != worker:
            response.workers.append(_worker_to_proto(worker_id, worker))
        _tell_rows(response, before, now, worker_id)
    response.worker_ids_gone.extend(one for one in before.workers if one not in now.workers)
    for sequence_id, view in now.waiting.items():
        known = before.waiting.get(sequence_id)
        if known is not view and known != view:
            is_new = sequence_id not in before.sequence_ids
            _tell(response.sequences.add(sequence_id=sequence_id), known, view, is_new=is_new)
    response.sequence_ids_gone.extend(sorted(before.sequence_ids - now.sequence_ids))
    batches = _running(before) if takes_rows and steps else {}
    response.steps.extend(steps_to_proto(steps, num_skipped, batches))
    response.passed.extend(_passed(before, now, steps))
    if not takes_rows:
        tell_one_by_one(response, now.resident_ids)
    return response


def _tell_rows(response: WatchResponse, before: View, now: View, worker_id: str) -> None:
    known, rows = before.rows.get(worker_id, NO_ROWS), now.rows[worker_id]
    told, ids = response.rows.add(worker_id=worker_id), now.resident_ids[worker_id]
    groups = len(now.workers[worker_id].spec.windows)
    if not rows_to_proto(told, known, rows, ids, groups):
        del response.rows[-1]
    if rows.seen.keys() == known.seen.keys() and rows.num_retiring == known.num_retiring:
        return
    retired = set(islice(known.seen, known.num_retiring))
    for row, (residency, seen) in enumerate(rows.seen.items()):
        is_retiring = row < rows.num_retiring
        if residency in known.seen and is_retiring == (residency in retired):
            continue
        sequence_id, sequence = ids[row], residency.sequence
        one = response.sequences.add(sequence_id=sequence_id)
        one.place.state = SEQUENCE_STATE_RETIRING if is_retiring else SEQUENCE_STATE_RUNNING
        one.place.worker_id, one.place.num_preemptions = worker_id, seen.num_preemptions
        if not is_retiring:
            one.place.slot = residency.slot
        if sequence_id not in before.sequence_ids:
            one.identity.CopyFrom(_identity_to_proto(sequence.live.request, sequence.choice))
        if (waited := before.waiting.get(sequence_id)) is not None and waited.passed_over:
            one.passed_over.SetInParent()


def _passed(before: View, now: View, steps: Sequence[StepNote]) -> Iterator[WatchedSequence]:
    """Those in the steps who came and went."""
    known = set[Residency]().union(*[rows.seen for rows in before.rows.values()])
    known.update(*[rows.seen for rows in now.rows.values()])
    batches = {id(note.members): note.members for note in steps}.values()
    others = set[Residency]().union(*[set(batch.values()) - known for batch in batches])
    passed = {one.sequence.sequence_id: one.sequence for one in others}
    for sequence_id in sorted(passed.keys() - now.sequence_ids - before.sequence_ids):
        sequence = passed[sequence_id]
        identity = _identity_to_proto(sequence.live.request, sequence.choice)
        yield WatchedSequence(sequence_id=sequence_id, identity=identity)


Batches = Mapping[str, Mapping[SlotIndex, Residency]]


def _running(view: View) -> Batches:
    """By worker, those of whom somebody who was told of this view knows the slot."""
    return {
        worker_id: {one.slot: one for one in islice(rows.seen, rows.num_retiring, None)}
        for worker_id, rows in view.rows.items()
    }


def steps_to_proto(
    notes: Sequence[StepNote], num_skipped: int, known: Batches = MappingProxyType({})
) -> Iterator[WatchedSteps]:
    """By worker, told against the batches that are known. Of whom those are that are not there any
    more nobody knows: they are told once."""
    by_worker: dict[str, list[WatchedStep]] = {}
    members = dict(known)
    for note in notes:
        told = _step_to_proto(note, members.get(note.worker_id, {}))
        by_worker.setdefault(note.worker_id, []).append(told)
        members[note.worker_id] = note.members
    for worker_id, steps in by_worker.items():
        is_diff = bool(known.get(worker_id))
        yield WatchedSteps(
            worker_id=worker_id, num_skipped=num_skipped, steps=steps, is_diff=is_diff
        )
        num_skipped = 0


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
        preempted_sequence_ids=[sequence_id for sequence_id, _ in plan.preempted],
        preempted_whys=[WHY_TO_PROTO[why] for _, why in plan.preempted],
        blocks_free=plan.blocks_free,
        waiting=plan.waiting,
        lease_steps=plan.lease_steps,
        budget_tokens=plan.budget,
        num_cached_tokens=plan.num_cached_tokens,
        blocks_allocated=plan.blocks.allocated,
        blocks_evicted=plan.blocks.evicted,
        blocks_shared=plan.blocks.shared,
        blocks_freed=plan.blocks.freed,
        blocks_swapped_out=plan.blocks.swapped_out,
        blocks_swapped_in=plan.blocks.swapped_in,
        expected_us=note.expected_us,
        is_graph=result.is_graph,
    )
    if not before:
        told.join_slots.extend(members)
        told.join_sequence_ids.extend([one.sequence.sequence_id for one in members.values()])
    # Steps of one plan have the very same batch.
    elif members is not before:
        here, there = set(members.values()), set(before.values())
        joins = sorted(here - there, key=BY_SLOT)
        told.leave_slots.extend(sorted(map(BY_SLOT, there - here)))
        told.join_slots.extend(map(BY_SLOT, joins))
        told.join_sequence_ids.extend([one.sequence.sequence_id for one in joins])
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
        host_block_count=spec.host_block_count,
        host_blocks_used=worker.host_used,
    )


def _bits(flags: bytes) -> bytes:
    """A bit per byte, the lowest first. By way of numbers: they are read and written in C."""
    eighths = [int.from_bytes(flags[bit::8], "little") << bit for bit in range(8)]
    return reduce(or_, eighths).to_bytes(-(-len(flags) // 8), "little")


def _tell(
    message: WatchedSequence, before: WaitingView | None, now: WaitingView, *, is_new: bool
) -> None:
    """Only the parts that have changed. Who ran before has given up all blocks."""
    if is_new:
        message.identity.CopyFrom(_identity_to_proto(now.request, now.choice))
    if before is None or before[2:4] != now[2:4]:
        message.place.state = STATE_TO_PROTO[now.state]
        message.place.num_preemptions = now.num_preemptions
    if before is None or before.num_tokens != now.num_tokens:
        # Who has no tokens has counts, too.
        message.counts.SetInParent()
        message.counts.num_tokens = now.num_tokens
    if before is None:
        message.tables.SetInParent()
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


def _passed_to_proto(passed_over: Iterable[Passed]) -> Iterator[PassedOverMessage]:
    for worker_id, stage, why in passed_over:
        yield PassedOverMessage(worker_id=worker_id, stage=stage, why=WHY_TO_PROTO[why])
