"""Each iteration's decision as the records of an archive say it, without a core. Pure.

What only a core knows is left out: which blocks were taken and evicted meanwhile, what the cost
model expected, and of the queue everybody who was not looked at.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from kaiten.v1.archive_pb2 import ArchivedRequest, Snapshot
from kaiten.v1.common_pb2 import WorkerDescription
from kaiten.v1.ledger_pb2 import CoreInput, JournalRecord, PlanInput, ResultInput
from scheduler_svc import wire
from scheduler_svc.core.types import SequenceId, SlotIndex, WorkerSpec
from scheduler_svc.decisions import Admitted, Decision, Free, Kept, Measured
from scheduler_svc.recorded import planned


@dataclass(slots=True)
class _Worker:
    """Who has which slot as of the newest plan."""

    spec: WorkerSpec
    slots: dict[SlotIndex, SequenceId] = field(default_factory=dict)


class RecordedDecisions:
    """Tells of every plan and step, in order. As `replay.Outcomes`."""

    def __init__(self, said: Callable[[Decision | Measured], None]) -> None:
        self._said = said
        self._policy, self._epoch = "", 0
        self._workers: dict[str, _Worker] = {}
        # Requests by the sequence ids of their choices; and back, to forget them.
        self._names: dict[SequenceId, str] = {}

    def begin(self, snapshot: Snapshot, epoch: int) -> None:
        self._epoch, self._policy = epoch, snapshot.configured.policy
        self._workers, self._names = {}, {}
        for told in snapshot.workers:
            if told.HasField("worker"):
                self._join(told.worker_id, told.worker)
        for request in snapshot.requests:
            for choice in request.choices:
                sequence_id = request.sequence_id + choice.choice
                self._names[sequence_id] = request.id
                if choice.HasField("slot"):
                    worker_id = snapshot.workers[choice.worker - 1].worker_id
                    self._workers[worker_id].slots[choice.slot] = sequence_id
        for archived in snapshot.taken:
            self.take_in(archived)

    def take_in(self, request: ArchivedRequest) -> None:
        first = request.sequence_id
        for sequence_id in range(first, first + request.submit.n):
            self._names[sequence_id] = request.submit.id

    def feed(self, record: JournalRecord) -> str:
        if record.epoch != self._epoch:
            self._epoch, self._workers = record.epoch, {}
        last, missed = len(record.inputs) - 1, ""
        for index, item in enumerate(record.inputs):
            rows = len({*record.sequence_ids}) if index == last else 0
            missed = self._take(item, rows) or missed
        for ending in record.finished:
            self._names.pop(ending.sequence_id, None)
        return missed

    def _take(self, item: CoreInput, rows: int) -> str:
        match item.WhichOneof("input"):
            case "configured":
                self._policy = item.configured.policy
            case "worker_joined":
                self._join(item.worker_joined.worker_id, item.worker_joined.worker)
            case "worker_changed":
                changed = item.worker_changed
                if (worker := self._workers.get(changed.worker_id)) is not None:
                    worker.spec = wire.spec_from_proto(changed.worker)
            case "worker_lost":
                self._workers.pop(item.worker_lost.worker_id, None)
            case "plan":
                return self._plan(item.plan, item.now_ns)
            case "result":
                self._said(_measured(item.result, item.now_ns, rows))
        return ""

    def _join(self, worker_id: str, worker: WorkerDescription) -> None:
        self._workers[worker_id] = _Worker(wire.spec_from_proto(worker))

    def _plan(self, message: PlanInput, now_ns: int) -> str:
        if (worker := self._workers.get(message.worker_id)) is None:
            return f"a plan of worker {message.worker_id}, which nothing before it tells of"
        outcome = planned(message)
        plan = outcome.plan
        assert plan is not None
        for slot in message.leave_slots:
            worker.slots.pop(slot, None)
        worker.slots.update({join.slot: join.sequence_id for join in plan.joins})
        slots, names = worker.slots, self._names
        kept = Kept(
            unix_ns=now_ns,
            plan=plan,
            policy=self._policy,
            spec=worker.spec,
            passed_over=outcome.passed_over,
            chunks=tuple((slots[slot], count) for slot, count in plan.chunks if slot in slots),
            joined=tuple(names.get(join.sequence_id, "") for join in plan.joins),
            blocks=Free(plan.blocks_free, worker.spec.block_count),
            expected_us=(0, 0),
        )
        said = kept.decision()
        waits = (w._replace(request_id=names.get(w.sequence_id, "")) for w in said.waits)
        admitted = tuple(_with_tokens(said, message))
        self._said(replace(said, admitted=admitted, waits=tuple(waits)))
        return ""


def _with_tokens(said: Decision, message: PlanInput) -> Iterator[Admitted]:
    for admitted, tokens in zip_longest(said.admitted, message.join_tokens[: len(said.admitted)]):
        yield admitted._replace(tokens=tokens or 0)


def _measured(result: ResultInput, now_ns: int, rows: int) -> Measured:
    step = result.step
    return Measured(
        unix_ns=now_ns,
        worker_id=result.worker_id,
        plan_id=step.plan_id,
        step=step.step,
        rows=rows,
        step_us=step.timings.forward_us + step.timings.sample_us,
        expected_us=0,
        is_graph=step.timings.is_graph,
    )
