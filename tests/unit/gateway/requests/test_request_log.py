"""What the log says of a request, and what it never says."""

import asyncio

import pytest
from structlog.testing import capture_logs

from gateway.observe.metrics import Visit
from gateway.observe.request_log import RequestLog
from gateway.tenants import Tenant
from gateway.values.generation_request import GenerationRequest, TextPrompt
from kaiten.v1.inference_service_pb2 import Done, Timings, Usage
from service_kit.errors import InvalidRequest

ASK = GenerationRequest(prompt=TextPrompt(text="a secret"), body_hash=b"", request_id="mine")
TENANT = Tenant(name="acme")


def visit(*, first: bool) -> Visit:
    visit = Visit(tenant="", is_chat=False)
    visit.prompt_tokens = 5
    visit.first_ns = visit.started_ns + 2_000_000 if first else 0
    return visit


def test_a_request_that_ended_has_its_phases() -> None:
    done = Done(
        usage=Usage(prompt_tokens=5, output_tokens=9, cached_tokens=4),
        timings=Timings(queue_us=1500, prefill_us=2500, decode_us=3500, preemptions=1),
    )
    with capture_logs() as lines:
        RequestLog(is_on=True).closed("acme:mine", visit(first=True), "stop", 9, done)
    (line,) = lines
    assert line.pop("total_ms") > 0
    assert line == {
        "event": "request.finished",
        "log_level": "info",
        "request_id": "mine",
        "tenant": "acme",
        "outcome": "stop",
        "prompt_tokens": 5,
        "output_tokens": 9,
        "cached_tokens": 4,
        "first_ms": 2.0,
        "queue_ms": 1.5,
        "prefill_ms": 2.5,
        "decode_ms": 3.5,
        "preemptions": 1,
    }


def test_of_a_client_that_left_it_says_what_is_known() -> None:
    with capture_logs() as lines:
        RequestLog(is_on=True).closed("acme:mine", visit(first=False), "left", 0, None)
    assert lines[0]["outcome"] == "left"
    assert not {"first_ms", "queue_ms"} & lines[0].keys()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("n", "must be 1"), "INVALID_ARGUMENT"),
        (asyncio.CancelledError(), "CANCELLED"),
    ],
)
def test_a_refusal_is_a_line_without_the_text(error: BaseException, code: str) -> None:
    request_log = RequestLog(is_on=True)
    with (
        capture_logs() as lines,
        pytest.raises(type(error)),
        request_log.opening(ASK, TENANT),
    ):
        raise error
    assert lines == [
        {
            "event": "request.refused",
            "log_level": "info",
            "request_id": "mine",
            "tenant": "acme",
            "code": code,
        }
    ]
    assert "secret" not in str(lines)


def test_switched_off_it_says_nothing() -> None:
    request_log = RequestLog(is_on=False)
    with capture_logs() as lines:
        request_log.closed("acme:mine", visit(first=True), "stop", 9, None)
        with pytest.raises(InvalidRequest), request_log.opening(ASK, TENANT):
            raise InvalidRequest("n", "must be 1")
    assert lines == []
