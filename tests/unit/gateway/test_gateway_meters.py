"""What a gateway counts, by tenant."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.observe.metrics import OTHERS, TENANTS_TOLD_MAX, WATCHED_CODES, Meters, outcome_of
from gateway.observe.request_log import RequestLog
from gateway.observe.tracing import Tracing, _name
from gateway.tenants import TENANT_NAME, Tenant
from gateway.values.generation_request import GenerationRequest, TextPrompt
from kaiten.v1.common_pb2 import FinishReason
from service_kit.errors import (
    DeadlineExceeded,
    Failed,
    InvalidRequest,
    KaitenError,
    Overloaded,
    Unavailable,
)
from service_kit.metrics import NO_METER
from tests.support.kept_spans import KeptSpans


def test_so_many_tenants_are_told_apart_and_the_rest_together() -> None:
    meters = Meters(NO_METER, model="m", with_tenants=True)
    ask = GenerationRequest(prompt=TextPrompt(text="x"), body_hash=b"")
    names = [f"t{number}" for number in range(TENANTS_TOLD_MAX + 3)]
    for name in [*names, names[0]]:
        with meters.opening(ask, Tenant(name=name)):
            pass
    told = {name: count for (_, name), count in meters._accepted.items()}
    assert told == {"t0": 2, **dict.fromkeys(names[1:TENANTS_TOLD_MAX], 1), OTHERS: 3}
    assert not TENANT_NAME.fullmatch(OTHERS)


def test_what_alerts_ask_for_begins_at_0_for_each_tenant() -> None:
    """A series whose first value is 1 is no increase."""
    meters = Meters(NO_METER, model="m", with_tenants=True)
    ask = GenerationRequest(prompt=TextPrompt(text="x"), body_hash=b"")
    with meters.opening(ask, Tenant(name="t")):
        pass
    assert {code: meters._refused.get((code, "t")) for code in WATCHED_CODES} == dict.fromkeys(
        WATCHED_CODES, 0
    )


@pytest.mark.parametrize("awaits_workers", [False, True])
def test_a_line_of_a_batch_that_is_put_off_was_not_refused(*, awaits_workers: bool) -> None:
    """Nobody was, and an alert would be false; what is wrong with a line is told all the same."""
    meters, request_log, spans = Meters(NO_METER, model="m"), RequestLog(is_on=True), KeptSpans()
    tracing, tenant = Tracing(spans.sink(), model="m"), Tenant(name="t")
    ask = GenerationRequest(
        prompt=TextPrompt(text="x"), body_hash=b"", awaits_workers=awaits_workers
    )
    errors = Overloaded("full", 1.0), Unavailable("away"), InvalidRequest("n", "must be 1")
    with capture_logs() as lines:
        for error in errors:
            with (
                pytest.raises(type(error)),
                meters.opening(ask, tenant),
                tracing.opening(ask),
                request_log.opening(ask, tenant),
            ):
                raise error
    count = 0 if awaits_workers else 1
    told = {code: count for (code, _), count in meters._refused.items()}
    assert told == {
        "INTERNAL": 0,
        "RESOURCE_EXHAUSTED": count,
        "UNAVAILABLE": count,
        "INVALID_ARGUMENT": 1,
    }
    codes = [code for code, count in told.items() if count]
    assert sorted(line["code"] for line in lines) == sorted(codes)
    refused = [str(span.attributes["error.type"]) for span in spans.get_finished_spans()]
    assert sorted(refused) == sorted(codes)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("prompt", "is too long"), "cancelled"),
        (Failed("a row failed"), "cancelled"),
        (Unavailable("this gateway is shutting down"), "moved"),
        (DeadlineExceeded("decode"), "deadline_exceeded"),
    ],
)
def test_what_ends_for_another_prompt_of_its_body_has_not_moved(
    error: KaitenError, outcome: str
) -> None:
    assert outcome_of([], error, goes_on=False) == outcome


def test_an_end_that_only_a_later_version_knows_is_counted_as_an_error() -> None:
    later: Any = 99
    assert outcome_of([later], None, goes_on=False) == "error"
    assert outcome_of([later, FinishReason.FINISH_REASON_STOP], None, goes_on=False) == "stop"
    assert (_name(later), _name(FinishReason.FINISH_REASON_STOP)) == ("unknown", "stop")
