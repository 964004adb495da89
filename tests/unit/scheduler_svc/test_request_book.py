"""What is folded when: every token once, one fold late, and nothing of what has ended."""

from collections.abc import Sequence

import pytest

from kaiten.v1.common_pb2 import FinishReason, TokenLogprobs
from kaiten.v1.ledger_pb2 import FoldedTokens, SequenceFinished, SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import InboxEntry, Recovered
from scheduler_svc import request_book
from scheduler_svc.core.outcome import Finished, RequestOver, StepTokens
from scheduler_svc.core.types import Reason, SlotIndex
from scheduler_svc.request_book import BookedRequest, RequestBook


def accepted(
    sequence_id: int = 1, *, n: int = 1, logprobs: int = -1, prompt: int = 0
) -> BookedRequest:
    record = SubmitRecord(
        id=f"r{sequence_id}",
        n=n,
        prompt_token_ids=range(prompt),
        sampling=RowSampling(seed=5, logprobs=logprobs),
    )
    return BookedRequest(
        entry=InboxEntry(entry_id="1-0", sequence_id=sequence_id, record=record), record=record
    )


def folded(requests: RequestBook) -> dict[int, list[int]]:
    return {
        sequence_id: list(piece.token_ids) for sequence_id, piece in requests.next_fold().items()
    }


def test_tokens_are_folded_one_call_late_and_once() -> None:
    requests = RequestBook()
    requests.add(accepted())
    requests.committed([1], [10])
    assert folded(requests) == {}
    requests.committed([1], [11])
    requests.committed([1], [12])
    assert folded(requests) == {1: [10]}
    assert folded(requests) == {1: [11, 12]}
    assert folded(requests) == {}


def test_what_an_earlier_leader_left_is_due_at_the_first_fold() -> None:
    """That fold trims the earlier leader's records, so it must take their tokens along."""
    requests = RequestBook()
    requests.add(accepted(logprobs=0))
    output = FoldedTokens(
        token_ids=[10, 11, 12], logprobs=[TokenLogprobs(logprob=-i) for i in range(3)]
    )
    requests.recovered(1, output, 1)
    requests.committed([1], [13])
    requests.add_logprobs(1, TokenLogprobs(logprob=-3))
    (piece,) = requests.next_fold().values()
    assert list(piece.token_ids) == [11, 12]
    assert [item.logprob for item in piece.logprobs] == [-1, -2]
    assert folded(requests) == {1: [13]}
    assert [item.logprob for item in requests.logprobs(1, 3)] == [0, -1, -2]


def test_of_what_a_stop_string_ended_under_an_earlier_leader_only_that_counts() -> None:
    requests, request = RequestBook(), accepted(5, n=2)
    ended = SequenceFinished(sequence_id=5, reason=FinishReason.FINISH_REASON_STOP, output_tokens=2)
    recovered = Recovered(
        entries=(request.entry,),
        unknown=(),
        tokens={5: FoldedTokens(token_ids=[10, 11, 12, 13]), 6: FoldedTokens(token_ids=[20])},
        folded_counts={5: 1, 6: 0},
        finished={5: ended},
        prompt_logprobs_from={},
        journal_seq=1,
        decided_ns=0,
        cursor="1-0",
        damaged={},
    )
    assert requests.resume(request, recovered) == (None, (20,))
    (output, _) = request.ended_before[5]
    assert list(output.token_ids) == [10, 11]


def test_ends_under_an_earlier_leader_are_among_the_others_in_the_order_of_choices() -> None:
    requests, request = RequestBook(), accepted(5, n=3)
    ended = SequenceFinished(sequence_id=6, reason=FinishReason.FINISH_REASON_STOP, output_tokens=1)
    request.ended_before[6] = (FoldedTokens(token_ids=[10]), ended)
    requests.add(request)
    ends = [Finished(sequence_id=one, reason=Reason.LENGTH, num_output_tokens=2) for one in (5, 7)]
    over = RequestOver(
        id="default:r5",
        sequence_id=5,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        outputs=((1, 2), (), (3, 4)),
        endings=tuple(ends),
        queue_ns=1,
        prefill_ns=1,
        decode_ns=1,
        num_preemptions=0,
    )
    (whole,) = requests.whole([over])
    assert isinstance(whole, RequestOver)
    assert whole.outputs == ((1, 2), (10,), (3, 4))
    reasons = [ending.reason for ending in whole.endings]
    assert reasons == [Reason.LENGTH, Reason.STOP, Reason.LENGTH]


def recovered(sequence_id: int, output: Sequence[int]) -> Recovered:
    return Recovered(
        entries=(),
        tokens={sequence_id: FoldedTokens(token_ids=output)},
        folded_counts={sequence_id: 0},
        finished={},
        prompt_logprobs_from={},
        journal_seq=0,
        decided_ns=0,
        cursor="0-0",
        damaged={},
    )


def first_of(requests: RequestBook, *sequences: tuple[int, int]) -> int:
    """Whose prompt is answered by tokens at these positions, in tokens."""
    sequence_ids, positions = map(list, zip(*sequences, strict=True))
    count = len(positions)
    tokens = StepTokens(
        slots=tuple(SlotIndex(slot) for slot in range(count)),
        sequence_ids=sequence_ids,
        positions=positions,
        tokens=(9,) * count,
    )
    return requests.answered(tokens)


def test_a_prompt_is_answered_once_whoever_leads_and_whichever_choice_is_first() -> None:
    """Also of a request that came while nobody led: seen, its prompt was counted by nobody."""
    requests = RequestBook()
    requests.add(accepted(1, n=2, prompt=3))
    assert first_of(requests, (2, 0)) == 3
    assert first_of(requests, (1, 0), (2, 1)) == 0
    for first, output in ((10, []), (20, [7])):
        requests.resume(accepted(first, prompt=5), recovered(first, output))
        assert first_of(requests, (first, len(output))) == (0 if output else 5)


def test_nothing_is_due_where_all_was_folded() -> None:
    requests = RequestBook()
    requests.add(accepted())
    requests.recovered(1, FoldedTokens(token_ids=[10, 11]), 2)
    assert folded(requests) == {}


def test_what_has_ended_is_not_folded() -> None:
    requests = RequestBook()
    requests.add(accepted(1))
    requests.add(accepted(4, n=2))
    for sequence_id in (1, 4, 5):
        requests.committed([sequence_id], [sequence_id])
    assert folded(requests) == {}
    requests.remove(4)
    assert folded(requests) == {1: [1]}
    assert 4 not in requests


def test_a_choice_finds_its_sampling_by_its_own_sequence_id() -> None:
    requests = RequestBook()
    requests.add(accepted(1))
    requests.add(accepted(4, n=3))
    sampling = requests.sampling(6)
    assert (sampling.seed, sampling.choice) == (5, 2)
    assert requests.sampling(1).choice == 0


@pytest.mark.parametrize("sequence_id", [0, 3, 7])
def test_a_sequence_id_of_nobody_is_an_error(sequence_id: int) -> None:
    """Not a search that never ends."""
    requests = RequestBook()
    requests.add(accepted(4, n=3))
    with pytest.raises(KeyError):
        requests.traceparent(sequence_id)
    requests.remove(5)
    assert 4 not in requests


def test_of_what_is_over_the_spans_are_told_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_book, "OVER_MAX", 2)
    requests = RequestBook()
    for sequence_id in (1, 3, 5, 7):
        one = accepted(sequence_id, n=2)
        one.record.traceparent = "" if sequence_id == 3 else f"of {sequence_id}"
        requests.add(one)
        assert requests.traceparent_told(sequence_id) == one.record.traceparent
        requests.remove(sequence_id + 1)
    told = [requests.traceparent_told(sequence_id) for sequence_id in (1, 3, 5, 7)]
    assert told == ["", "", "of 5", "of 7"]
