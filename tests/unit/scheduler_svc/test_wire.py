"""Protos to core values and back: nothing is lost, nothing is invented, and lies are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given

from kaiten.v1 import common_pb2, worker_service_pb2
from kaiten.v1.common_pb2 import (
    FinishReason,
    PromptLogprobs,
    TokenBias,
    TokenLogprobs,
    TokenSequence,
    WorkerDescription,
)
from kaiten.v1.worker_service_pb2 import RowLogprobs, RowSampling
from scheduler_svc import wire
from scheduler_svc.core.outcome import Finished
from scheduler_svc.core.types import Feature, Reason, ResultRejected, StepResult
from tests.support.wire_draws import steps


def step_to_proto(step: StepResult) -> worker_service_pb2.StepResult:
    """As a worker writes it."""
    return worker_service_pb2.StepResult(
        boot_id=step.worker_id,
        plan_id=step.plan_id,
        step=step.step,
        slots=step.slots,
        token_ids=step.tokens,
        token_counts=step.token_counts,
        finished=[
            worker_service_pb2.RowFinished(slot=slot, reason=wire.REASON_TO_PROTO[reason])
            for slot, reason in step.finished.items()
        ],
        errors=[
            worker_service_pb2.RowError(
                slot=slot, message=text, is_unsatisfiable=why is Reason.UNSATISFIABLE
            )
            for slot, (why, text) in step.errors.items()
        ],
        prompt_logprobs=[
            worker_service_pb2.RowPromptLogprobs(slot=slot, logprobs=run_of(positions))
            for slot, positions in step.prompt_logprobs.items()
        ],
        is_last=step.is_last,
    )


def run_of(positions: range) -> PromptLogprobs:
    """As the journal keeps it: counted."""
    return PromptLogprobs(position=positions.start, token_count=len(positions))


# Steps


@given(step=steps())
def test_a_step_is_read_as_it_was_written(step: StepResult) -> None:
    assert wire.step_from_proto(step.worker_id, step_to_proto(step)) == step


@pytest.mark.parametrize("reason", Reason)
def test_an_end_is_read_as_it_was_written(reason: Reason) -> None:
    ended = Finished(sequence_id=7, reason=reason, num_output_tokens=3, error="why")
    assert wire.finished_from_proto(wire.finished_to_proto(ended)) == ended


def test_a_row_is_explained_once() -> None:
    row = worker_service_pb2.RowPromptLogprobs(slot=3, logprobs=run_of(range(1, 4)))
    message = worker_service_pb2.StepResult(prompt_logprobs=[row, row])
    with pytest.raises(ResultRejected, match="log-probabilities twice"):
        wire.step_from_proto("w", message)


NAN, INF = float("nan"), float("inf")


def told(slot: int = 3, own: float = -1.0, **tops: list[Any]) -> RowLogprobs:
    """Of a row that asked for one token beside its own."""
    beside: dict[str, Any] = {"top_token_ids": [5], "top_logprobs": [-1.0], **tops}
    return RowLogprobs(slot=slot, logprobs=TokenLogprobs(logprob=own, **beside))


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([told()], ""),
        ([told(own=1e-6)], ""),
        ([told(top_logprobs=[-INF])], ""),
        # Nobody is there any more who would be told.
        ([told(), told(slot=9, own=NAN)], ""),
        ([], r"of slots \[\], expected of \[3\]"),
        ([told(), told()], r"of slots \[3, 3\], expected"),
        ([told(), told(slot=4)], r"of slots \[3, 4\], expected of \[3\]"),
        ([told(), told(slot=6)], r"of slots \[3, 6\], expected of \[3\]"),
        ([told(slot=4)], "expected"),
        ([told(own=NAN)], "nan is no log-probability"),
        ([told(own=INF)], "inf is no log-probability"),
        ([told(own=-INF)], "-inf is no log-probability"),
        ([told(own=3e38)], "is no log-probability"),
        ([told(top_logprobs=[INF])], "above 1"),
        ([told(top_logprobs=[])], "1 likeliest tokens with 0"),
        ([told(top_token_ids=[])], "0 likeliest tokens with 1"),
        ([told(top_token_ids=[5, 6], top_logprobs=[-1, -2])], "expected 1 at each of 1"),
        ([told(top_token_ids=[300])], r"not in \[0, 300\)"),
        ([told(top_token_ids=[2**32 - 1])], "not in"),
    ],
)
def test_each_row_has_the_log_probabilities_it_asked_for(
    rows: list[RowLogprobs], match: str
) -> None:
    """Slot 3 asked for one beside its own and slot 4 for none; 6 did not sample, 9 has left."""
    asked = {slot: RowSampling(logprobs=count) for slot, count in ((3, 1), (4, -1), (6, 1))}
    message = worker_service_pb2.StepResult(slots=[3, 4, 9], token_ids=[1, 1, 1], logprobs=rows)
    judge(lambda: wire.check_logprobs(message, asked, 300), match)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([told(), told(own=-2.0)], ""),
        ([told()], r"of slots \[3\], expected of \[3, 3\]"),
        ([told(), told(), told()], r"of slots \[3, 3, 3\], expected of \[3, 3\]"),
        ([told(), told(own=NAN)], "nan is no log-probability"),
    ],
)
def test_each_token_of_a_row_has_its_log_probabilities(rows: list[RowLogprobs], match: str) -> None:
    asked = {slot: RowSampling(logprobs=count) for slot, count in ((3, 1), (4, -1))}
    message = worker_service_pb2.StepResult(
        slots=[3, 4], token_ids=[1, 1, 1], token_counts=[2, 1], logprobs=rows
    )
    judge(lambda: wire.check_logprobs(message, asked, 300), match)


@pytest.mark.parametrize(
    ("sampling", "needs"),
    [
        (RowSampling(logprobs=-1), []),
        (RowSampling(logprobs=-1, repetition_penalty=1, top_k=3, stop_token_ids=[1]), []),
        (RowSampling(logprobs=0), [Feature.LOGPROBS]),
        (RowSampling(logprobs=-1, prompt_logprobs=0), [Feature.PROMPT_LOGPROBS]),
        (RowSampling(logprobs=-1, repetition_penalty=1.5), [Feature.LOGITS_PROCESSORS]),
        (RowSampling(logprobs=-1, presence_penalty=-1), [Feature.LOGITS_PROCESSORS]),
        (RowSampling(logprobs=-1, frequency_penalty=1), [Feature.LOGITS_PROCESSORS]),
        (RowSampling(logprobs=-1, logit_bias=[TokenBias()]), [Feature.LOGITS_PROCESSORS]),
        (RowSampling(logprobs=-1, allowed_token_ids=[0]), [Feature.LOGITS_PROCESSORS]),
        (
            RowSampling(logprobs=2, bad_words=[TokenSequence()]),
            [Feature.LOGPROBS, Feature.LOGITS_PROCESSORS],
        ),
    ],
)
def test_what_a_request_needs_follows_from_its_sampling(
    sampling: RowSampling, needs: list[Feature]
) -> None:
    assert wire.needs_of(sampling) == frozenset(needs)


def test_an_older_worker_can_do_nothing_else_and_a_later_feature_is_nothing_to_us() -> None:
    worker = WorkerDescription(block_size=1, block_count=1, slots_max=1, step_tokens_max=2)
    plain = wire.spec_from_proto(worker)
    assert (plain.features, plain.slot_tokens_max) == (frozenset(), 1)
    worker.capabilities.features.extend([common_pb2.FEATURE_LOGPROBS, 77])  # type: ignore[list-item]
    assert wire.spec_from_proto(worker).features == {Feature.LOGPROBS}


@pytest.mark.parametrize(
    ("count", "own", "tops", "beside", "match"),
    [
        (2, [-1, NAN], [5, 5], [-1, NAN], ""),
        (2, [-1], [5, 5], [-1, -1], "1 values for 2 prompt positions"),
        (2, [-1, INF], [5, 5], [-1, -1], "or one above 1"),
        (2, [-1, -1], [5, 5], [-1], "2 likeliest tokens with 1"),
        (2, [-1, -1], [], [], "expected 1 at each of 2 positions"),
        (2, [-1, -1], [5] * 4, [-1] * 4, "expected 1 at each of 2 positions"),
        (2, [-1, -1], [5, 300], [-1, -1], "not in"),
        (2, [-1, -1], [5, 5], [-1, INF], "above 1"),
        (0, [-1], [], [], "1 values for 0"),
        (2**32 - 1, [], [], [], "expected 1 at each of 4294967295"),
    ],
)
def test_explained_positions_come_with_their_values(
    count: int, own: list[float], tops: list[int], beside: list[float], match: str
) -> None:
    run = PromptLogprobs(
        position=1, token_count=count, logprobs=own, top_token_ids=tops, top_logprobs=beside
    )
    row = worker_service_pb2.RowPromptLogprobs(slot=3, logprobs=run)
    message = worker_service_pb2.StepResult(prompt_logprobs=[row])
    asked = {3: RowSampling(logprobs=-1, prompt_logprobs=1)}
    judge(lambda: wire.check_logprobs(message, asked, 300), match)
    wire.check_logprobs(message, {}, 300)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("wait_us", 86_400_000_000),
        ("forward_us", 86_400_000_000),
        ("sample_us", 86_400_000_000),
        ("tokens_computed", 64),
        ("rows", 8),
    ],
)
def test_a_step_computes_and_takes_what_a_step_can(field: str, most: int) -> None:
    message = worker_service_pb2.StepResult()
    for value, match in ((most, ""), (most + 1, f"timings.{field}: must be at most {most}, got")):
        setattr(message.timings, field, value)
        judge(partial(wire.check_values, message, rows_max=8, tokens_max=64), match)


def test_an_error_is_told_in_a_few_words() -> None:
    for count, match in ((4096, ""), (4097, "slot 2: its error has 4097 characters, 4096")):
        row = worker_service_pb2.RowError(slot=2, message="x" * count)
        message = worker_service_pb2.StepResult(errors=[row])
        judge(partial(wire.check_values, message, rows_max=8, tokens_max=64), match)


def judge(check: Callable[[], None], match: str) -> None:
    """It passes, or is refused with these words."""
    if match:
        with pytest.raises(ResultRejected, match=match):
            check()
    else:
        check()


def test_the_worker_of_a_step_is_who_we_dialled_whatever_it_says() -> None:
    message = worker_service_pb2.StepResult(boot_id="liar")
    assert wire.step_from_proto("w", message).worker_id == "w"


@pytest.mark.parametrize("reason", sorted({*FinishReason.values(), 77} - {*wire.ROW_REASONS}))
def test_a_row_ends_for_no_other_reason_than_stop_and_length(reason: int) -> None:
    message = worker_service_pb2.StepResult(slots=[4], token_ids=[1])
    message.finished.add(slot=4, reason=reason)
    with pytest.raises(ResultRejected, match=f"slot 4: reason {reason} is not STOP or LENGTH"):
        wire.step_from_proto("w", message)


def test_a_row_ends_or_fails_once() -> None:
    message = worker_service_pb2.StepResult(slots=[4], token_ids=[1])
    for _ in range(2):
        message.finished.add(slot=4, reason=common_pb2.FINISH_REASON_STOP)
    with pytest.raises(ResultRejected, match="a row ended or failed twice"):
        wire.step_from_proto("w", message)
    message.ClearField("finished")
    for text in ("one", "another"):
        message.errors.add(slot=4, message=text)
    with pytest.raises(ResultRejected, match="a row ended or failed twice"):
        wire.step_from_proto("w", message)


# Plans


# Requests


# Workers


# Endings
