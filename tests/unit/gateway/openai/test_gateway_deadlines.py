"""Who cannot make its deadline, or finds no worker, is told why, at both doors."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.grpc.convert import finished_to_proto
from gateway.grpc.inference import raise_if_late
from gateway.http import errors
from gateway.openai.parts import reason_of
from gateway.requests.stream import Finished
from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.ledger_pb2 import SequenceFinished
from service_kit.errors import DeadlineExceeded, Failed, Unsatisfiable, Unserved

LATE = FinishReason.FINISH_REASON_DEADLINE_EXCEEDED
WHY = "the prompt of 1000 tokens takes 50 ms or more"


def late(error: str, reason: FinishReason = LATE) -> Finished:
    return Finished(choice=0, reason=reason, output_tokens=0, error=error)


def ended(*ends: Finished) -> Any:
    return SimpleNamespace(choices=[SimpleNamespace(end=end) for end in ends], done_message=None)


@pytest.mark.parametrize(("error", "said"), [(WHY, f"'queue': {WHY}"), ("", "'queue'$")])
def test_over_grpc(error: str, said: str) -> None:
    with pytest.raises(DeadlineExceeded, match=said):
        raise_if_late(ended(late(error)))
    raise_if_late(ended(late("", FinishReason.FINISH_REASON_STOP)))


def test_over_http() -> None:
    with pytest.raises(DeadlineExceeded, match=f"'queue or prefill': {WHY}"):
        reason_of(late(WHY))


def test_what_no_worker_could_do_may_be_sent_again_and_what_failed_may_not() -> None:
    why = "the request needs structured_outputs, and no worker can do all of it"
    unserved = late(why, FinishReason.FINISH_REASON_ERROR)._replace(is_retryable=True)
    with pytest.raises(Unserved, match=why):
        reason_of(unserved)
    assert finished_to_proto(unserved).is_retryable
    with pytest.raises(Failed, match=why):
        reason_of(unserved._replace(is_retryable=False))


def test_wishes_that_leave_no_token_are_the_requests_own_fault() -> None:
    why = "allowed_token_ids, bad_words, min_tokens and structured_outputs leave no token to sample"
    reason = FinishReason.FINISH_REASON_ERROR
    ended = SequenceFinished(reason=reason, output_tokens=3, error=why, is_unsatisfiable=True)
    choice = Finished.of(0, ended)
    with pytest.raises(Unsatisfiable, match=f"cannot go on as it was asked for: {why}") as caught:
        reason_of(choice)
    row = errors.row_of(caught.value)
    assert (row.status, row.type, row.code) == (400, "invalid_request_error", "unsatisfiable")
    assert not row.is_retryable
    told = finished_to_proto(choice)
    assert (told.is_unsatisfiable, told.error) == (True, why)
