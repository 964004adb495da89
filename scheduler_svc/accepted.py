"""The live requests of a term, as the ledger holds them: what the core does not need to decide."""

from dataclasses import dataclass, field

from ledger import InboxEntry
from protos.kaiten.v1.common_pb2 import TokenLogprobs
from protos.kaiten.v1.ledger_pb2 import FoldedTokens, SequenceFinished, SubmitRecord
from protos.kaiten.v1.worker_service_pb2 import RowSampling
from scheduler_svc.core.types import SequenceId
from scheduler_svc.wire import sampling_of_choice


@dataclass(eq=False, slots=True, kw_only=True)
class Accepted:
    """One live request beside the core."""

    entry: InboxEntry
    record: SubmitRecord
    # Choices that ended under an earlier leader, with their output.
    ended_before: dict[SequenceId, tuple[FoldedTokens, SequenceFinished]] = field(
        default_factory=dict
    )


class AcceptedRequests:
    """Live requests by serial. Holds, per sequence, what was committed since the last fold."""

    def __init__(self) -> None:
        # By every choice's serial.
        self._by_serial: dict[SequenceId, Accepted] = {}
        self._unfolded: dict[SequenceId, FoldedTokens] = {}
        self._logprobs: dict[SequenceId, list[TokenLogprobs]] = {}
        self._pieces: dict[SequenceId, FoldedTokens] = {}

    def __contains__(self, serial: SequenceId) -> bool:
        return serial in self._by_serial

    def add(self, accepted: Accepted) -> None:
        """A request is live from here to `remove`."""
        for serial in self._serials(accepted):
            self._by_serial[serial] = accepted
            self._unfolded[serial] = FoldedTokens()
            if accepted.record.sampling.logprobs >= 0:
                self._logprobs[serial] = []

    def get(self, serial: SequenceId) -> Accepted:
        """By any choice's serial."""
        return self._by_serial[serial]

    def remove(self, serial: SequenceId) -> None:
        """The request is over: nothing of it is folded any more."""
        for one in self._serials(self._by_serial[serial]):
            del self._by_serial[one], self._unfolded[one]
            self._logprobs.pop(one, None)

    @property
    def has_logprobs(self) -> bool:
        """Somebody asked for log-probabilities of the output."""
        return bool(self._logprobs)

    def asked(self, serial: SequenceId) -> RowSampling:
        """What the request asked for, by any choice's serial."""
        return self._by_serial[serial].record.sampling

    def sampling(self, serial: SequenceId) -> RowSampling:
        """Of any choice, by its own serial."""
        return sampling_of_choice(self.asked(serial), serial - self._by_serial[serial].entry.serial)

    def traceparent(self, serial: SequenceId) -> str:
        """Of the request's span, by any choice's serial; empty when it has none."""
        return self._by_serial[serial].record.traceparent

    def committed(self, serial: SequenceId, token: int) -> None:
        """One more token of a live sequence."""
        self._unfolded[serial].token_ids.append(token)

    def explained(self, serial: SequenceId, logprobs: TokenLogprobs) -> None:
        """The log-probabilities of the token just committed."""
        self._unfolded[serial].logprobs.append(logprobs)
        self._logprobs[serial].append(logprobs)

    def recovered(self, serial: SequenceId, output: FoldedTokens, folded_count: int) -> None:
        """Output of an earlier leader, of which so many tokens are folded already.

        The rest is due at the first fold, which trims the records of the earlier leader.
        """
        piece = FoldedTokens(token_ids=output.token_ids[folded_count:])
        if serial in self._logprobs:
            piece.logprobs.extend(output.logprobs[folded_count:])
            self._logprobs[serial].extend(output.logprobs)
        if piece.token_ids:
            self._pieces[serial] = piece

    def logprobs(self, serial: SequenceId, count: int) -> list[TokenLogprobs]:
        """Of the first `count` output tokens; empty when none were asked for."""
        return self._logprobs.get(serial, [])[:count]

    def next_fold(self) -> dict[SequenceId, FoldedTokens]:
        """What was unfolded at the call before this one, of sequences that are still live.

        One call late on purpose: followers read the newest records from the journal, and a fold
        trims the records it covers.
        """
        due = {serial: piece for serial, piece in self._pieces.items() if serial in self._unfolded}
        self._pieces = {serial: p for serial, p in self._unfolded.items() if p.token_ids}
        self._unfolded.update((serial, FoldedTokens()) for serial in self._pieces)
        return due

    def _serials(self, accepted: Accepted) -> range:
        return range(accepted.entry.serial, accepted.entry.serial + accepted.record.n)
