"""What came of every command, as the records of an archive say it: for timelines, which need no
core then.

A core takes as long to decide something again as it took at first; to read what it decided takes an
eighth of that. So a leader is taken at its word here, where `replay` finds out whether the same
would be decided again. Of commands and outcomes there is only what `Timelines` looks at. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kaiten.v1.archive_pb2 import ArchivedRequest
from kaiten.v1.common_pb2 import WhyPassedOver
from kaiten.v1.ledger_pb2 import (
    CoreInput,
    JournalRecord,
    PlanInput,
    SequenceFinished,
    SubmitInput,
)
from scheduler_svc import wire
from scheduler_svc.command_wire import command_from_proto
from scheduler_svc.core.commands import MakePlan
from scheduler_svc.core.outcome import (
    Finished,
    Join,
    Outcome,
    PassedOver,
    Plan,
    Why,
)
from scheduler_svc.core.types import Reason, Request, SequenceId
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_track import QUEUE_STAGES, Step


class _Taken(NamedTuple):
    """A request of an archive. Not its message: that would keep the whole chunk."""

    id: str
    tenant: str
    n: int
    accepted_ns: int
    sequence_id: SequenceId


class Recorded:
    """Tells timelines of the records it is fed, in order from the first of a leadership."""

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        # By the sequence ids of every choice.
        self._taken: dict[SequenceId, _Taken] = {}
        self._throttled: frozenset[str] = frozenset()
        self._epoch = 0

    def take_in(self, request: ArchivedRequest) -> None:
        """A request of an archive."""
        submit, first = request.submit, request.sequence_id
        accepted_ns = wire.entry_time_ns(request.entry_id)
        taken = _Taken(submit.id, submit.tenant, submit.n, accepted_ns, first)
        self._taken.update(dict.fromkeys(range(first, first + submit.n), taken))

    def feed(self, record: JournalRecord) -> None:
        """ValueError for what only a later version knows."""
        inputs = record.inputs
        if record.epoch != self._epoch:
            self._epoch = record.epoch
            self._throttled = frozenset()
            if inputs:
                self._timelines.lead_anew(inputs[0].now_ns)
        # What a record brings came of its last input: with the first that brings anything it is
        # written.
        last = len(inputs) - 1
        for index, item in enumerate(inputs):
            self._take(item, record.sequence_ids if index == last else ())
        for ending in record.finished:
            self._timelines.finished(_finished(ending), inputs[last].now_ns)
            if ending.HasField("done"):
                self._end(ending.sequence_id)

    def _take(self, item: CoreInput, ids: Sequence[SequenceId]) -> None:
        """`ids`: whose each token is that came of it."""
        name, now_ns, timelines = item.WhichOneof("input"), item.now_ns, self._timelines
        if name == "result":
            said, timings = item.result.step, item.result.step.timings
            step_us = timings.forward_us + timings.sample_us
            step = Step(now_ns, said.plan_id, len(ids), step_us=step_us)
            timelines.stepped(item.result.worker_id, said.step, step, ids)
        elif name == "plan":
            timelines.take(MakePlan(worker_id=item.plan.worker_id), _planned(item.plan), now_ns)
        else:
            timelines.take(command_from_proto(item, self._request), Outcome(), now_ns)
        if item.HasField("throttled"):
            change = item.throttled
            self._throttled = self._throttled.union(change.begun).difference(change.over)
            timelines.note_throttled(self._throttled, now_ns)

    def _request(self, submit: SubmitInput) -> Request:
        """Without what was said: a timeline does not look at it."""
        taken = self._taken[submit.sequence_id]
        return Request(
            id=taken.id,
            sequence_id=submit.sequence_id,
            n=taken.n,
            prompt=(0,),
            max_tokens=1,
            arrived_ns=submit.arrived_ns or taken.accepted_ns,
            tenant=taken.tenant,
            outputs=((),) * taken.n if submit.committed_tokens else (),
        )

    def _end(self, last: SequenceId) -> None:
        """The request of this choice is over."""
        taken = self._taken[last]
        for sequence_id in range(taken.sequence_id, taken.sequence_id + taken.n):
            del self._taken[sequence_id]
        self._timelines.request_over(taken.id)


def _finished(ending: SequenceFinished) -> Finished:
    reason = wire.REASON_FROM_PROTO.get(ending.reason, Reason.ERROR)
    return Finished(
        sequence_id=ending.sequence_id,
        reason=Reason.UNSERVED if ending.is_retryable else reason,
        num_output_tokens=ending.output_tokens,
        error=ending.error,
    )


def _planned(message: PlanInput) -> Outcome:
    plan = Plan(
        worker_id=message.worker_id,
        plan_id=message.plan_id,
        lease_steps=message.lease_steps,
        leaves=tuple(message.leave_slots),
        joins=tuple(_joins(message)),
        appends=(),
        replacements=(),
        copies=(),
        chunks=tuple(zip(message.chunk_slots, message.chunk_slot_tokens, strict=True)),
        checksum=0,
        preempted=tuple(message.preempted),
        decode_rows=message.decode_rows,
        blocks_free=message.blocks_free,
        waiting=message.waiting,
    )
    return Outcome(plan=plan, passed_over=tuple(_passed_over(message)))


def _joins(message: PlanInput) -> Iterator[Join]:
    """Of their blocks, how many they are."""
    tables = [*zip(message.join_skipped_blocks, message.join_blocks, strict=True)]
    num_groups = len(tables) // max(1, len(message.admitted))
    joins = zip(message.join_slots, message.admitted, message.join_computed_tokens, strict=True)
    for index, (slot, sequence_id, num_computed_tokens) in enumerate(joins):
        own = tables[index * num_groups : (index + 1) * num_groups]
        yield Join(
            slot=slot,
            sequence_id=sequence_id,
            tokens=(),
            num_prompt_tokens=0,
            num_computed_tokens=num_computed_tokens,
            block_tables=tuple((num_skipped, (0,) * count) for num_skipped, count in own),
            prompt_logprobs_from=0,
        )


def _passed_over(message: PlanInput) -> Iterator[PassedOver]:
    for sequence_id, number in zip(message.passed_over, message.passed_over_whys, strict=True):
        yield PassedOver(QUEUE_STAGES[0], _why(number), sequence_id or None)
    if message.preempted_whys:
        gave_way = zip(message.preempted, message.preempted_whys, strict=True)
        yield from (PassedOver("give_way", _why(why), one) for one, why in gave_way if why)


def _why(number: WhyPassedOver) -> Why:
    if number not in wire.WHY_FROM_PROTO:
        raise ValueError(f"the journal has a reason this version does not know: {number}")
    return wire.WHY_FROM_PROTO[number]
