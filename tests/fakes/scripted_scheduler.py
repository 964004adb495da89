"""A leader that computes nothing: it reads the inbox and commits tokens that a script dictates.

Everything else is real: election, renewal, journal, results, cancels. `script(record, choice)`
names the tokens of a choice, as many as it likes; stop ids, max_tokens and cancels end it.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kaiten.v1.common_pb2 import (
    FEATURE_LOGITS_PROCESSORS,
    FEATURE_LOGPROBS,
    FEATURE_PROMPT_LOGPROBS,
    FEATURE_STRUCTURED_OUTPUTS,
    Capabilities,
    Feature,
    FinishReason,
    PromptLogprobs,
    TokenLogprobs,
    WorkerDescription,
)
from kaiten.v1.inference_service_pb2 import Done, Timings, Usage
from kaiten.v1.ledger_pb2 import (
    CancelRecord,
    CellRecord,
    ChoiceResult,
    FoldedTokens,
    JournalRecord,
    RequestResult,
    SequenceFinished,
    SequenceLogprobs,
    SubmitRecord,
)
from ledger import Commit, Leader, Ledger
from ledger.types import InboxEntry
from service_kit.errors import Unavailable

# Of the worker that is not there: all.
FEATURES = (
    FEATURE_LOGPROBS,
    FEATURE_PROMPT_LOGPROBS,
    FEATURE_LOGITS_PROCESSORS,
    FEATURE_STRUCTURED_OUTPUTS,
)
Script = Callable[[SubmitRecord, int], Iterator[int]]


def echo(record: SubmitRecord, _choice: int) -> Iterator[int]:
    """The prompt's own tokens, over and over."""
    return itertools.cycle(record.prompt_token_ids)


@dataclass
class _Choice:
    record: SubmitRecord
    sequence_id: int
    tokens: Iterator[int]
    output: FoldedTokens = field(default_factory=FoldedTokens)
    finished: SequenceFinished | None = None


@dataclass
class _Request:
    entry: InboxEntry
    record: SubmitRecord
    choices: list[_Choice]


class ScriptedScheduler:
    """Run it with `async with`. `is_open` gates the steps; `cancels` remembers what was asked."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        script: Script = echo,
        vocab_size: int,
        context_tokens_max: int = 256,
        tokens_per_step: int = 1,
        step_s: float = 0.0,
        features: Sequence[Feature] = FEATURES,
    ) -> None:
        self.ledger = ledger
        self.script = script
        self.cancels: list[CancelRecord] = []
        self.submits: list[SubmitRecord] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        # Closed, and the step that was under way is over.
        self.is_parked = False
        self.cell = CellRecord(
            model=WorkerDescription(
                model="scripted",
                dtype="float32",
                vocab_size=vocab_size,
                context_tokens_max=context_tokens_max,
                capabilities=Capabilities(features=features),
            ),
            workers_ready=1,
        )
        self._tokens_per_step = tokens_per_step
        self.step_s = step_s
        self._requests: dict[int, _Request] = {}
        self._told: set[int] = set()
        self._cursor = "0-0"
        self._seq = 0
        self._leader: Leader | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "ScriptedScheduler":
        self._leader = await self.ledger.elect("127.0.0.1:1", 7, seen=await self.ledger.leader())
        assert self._leader is not None
        self._seq = self._leader.journal_seq
        await self.ledger.renew(self._leader, self.cell)
        self._tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._work())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        assert not failures, failures

    def stop_renewing(self) -> None:
        """As a leader that hangs."""
        self._tasks.pop(0).cancel()

    async def stop(self) -> None:
        """As a leader that is killed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    @property
    def live_count(self) -> int:
        """Requests whose end is not committed."""
        return len(self._requests)

    async def _renew(self) -> None:
        while True:
            assert self._leader is not None
            await self.ledger.renew(self._leader, self.cell)
            await asyncio.sleep(0.1)

    async def _work(self) -> None:
        while True:
            self.is_parked = not self.is_open.is_set()
            await self.is_open.wait()
            self.is_parked = False
            is_idle = not self._requests
            for entry in await self._arrived(block_ms=20 if is_idle else 1):
                self._cursor = entry.entry_id
                self._take(entry)
            await self._step()
            await asyncio.sleep(self.step_s)

    async def _arrived(self, block_ms: int) -> list[InboxEntry]:
        """Of a store that does not answer in time nothing; it is asked again."""
        try:
            return await self.ledger.inbox_read(self._cursor, block_ms=block_ms)
        except Unavailable:
            return []

    def _take(self, entry: InboxEntry) -> None:
        if isinstance(entry.record, CancelRecord):
            self.cancels.append(entry.record)
            self._cancel(entry.record)
            return
        record = entry.record
        self.submits.append(record)
        choices = [
            _Choice(record, entry.sequence_id + index, self.script(record, index))
            for index in range(record.n)
        ]
        self._requests[entry.sequence_id] = _Request(entry, record, choices)

    def _cancel(self, record: CancelRecord) -> None:
        request = self._requests.get(record.sequence_id)
        if request is None:
            return
        chosen = [record.choice] if record.HasField("choice") else range(record.n)
        for index in chosen:
            choice = request.choices[index]
            if choice.finished is None:
                count = len(choice.output.token_ids)
                if record.reason == FinishReason.FINISH_REASON_STOP:
                    count = record.output_tokens
                self._end(choice, record.reason, count)

    async def _step(self) -> None:
        record = JournalRecord(seq=self._seq + 1)
        prompt_logprobs = {}
        for sequence_id, request in self._requests.items():
            asked, first = request.record.sampling, request.choices[0]
            if asked.HasField("prompt_logprobs") and not (first.output.token_ids or first.finished):
                prompt_logprobs[sequence_id] = _explained(request.record)
            for choice in request.choices:
                if choice.finished is None:
                    self._advance(choice, record)
        endings = self._endings(record)
        if not record.sequence_ids and not record.finished:
            return
        assert self._leader is not None
        record.epoch = self._leader.epoch
        self._seq += 1
        await self.ledger.commit_many(
            self._leader, [Commit(record, endings, prompt_logprobs=prompt_logprobs)]
        )
        for ending in endings:
            del self._requests[ending.sequence_id]

    def _advance(self, choice: _Choice, journal: JournalRecord) -> None:
        sampling = choice.record.sampling
        for _ in range(self._tokens_per_step):
            token_id = next(choice.tokens, None)
            if token_id is None:
                self._end(choice, FinishReason.FINISH_REASON_ERROR, error="the script ended")
                return
            journal.sequence_ids.append(choice.sequence_id)
            journal.positions.append(len(choice.output.token_ids))
            journal.token_ids.append(token_id)
            choice.output.token_ids.append(token_id)
            if sampling.logprobs >= 0:
                logprobs = _logprobs(token_id, sampling.logprobs)
                journal.logprobs.append(
                    SequenceLogprobs(sequence_id=choice.sequence_id, logprobs=logprobs)
                )
                choice.output.logprobs.append(logprobs)
            count = len(choice.output.token_ids)
            if token_id in sampling.stop_token_ids and count > sampling.min_tokens:
                self._end(choice, FinishReason.FINISH_REASON_STOP)
                return
            if count >= sampling.max_tokens:
                self._end(choice, FinishReason.FINISH_REASON_LENGTH)
                return

    def _end(
        self, choice: _Choice, reason: FinishReason, count: int | None = None, error: str = ""
    ) -> None:
        count = len(choice.output.token_ids) if count is None else count
        del choice.output.token_ids[count:]
        del choice.output.logprobs[count:]
        choice.finished = SequenceFinished(
            sequence_id=choice.sequence_id, reason=reason, output_tokens=count, error=error
        )

    def _endings(self, journal: JournalRecord) -> Sequence[RequestResult]:
        """Tell what has ended; with its last choice a request's result."""
        endings = []
        for request in self._requests.values():
            ended = [choice.finished for choice in request.choices if choice.finished is not None]
            fresh = [end for end in ended if end.sequence_id not in self._told]
            self._told.update(end.sequence_id for end in fresh)
            if len(ended) == len(request.choices):
                fresh[-1].done.CopyFrom(_done(request))
                endings.append(_ending(request))
            journal.finished.extend(fresh)
        return endings


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    """Halving probabilities: the token itself first, its neighbours after it."""
    tops = [token_id + rank for rank in range(count)]
    return TokenLogprobs(
        logprob=-0.5, top_token_ids=tops, top_logprobs=[-0.5 - rank for rank in range(count)]
    )


def _explained(record: SubmitRecord) -> PromptLogprobs:
    """Minus the position, and less by one for each of the likeliest: the neighbours above it."""
    k, positions = record.sampling.prompt_logprobs, range(1, len(record.prompt_token_ids))
    return PromptLogprobs(
        position=1,
        token_count=len(positions),
        logprobs=[-float(position) for position in positions],
        top_token_ids=[record.prompt_token_ids[at] + rank for at in positions for rank in range(k)],
        top_logprobs=[-float(at + rank) for at in positions for rank in range(k)],
    )


def _done(request: _Request) -> Done:
    output = sum(len(choice.output.token_ids) for choice in request.choices)
    usage = Usage(prompt_tokens=len(request.record.prompt_token_ids), output_tokens=output)
    return Done(usage=usage, timings=Timings(queue_us=1, prefill_us=2, decode_us=3))


def _ending(request: _Request) -> RequestResult:
    record = request.record
    return RequestResult(
        id=record.id,
        sequence_id=request.entry.sequence_id,
        prompt_tokens=len(record.prompt_token_ids),
        choices=[ChoiceResult(output=c.output, finished=c.finished) for c in request.choices],
        done=_done(request),
        render=record.render,
    )
