"""What came of every command, as the records of an archive say it: for timelines, which need no
core then.

A core takes as long to decide something again as it took at first; to read what it decided takes an
eighth of that. So a leader is taken at its word here, where `replay` finds out whether the same
would be decided again. Of commands and outcomes there is only what `Timelines` looks at. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, cast

from kaiten.v1.archive_pb2 import ArchivedRequest, Snapshot
from kaiten.v1.common_pb2 import WhyPassedOver
from kaiten.v1.ledger_pb2 import (
    CoreInput,
    JournalRecord,
    PlanInput,
    SubmitInput,
)
from scheduler_svc import wire
from scheduler_svc.command_wire import command_from_proto
from scheduler_svc.core.commands import MakePlan
from scheduler_svc.core.outcome import (
    Join,
    Outcome,
    PassedOver,
    Plan,
    Why,
)
from scheduler_svc.core.types import BlockId, Request, SequenceId
from scheduler_svc.snapshot_wire import snapshot_from_proto
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_track import QUEUE_STAGES, Step

# Of a plan's blocks a record says how many they are, not which.
_IN_THE_POOL: Final[BlockId] = 0
_SWAPPED_IN: Final[BlockId] = 1
_IN_HOST_MEMORY: Final[BlockId] = 2


class _Taken(NamedTuple):
    """A request of an archive. Not its message: that would keep the whole chunk."""

    id: str
    tenant: str
    n: int
    accepted_ns: int
    sequence_id: SequenceId


class _LaterWhy(NamedTuple):
    """A reason that only a later version knows."""

    value: str


class Recorded:
    """Tells timelines of the records it is fed, in order from the first of a leadership, or behind
    a snapshot.
    """

    def __init__(self, timelines: Timelines) -> None:
        self._timelines = timelines
        # By the sequence ids of every choice.
        self._taken: dict[SequenceId, _Taken] = {}
        self._throttled: frozenset[str] = frozenset()
        self._epoch = 0

    def begin(self, snapshot: Snapshot, epoch: int) -> None:
        """What comes next stands behind this, in this leadership."""
        self._epoch, self._taken = epoch, {}
        known = snapshot_from_proto(snapshot)
        self._throttled = frozenset(known.throttled_ns)
        self._timelines.restore(known)
        for request in snapshot.requests:
            first, choices = request.sequence_id, [one.choice for one in request.choices]
            # There may be more, which are over.
            n = max(choices) + 1
            taken = _Taken(request.id, request.tenant, n, request.arrived_ns, first)
            self._taken.update({first + choice: taken for choice in choices})
        for archived in snapshot.taken:
            self.take_in(archived)

    def take_in(self, request: ArchivedRequest) -> None:
        """A request of an archive."""
        submit, first = request.submit, request.sequence_id
        accepted_ns = wire.entry_time_ns(request.entry_id)
        taken = _Taken(submit.id, submit.tenant, submit.n, accepted_ns, first)
        self._taken.update(dict.fromkeys(range(first, first + submit.n), taken))

    def feed(self, record: JournalRecord) -> str:
        """As `replay.Outcomes`."""
        inputs, missed = record.inputs, ""
        if record.epoch != self._epoch:
            self._epoch = record.epoch
            self._throttled = frozenset()
            if inputs:
                self._timelines.lead_anew(inputs[0].now_ns)
        # What a record brings came of its last input: with the first that brings anything it is
        # written.
        last = len(inputs) - 1
        for index, item in enumerate(inputs):
            missed = self._take(item, record.sequence_ids if index == last else ()) or missed
        for ending in record.finished:
            self._timelines.finished(wire.finished_from_proto(ending), inputs[last].now_ns)
            if ending.HasField("done"):
                missed = self._end(ending.sequence_id) or missed
        return missed

    def _take(self, item: CoreInput, ids: Sequence[SequenceId]) -> str:
        """`ids`: whose each token is that came of it."""
        name, now_ns, timelines = item.WhichOneof("input"), item.now_ns, self._timelines
        if name == "result":
            said, timings = item.result.step, item.result.step.timings
            step_us = timings.forward_us + timings.sample_us
            step = Step(now_ns, said.plan_id, len({*ids}), step_us=step_us)
            timelines.stepped(item.result.worker_id, said.step, step, ids)
        elif name == "plan":
            timelines.take(MakePlan(worker_id=item.plan.worker_id), planned(item.plan), now_ns)
        elif name is None:
            return "it has an input that only a later version knows"
        elif name == "submit" and item.submit.sequence_id not in self._taken:
            return _missing(item.submit.sequence_id)
        else:
            timelines.take(command_from_proto(item, self._request), Outcome(), now_ns)
        if item.HasField("throttled"):
            change = item.throttled
            self._throttled = self._throttled.union(change.begun).difference(change.over)
            timelines.note_throttled(self._throttled, now_ns)
        return ""

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

    def _end(self, last: SequenceId) -> str:
        """The request of this choice is over."""
        if (taken := self._taken.get(last)) is None:
            return _missing(last)
        for sequence_id in range(taken.sequence_id, taken.sequence_id + taken.n):
            self._taken.pop(sequence_id, None)
        self._timelines.request_over(taken.id)
        return ""


def _missing(sequence_id: SequenceId) -> str:
    return f"the request of sequence {sequence_id} stands nowhere before it"


def planned(message: PlanInput) -> Outcome:
    """What came of a MakePlan, as far as its record says."""
    plan = Plan(
        worker_id=message.worker_id,
        plan_id=message.plan_id,
        lease_steps=message.lease_steps,
        leaves=tuple(message.leave_slots),
        joins=tuple(_joins(message)),
        appends=(),
        replacements=(),
        swaps=((_IN_HOST_MEMORY, _SWAPPED_IN),) if message.join_swapped_in_blocks else (),
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
    """Of their blocks, how many they are, and how many are brought back."""
    tables = [*zip(message.join_skipped_blocks, message.join_blocks, strict=True)]
    num_groups = len(tables) // max(1, len(message.admitted))
    joins = zip(message.join_slots, message.admitted, message.join_computed_tokens, strict=True)
    swapped_in = iter(message.join_swapped_in_blocks)
    for index, (slot, sequence_id, num_computed_tokens) in enumerate(joins):
        own = tables[index * num_groups : (index + 1) * num_groups]
        yield Join(
            slot=slot,
            sequence_id=sequence_id,
            tokens=(),
            num_prompt_tokens=0,
            num_computed_tokens=num_computed_tokens,
            block_tables=tuple(_block_tables(own, next(swapped_in, 0))),
            prompt_logprobs_from=0,
        )


def _block_tables(
    counts: Sequence[tuple[int, int]], swapped_in: int
) -> Iterator[tuple[int, tuple[BlockId, ...]]]:
    for num_skipped, count in counts:
        brought = min(count, swapped_in)
        swapped_in -= brought
        yield num_skipped, (_SWAPPED_IN,) * brought + (_IN_THE_POOL,) * (count - brought)


def _passed_over(message: PlanInput) -> Iterator[PassedOver]:
    for sequence_id, number in zip(message.passed_over, message.passed_over_whys, strict=True):
        yield PassedOver(QUEUE_STAGES[0], _why(number), sequence_id or None)
    if message.preempted_whys:
        gave_way = zip(message.preempted, message.preempted_whys, strict=True)
        yield from (PassedOver("give_way", _why(why), one) for one, why in gave_way if why)


def _why(number: WhyPassedOver) -> Why:
    """Nobody asks more of it than how it reads."""
    later = _LaterWhy(f"unknown reason {number}")
    return wire.WHY_FROM_PROTO.get(number) or cast("Why", later)
