"""From what the core was told and said to what the ledger stores: one record per step.

A record carries the step's tokens and endings, and everything the core was told since the record
before it. So the journal is the decision log too: replayed through a core it gives the same plans.
"""

from collections.abc import Iterable
from zlib import crc32

from ledger import Commit
from protos.kaiten.v1.ledger_pb2 import (
    CancelRecord,
    ChoiceResult,
    CoreInput,
    ExpireInput,
    FoldedTokens,
    JournalRecord,
    RequestResult,
    ResultInput,
    SequenceFinished,
    SequenceLogprobs,
    StepRecord,
    SubmitInput,
    WorkerDrainingInput,
    WorkerJoinedInput,
    WorkerLostInput,
)
from protos.kaiten.v1.worker_service_pb2 import Plan as PlanMessage
from protos.kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from scheduler_svc.accepted import AcceptedRequests
from scheduler_svc.core.types import (
    Committed,
    Event,
    Finished,
    Plan,
    Request,
    RequestOver,
)
from scheduler_svc.wire import done_to_proto, finished_to_proto, plan_input_to_proto


class Journal:
    """Builds the commits of one term, in order. Performs nothing."""

    def __init__(self, accepted: AcceptedRequests, *, epoch: int, journal_seq: int) -> None:
        self._accepted = accepted
        self._epoch = epoch
        self.seq = journal_seq
        self._inputs: list[CoreInput] = []

    # What the core is told

    def submitted(self, request: Request, now_ns: int) -> None:
        counts = [len(output or ()) for output in request.outputs]
        submit = SubmitInput(
            id=request.id,
            serial=request.serial,
            committed_tokens=counts,
            explain_from=request.explain_from or 0,
        )
        self._inputs.append(CoreInput(now_ns=now_ns, submit=submit))

    def cancelled(self, record: CancelRecord, now_ns: int) -> None:
        self._inputs.append(CoreInput(now_ns=now_ns, cancel=record))

    def expired(self, now_ns: int) -> None:
        self._inputs.append(CoreInput(now_ns=now_ns, expire=ExpireInput()))

    def worker_joined(self, joined: WorkerJoinedInput, now_ns: int) -> None:
        self._inputs.append(CoreInput(now_ns=now_ns, worker_joined=joined))

    def worker_draining(self, worker_id: str, now_ns: int) -> None:
        draining = WorkerDrainingInput(worker_id=worker_id)
        self._inputs.append(CoreInput(now_ns=now_ns, worker_draining=draining))

    def worker_lost(self, lost: WorkerLostInput, now_ns: int) -> None:
        self._inputs.append(CoreInput(now_ns=now_ns, worker_lost=lost))

    def planned(self, plan: Plan, message: PlanMessage, now_ns: int) -> None:
        message_digest = plan_digest(message)
        planned = plan_input_to_proto(plan, message_digest)
        self._inputs.append(CoreInput(now_ns=now_ns, plan=planned))

    # What the world must hear

    def step(
        self, worker_id: str, message: StepMessage, committed: Committed, now_ns: int
    ) -> Commit | None:
        """The record of a step; None when nobody outside has to know of it (a prefill chunk)."""
        result = ResultInput(step=_slim(message), worker_id=worker_id)
        self._inputs.append(CoreInput(now_ns=now_ns, result=result))
        if not committed.serials and not committed.events and not committed.explained:
            return None
        for serial, token in zip(committed.serials, committed.tokens, strict=True):
            self._accepted.committed(serial, token)
        record = JournalRecord(
            serials=committed.serials,
            positions=committed.positions,
            token_ids=committed.tokens,
            step=StepRecord(
                worker_id=worker_id,
                plan_id=message.plan_id,
                step=message.step,
                timings=message.timings,
            ),
        )
        self._explain(record, message, committed)
        explained = {
            committed.explained[row.slot]: row.logprobs
            for row in message.prompt_logprobs
            if row.slot in committed.explained
        }
        return self._sealed(record, committed.events, now_ns)._replace(explained=explained)

    def ended(self, events: Iterable[Event], now_ns: int) -> Commit | None:
        """The record of endings that no step brought; None when there are none."""
        events = list(events)
        return self._sealed(JournalRecord(), events, now_ns) if events else None

    def _explain(self, record: JournalRecord, message: StepMessage, committed: Committed) -> None:
        if not message.logprobs:
            return
        serial_at = dict(zip(committed.slots, committed.serials, strict=True))
        for row in message.logprobs:
            if (serial := serial_at.get(row.slot)) is not None:
                self._accepted.explained(serial, row.logprobs)
                record.logprobs.append(SequenceLogprobs(serial=serial, logprobs=row.logprobs))

    def _sealed(self, record: JournalRecord, events: Iterable[Event], now_ns: int) -> Commit:
        """The record as the next one, with what the core was told since the one before."""
        self.seq += 1
        record.seq, record.epoch, record.unix_ns = self.seq, self._epoch, now_ns
        endings = []
        for event in events:
            if isinstance(event, Finished):
                record.finished.append(finished_to_proto(event))
            else:
                endings.append(self._ending(event, record.finished[-1]))
        record.inputs.extend(self._inputs)
        self._inputs.clear()
        return Commit(record, endings)

    def _ending(self, over: RequestOver, last: SequenceFinished) -> RequestResult:
        """Put the result together; `last`, the choice that ended last, says that all is done."""
        accepted = self._accepted.get(over.serial)
        choices = self._choices(over)
        output_tokens = sum(choice.finished.output_tokens for choice in choices)
        last.done.CopyFrom(done_to_proto(over, output_tokens))
        self._accepted.remove(over.serial)
        return RequestResult(
            id=over.id,
            serial=over.serial,
            prompt_tokens=over.prompt_tokens,
            choices=choices,
            done=last.done,
            render=accepted.record.render,
        )

    def _choices(self, over: RequestOver) -> list[ChoiceResult]:
        before = self._accepted.get(over.serial).ended_before
        endings = {ending.serial: ending for ending in over.endings}
        choices = []
        for choice, tokens in enumerate(over.outputs):
            serial = over.serial + choice
            if serial in before:
                output, finished = before[serial]
            else:
                logprobs = self._accepted.logprobs(serial, len(tokens))
                output = FoldedTokens(token_ids=tokens, logprobs=logprobs)
                finished = finished_to_proto(endings[serial])
            choices.append(ChoiceResult(output=output, finished=finished))
        return choices


def _slim(message: StepMessage) -> StepMessage:
    """A result as the core saw it, without what only readers of the output want."""
    slim = StepMessage()
    slim.CopyFrom(message)
    slim.ClearField("logprobs")
    for row in slim.prompt_logprobs:
        for values in ("logprobs", "top_token_ids", "top_logprobs"):
            row.logprobs.ClearField(values)
    return slim


def plan_digest(message: PlanMessage) -> int:
    """Of the plan as sent, less leader and trace: equal decisions have equal digests."""
    bare = PlanMessage()
    bare.CopyFrom(message)
    bare.ClearField("leader")
    bare.ClearField("traceparent")
    return crc32(bare.SerializeToString(deterministic=True))
