"""Arithmetic of positions, pure: which tokens of a journal record are new, and what a sequence
looks like in total.

Invariant of every output here: token_ids holds exactly positions [0, len(token_ids)), each taken
once.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

from kaiten.v1.common_pb2 import PromptLogprobs, TokenLogprobs
from kaiten.v1.ledger_pb2 import (
    FoldedTokens,
    JournalRecord,
    SequenceFinished,
    StoredPromptLogprobs,
)
from ledger.types import DamagedLedger


def tokens_of(record: JournalRecord) -> Iterator[tuple[int, int, int, TokenLogprobs | None]]:
    """(sequence id, position, token id, log-probabilities if the request asked for them), in record
    order.
    """
    waiting: defaultdict[int, deque[TokenLogprobs]] = defaultdict(deque)
    for entry in record.logprobs:
        waiting[entry.sequence_id].append(entry.logprobs)
    for sequence_id, position, token_id in zip(
        record.sequence_ids, record.positions, record.token_ids, strict=True
    ):
        queue = waiting.get(sequence_id)
        yield sequence_id, position, token_id, queue.popleft() if queue else None


def pieces_of(records: Iterator[JournalRecord] | list[JournalRecord]) -> dict[int, FoldedTokens]:
    """What `fold` is given for these consecutive records: each sequence id's tokens in order."""
    pieces: defaultdict[int, FoldedTokens] = defaultdict(FoldedTokens)
    for record in records:
        for sequence_id, _, token_id, logprobs in tokens_of(record):
            pieces[sequence_id].token_ids.append(token_id)
            if logprobs is not None:
                pieces[sequence_id].logprobs.append(logprobs)
    return dict(pieces)


class Outputs:
    """The outputs of some sequences, completed by journal records in any overlap with what is
    known.
    """

    def __init__(self, folded: Mapping[int, FoldedTokens]) -> None:
        self.tokens = dict(folded)
        self.finished: dict[int, SequenceFinished] = {}
        # What is wrong with a sequence whose tokens are not all there; none are taken after a hole.
        self.damaged: dict[int, str] = {}

    def apply(self, record: JournalRecord) -> None:
        """Take what is new of the sequences we hold."""
        for sequence_id, position, token_id, logprobs in tokens_of(record):
            output = self.tokens.get(sequence_id)
            if output is None or sequence_id in self.damaged or position < len(output.token_ids):
                continue
            if position > len(output.token_ids):
                self.damaged[sequence_id] = (
                    f"sequence {sequence_id} lacks tokens [{len(output.token_ids)}, {position})"
                    f" before journal record {record.seq}"
                )
                continue
            output.token_ids.append(token_id)
            if logprobs is not None:
                output.logprobs.append(logprobs)
        for ended in record.finished:
            if ended.sequence_id in self.tokens:
                self.finished[ended.sequence_id] = ended


def joined(prompt: StoredPromptLogprobs) -> PromptLogprobs:
    """All runs as one, from position 1. DamagedLedger when one does not follow the other."""
    whole = PromptLogprobs(position=1)
    for run in prompt.runs:
        end = whole.position + whole.token_count
        if run.position != end:
            raise DamagedLedger(
                f"log-probabilities of prompt token {end}, not {run.position}, are next"
            )
        whole.token_count += run.token_count
        whole.logprobs.extend(run.logprobs)
        whole.top_token_ids.extend(run.top_token_ids)
        whole.top_logprobs.extend(run.top_logprobs)
    return whole


def cut(output: FoldedTokens, finished: SequenceFinished | None) -> FoldedTokens:
    """Only what counts: a stop string may end a sequence before its last journaled token."""
    if finished is None or finished.output_tokens >= len(output.token_ids):
        return output
    return FoldedTokens(
        token_ids=output.token_ids[: finished.output_tokens],
        logprobs=output.logprobs[: finished.output_tokens],
    )
