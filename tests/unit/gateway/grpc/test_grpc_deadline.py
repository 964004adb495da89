"""A call's deadline, less what it takes to say where the time went."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.grpc.inference import _generation_request as _ask
from kaiten.v1.inference_service_pb2 import GenerateRequest


def context(left_s: float | None) -> Any:
    return cast(
        Any,
        SimpleNamespace(time_remaining=lambda: left_s, invocation_metadata=lambda: ()),
    )


@pytest.mark.parametrize(
    ("left_s", "timeout_s", "grace_s"),
    [(1.0, 0.9, 0.05), (2.0, 1.8, 0.1), (60.0, 59.8, 0.1), (-1.0, 0.0, -0.05)],
)
def test_there_is_time_for_a_farewell(left_s: float, timeout_s: float, grace_s: float) -> None:
    ask = _ask(GenerateRequest(text="x"), context(left_s))
    assert ask.timeout_s == pytest.approx(timeout_s)
    assert ask.grace_s == pytest.approx(grace_s)


def test_without_a_deadline_the_call_names_none() -> None:
    assert _ask(GenerateRequest(text="x"), context(None)).timeout_s is None
