"""From what the core was told and said to what the ledger stores: one record per step.

A record carries the step's tokens and endings, and everything the core was told since the record
before it. So the journal is the decision log too: replayed through a core it gives the same plans.
"""

from collections.abc import Iterable
from typing import Final
from zlib import crc32

from kaiten.v1.ledger_pb2 import (
    ChoiceResult,
    CoreInput,
    FoldedTokens,
    JournalRecord,
    RequestResult,
    SequenceFinished,
    SequenceLogprobs,
    StepRecord,
)
from kaiten.v1.worker_service_pb2 import Plan as PlanMessage
from kaiten.v1.worker_service_pb2 import StepResult as StepMessage
from ledger import Commit, Leader
from scheduler_svc.command_wire import describe_plan, input_to_proto, throttled_change
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Event, Finished, Outcome, RequestOver, StepTokens
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.request_book import RequestBook
from scheduler_svc.wire import done_to_proto, finished_to_proto

# Of one record, give or take what one turn brings: plans and steps of long prompts, workers that
# come and go. A hundred bytes each.
INPUTS_MAX: Final = 512


class Journal:
    """Builds the commits of one leadership, in order. Performs nothing."""

    def __init__(self, requests: RequestBook, leader: Leader) -> None:
        self._requests = requests
        self._leader = leader
        self.seq = leader.journal_seq
        self._inputs: list[CoreInput] = []
        self._throttled: frozenset[str] = frozenset()
        # As of which change of the queue that is.
        self._num_throttlings = 0

    def write(
        self,
        command: Command,
        outcome: Outcome,
        now_ns: int,
        message: PlanMessage | StepMessage | None = None,
        waiting: WaitingQueue | None = None,
    ) -> Commit | None:
        """Note what the core was told, and the record of what came of it.

        None when nobody outside has to know of it: it goes with the next record. `message` is the
        plan as the worker is told it, or the step as it told us; `waiting`: the core's queue by
        now, for whose next request waits for their own running ones.
        """
        brought = outcome.tokens.tokens if outcome.tokens is not None else ()
        item = input_to_proto(command, now_ns, brought)
        if outcome.plan is not None and isinstance(message, PlanMessage):
            describe_plan(item.plan, outcome.plan, outcome.passed_over, plan_digest(message))
        if waiting is not None and waiting.num_throttlings != self._num_throttlings:
            self._num_throttlings = waiting.num_throttlings
            self._note_throttled(item, frozenset(tenant.name for tenant in waiting.throttled))
        self._inputs.append(item)
        if outcome.tokens is not None and isinstance(message, StepMessage):
            return self._step(message, outcome, outcome.tokens, now_ns)
        return self._sealed(JournalRecord(), outcome.events, now_ns) if outcome.events else None

    def _note_throttled(self, item: CoreInput, names: frozenset[str]) -> None:
        if names != self._throttled:
            item.throttled.CopyFrom(throttled_change(self._throttled, names))
            self._throttled = names

    def opened(self, now_ns: int) -> Commit:
        """The first record of a leadership; or one of what was told until now, whatever it is."""
        return self._sealed(JournalRecord(), (), now_ns)

    def overdue(self, now_ns: int) -> Commit | None:
        """A record of inputs alone, when too many wait for something to come of them."""
        if len(self._inputs) < INPUTS_MAX:
            return None
        return self._sealed(JournalRecord(), (), now_ns)

    def _step(
        self, message: StepMessage, outcome: Outcome, tokens: StepTokens, now_ns: int
    ) -> Commit | None:
        """The record of a step; None when it brought nothing but a prefill chunk."""
        if not tokens.sequence_ids and not outcome.events and not tokens.prompt_logprobs:
            return None
        self._requests.committed(tokens.sequence_ids, tokens.tokens)
        record = JournalRecord(
            sequence_ids=tokens.sequence_ids,
            positions=tokens.positions,
            token_ids=tokens.tokens,
            step=StepRecord(
                worker_id=message.boot_id,
                plan_id=message.plan_id,
                step=message.step,
                timings=message.timings,
            ),
        )
        self._add_logprobs(record, message, tokens)
        prompt_logprobs = {
            tokens.prompt_logprobs[row.slot]: row.logprobs
            for row in message.prompt_logprobs
            if row.slot in tokens.prompt_logprobs
        }
        return self._sealed(record, outcome.events, now_ns)._replace(
            prompt_logprobs=prompt_logprobs
        )

    def _add_logprobs(
        self, record: JournalRecord, message: StepMessage, tokens: StepTokens
    ) -> None:
        if not message.logprobs:
            return
        sequence_at = dict(zip(tokens.slots, tokens.sequence_ids, strict=True))
        for row in message.logprobs:
            if (sequence_id := sequence_at.get(row.slot)) is not None:
                self._requests.add_logprobs(sequence_id, row.logprobs)
                record.logprobs.append(
                    SequenceLogprobs(sequence_id=sequence_id, logprobs=row.logprobs)
                )

    def _sealed(self, record: JournalRecord, events: Iterable[Event], now_ns: int) -> Commit:
        """The record as the next one, with what the core was told since the one before."""
        self.seq += 1
        record.seq, record.epoch, record.unix_ns = self.seq, self._leader.epoch, now_ns
        if self.seq == self._leader.journal_seq + 1:
            record.after_seq = self._leader.after_seq
        endings = []
        for event in events:
            if isinstance(event, Finished):
                record.finished.append(finished_to_proto(event))
            else:
                endings.append(self._ending(event, record.finished[-1]))
        record.inputs.extend(self._inputs)
        self._inputs.clear()
        return Commit(record, endings, data=record.SerializeToString())

    def _ending(self, over: RequestOver, last: SequenceFinished) -> RequestResult:
        """Put the result together; `last`, the choice that ended last, says that all is done."""
        accepted = self._requests.get(over.sequence_id)
        choices = self._choices(over)
        output_tokens = sum(choice.finished.output_tokens for choice in choices)
        last.done.CopyFrom(done_to_proto(over, output_tokens))
        self._requests.remove(over.sequence_id)
        return RequestResult(
            id=over.id,
            sequence_id=over.sequence_id,
            prompt_tokens=over.num_prompt_tokens,
            choices=choices,
            done=last.done,
            render=accepted.record.render,
        )

    def _choices(self, over: RequestOver) -> list[ChoiceResult]:
        before = self._requests.get(over.sequence_id).ended_before
        endings = {ending.sequence_id: ending for ending in over.endings}
        choices = []
        for choice, tokens in enumerate(over.outputs):
            sequence_id = over.sequence_id + choice
            if sequence_id in before:
                output, finished = before[sequence_id]
            else:
                logprobs = self._requests.logprobs(sequence_id, len(tokens))
                output = FoldedTokens(token_ids=tokens, logprobs=logprobs)
                finished = finished_to_proto(endings[sequence_id])
            choices.append(ChoiceResult(output=output, finished=finished))
        return choices


def plan_digest(message: PlanMessage) -> int:
    """Of the plan as sent, less leader, trace and guess: equal decisions have equal digests."""
    bare = PlanMessage()
    bare.CopyFrom(message)
    bare.ClearField("leader")
    bare.ClearField("traceparent")
    bare.ClearField("expected_step_us")
    return crc32(bare.SerializeToString(deterministic=True))
