"""What a worker's log tells of schedulers with whom it cannot register."""

from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from structlog.testing import capture_logs

from gpu_worker.service.registration import Registrar


def refusal(code: StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details=code.name)


def test_schedulers_that_fail_in_turn_are_each_told_once_until_it_changes() -> None:
    nobody: Any = None
    registrar = Registrar(("a:1", "b:1"), address_for=nobody, description=nobody)
    away, follows = StatusCode.UNAVAILABLE, StatusCode.FAILED_PRECONDITION
    with capture_logs() as lines:
        for turn in range(1000):
            registrar._note("a:1", refusal(away), 2 * turn + 1)
            registrar._note("b:1", refusal(follows), 2 * turn + 2)
        registrar._note("a:1", refusal(follows), 2001)
        # It was registered since.
        registrar._note("b:1", refusal(follows), 1)
    assert [(line["scheduler"], line["code"]) for line in lines] == [
        ("a:1", "UNAVAILABLE"),
        ("b:1", "FAILED_PRECONDITION"),
        ("a:1", "FAILED_PRECONDITION"),
        ("b:1", "FAILED_PRECONDITION"),
    ]
