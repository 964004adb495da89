"""The live requests as the ledger holds them: what the core does not need to decide."""

from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from kaiten.v1.common_pb2 import TokenLogprobs
from kaiten.v1.ledger_pb2 import FoldedTokens, SequenceFinished, SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import InboxEntry, Recovered
from ledger.tokens import cut
from scheduler_svc.archiving import Archive
from scheduler_svc.core.outcome import Event, RequestOver, StepTokens
from scheduler_svc.core.types import SequenceId
from scheduler_svc.wire import finished_from_proto, sampling_of_choice

# Requests that are over, as many as timelines are kept of.
OVER_MAX: Final = 4096


class Piece(NamedTuple):
    """Tokens of a sequence that follow on those folded."""

    token_ids: list[int]
    # One per token, where asked for.
    logprobs: list[TokenLogprobs]


@dataclass(eq=False, slots=True, kw_only=True)
class BookedRequest:
    """One live request beside the core."""

    entry: InboxEntry
    record: SubmitRecord
    # Some choice has output, whoever led.
    is_answered: bool = False
    # Choices that ended under an earlier leader, with their output.
    ended_before: dict[SequenceId, tuple[FoldedTokens, SequenceFinished]] = field(
        default_factory=dict
    )


class RequestBook:
    """Live requests by sequence id. Holds, per sequence, what was committed since the last fold."""

    def __init__(self, archive: Archive | None = None) -> None:
        self._archive = archive
        # By every choice's sequence id.
        self._by_sequence_id: dict[SequenceId, BookedRequest] = {}
        # Of spans whose requests are over, by the first sequence id, newest last.
        self._traceparents_over: OrderedDict[SequenceId, str] = OrderedDict()
        # As they come, by the list of the sequences that had a token each: the steps' tokens.
        self._unfolded: dict[int, tuple[list[SequenceId], list[Iterable[int]]]] = {}
        self._unfolded_logprobs: dict[SequenceId, list[TokenLogprobs]] = {}
        self._logprobs: dict[SequenceId, list[TokenLogprobs]] = {}
        self._pieces: dict[SequenceId, Piece] = {}

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._by_sequence_id

    def sequence_ids(self) -> Set[SequenceId]:
        """Of every choice, as of now."""
        return self._by_sequence_id.keys() | ()

    def add(self, accepted: BookedRequest) -> None:
        """A request is live from here to `remove`."""
        if self._archive is not None:
            self._archive.request(accepted.entry, accepted.record)
        self._add(accepted)

    def _add(self, accepted: BookedRequest) -> None:
        for sequence_id in self._sequence_ids(accepted):
            self._by_sequence_id[sequence_id] = accepted
            if accepted.record.sampling.logprobs >= 0:
                self._logprobs[sequence_id] = []

    def get(self, sequence_id: SequenceId) -> BookedRequest:
        """By any choice's sequence id."""
        return self._by_sequence_id[sequence_id]

    def remove(self, sequence_id: SequenceId) -> None:
        """The request is over: nothing of it is folded any more."""
        over = self._by_sequence_id[sequence_id]
        for one in self._sequence_ids(over):
            del self._by_sequence_id[one]
            self._logprobs.pop(one, None)
        if over.record.traceparent:
            self._traceparents_over[over.entry.sequence_id] = over.record.traceparent
            if len(self._traceparents_over) > OVER_MAX:
                self._traceparents_over.popitem(last=False)

    def whole(self, events: Iterable[Event]) -> list[Event]:
        """The same; of requests that are over with what their choices had that ended under an
        earlier leader.
        """
        return [self._whole(event) if isinstance(event, RequestOver) else event for event in events]

    def _whole(self, over: RequestOver) -> RequestOver:
        if not (before := self._by_sequence_id[over.sequence_id].ended_before):
            return over
        outputs, endings = [*over.outputs], [*over.endings]
        for sequence_id, (output, finished) in before.items():
            outputs[sequence_id - over.sequence_id] = tuple(output.token_ids)
            endings.append(finished_from_proto(finished))
        endings.sort(key=lambda ending: ending.sequence_id)
        return replace(over, outputs=tuple(outputs), endings=tuple(endings))

    @property
    def has_logprobs(self) -> bool:
        """Somebody asked for log-probabilities of the output."""
        return bool(self._logprobs)

    def asked(self, sequence_id: SequenceId) -> RowSampling:
        """What the request asked for, by any choice's sequence id."""
        return self._by_sequence_id[sequence_id].record.sampling

    def sampling(self, sequence_id: SequenceId) -> RowSampling:
        """Of any choice, by its own sequence id."""
        return sampling_of_choice(
            self.asked(sequence_id),
            sequence_id - self._by_sequence_id[sequence_id].entry.sequence_id,
        )

    def traceparent(self, sequence_id: SequenceId) -> str:
        """Of the request's span, by any choice's sequence id; empty when it has none."""
        return self._by_sequence_id[sequence_id].record.traceparent

    def traceparent_told(self, first: SequenceId) -> str:
        """The same of a request that is live or was of late, by its first sequence id."""
        if first in self._by_sequence_id:
            return self.traceparent(first)
        return self._traceparents_over.get(first, "")

    def answered(self, tokens: StepTokens) -> int:
        """Prompt tokens of the requests of whose output these are the first."""
        count = 0
        if 0 in tokens.positions:
            for sequence_id, position in zip(tokens.sequence_ids, tokens.positions, strict=True):
                request = self._by_sequence_id[sequence_id]
                if position == 0 and not request.is_answered:
                    request.is_answered = True
                    count += len(request.record.prompt_token_ids)
        return count

    def committed(self, sequence_ids: list[SequenceId], tokens: Iterable[int]) -> None:
        """What a step brought to live sequences: parallel, and not to be changed any more.

        The same list again, each sequence once in it, says that the same sequences went on.
        """
        _, steps = self._unfolded.setdefault(id(sequence_ids), (sequence_ids, []))
        steps.append(tokens)

    def add_logprobs(self, sequence_id: SequenceId, logprobs: TokenLogprobs) -> None:
        """The log-probabilities of the token just committed."""
        self._unfolded_logprobs.setdefault(sequence_id, []).append(logprobs)
        self._logprobs[sequence_id].append(logprobs)

    def resume(
        self, accepted: BookedRequest, recovered: Recovered
    ) -> tuple[tuple[int, ...] | None, ...]:
        """A request that an earlier leader took in; its output so far by choice, None: ended."""
        self._add(accepted)
        outputs: list[FoldedTokens | None] = []
        for sequence_id in self._sequence_ids(accepted):
            output = recovered.tokens[sequence_id]
            self.recovered(sequence_id, output, recovered.folded_counts[sequence_id])
            if (ended := recovered.finished.get(sequence_id)) is not None:
                accepted.ended_before[sequence_id] = (cut(output, ended), ended)
            accepted.is_answered |= bool(output.token_ids)
            outputs.append(None if sequence_id in recovered.finished else output)
        if self._archive is not None:
            self._archive.request(accepted.entry, accepted.record, outputs)
        return tuple(None if output is None else tuple(output.token_ids) for output in outputs)

    def recovered(self, sequence_id: SequenceId, output: FoldedTokens, folded_count: int) -> None:
        """Output of an earlier leader, of which so many tokens are folded already.

        The rest is due at the first fold, which trims the records of the earlier leader.
        """
        piece = Piece(list(output.token_ids[folded_count:]), [])
        if sequence_id in self._logprobs:
            piece.logprobs.extend(output.logprobs[folded_count:])
            self._logprobs[sequence_id].extend(output.logprobs)
        if piece.token_ids:
            self._pieces[sequence_id] = piece

    def logprobs(self, sequence_id: SequenceId, count: int) -> list[TokenLogprobs]:
        """Of the first `count` output tokens; empty when none were asked for."""
        return self._logprobs.get(sequence_id, [])[:count]

    def next_fold(self) -> dict[SequenceId, Piece]:
        """What was unfolded at the call before this one, of sequences that are still live.

        One call late on purpose: followers read the newest records from the journal, and a fold
        trims the records it covers.
        """
        due, self._pieces = self._pieces, self._take_unfolded()
        return {one: piece for one, piece in due.items() if one in self._by_sequence_id}

    def _take_unfolded(self) -> dict[SequenceId, Piece]:
        unfolded, self._unfolded = self._unfolded, {}
        logprobs, self._unfolded_logprobs = self._unfolded_logprobs, {}
        pieces: dict[SequenceId, Piece] = {}
        for sequence_ids, steps in unfolded.values():
            for sequence_id, tokens in zip(sequence_ids, zip(*steps, strict=True), strict=True):
                if (piece := pieces.get(sequence_id)) is None:
                    piece = pieces[sequence_id] = Piece([], logprobs.get(sequence_id, []))
                piece.token_ids.extend(tokens)
        return pieces

    def _sequence_ids(self, accepted: BookedRequest) -> range:
        return range(accepted.entry.sequence_id, accepted.entry.sequence_id + accepted.record.n)
