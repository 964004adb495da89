"""A link to one worker: what its refusals say of leaders, and how long its steps may take."""

from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from kaiten.v1.common_pb2 import Leader, WorkerDescription
from kaiten.v1.worker_service_pb2 import Plan, StepTimings
from scheduler_svc.links import EPOCHS_AHEAD_MAX, WorkerLink
from scheduler_svc.wire import STEP_US_MAX

OURS = 1_795_000_000_000_000


class Owner:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def link_refused(self, link: WorkerLink, epoch: int) -> None:
        self.epochs.append(epoch)


def link_of(owner: Any) -> WorkerLink:
    leader, worker = Leader(epoch=OURS, nonce=1), WorkerDescription(boot_id="w")
    return WorkerLink(address="127.0.0.1:1", worker=worker, leader=leader, owner=owner)


def refusal(epoch: str) -> grpc.aio.AioRpcError:
    told = AnyMessage()
    told.Pack(ErrorInfo(reason="stale_leader", metadata={"epoch": epoch}))
    trailing = grpc.aio.Metadata(
        ("grpc-status-details-bin", Status(details=[told]).SerializeToString())
    )
    code = grpc.StatusCode.FAILED_PRECONDITION
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing)


@pytest.mark.parametrize(
    ("epoch", "heard"),
    [
        (str(OURS), [OURS]),
        (str(OURS + 7), [OURS + 7]),
        (str(OURS - 1), []),
        (str(OURS + EPOCHS_AHEAD_MAX), []),
        ("9" * 8000, []),
        ("-1", []),
        ("nan", []),
        ("", []),
    ],
)
def test_an_epoch_that_a_worker_has_seen(epoch: str, heard: list[int]) -> None:
    owner = Owner()
    link_of(owner)._look_for_epoch(refusal(epoch))
    assert owner.epochs == heard


def test_how_long_a_step_may_take_follows_from_the_longest_of_late() -> None:
    link = link_of(Owner())
    link.waited_ns = 5
    link.answered(StepTimings(forward_us=600_000, sample_us=100_000))
    assert (link.waited_ns, link.step_ns_max) == (0, 8 * 700_000_000)
    for _ in range(400):
        link.answered(StepTimings(forward_us=2_000))
    assert link.step_ns_max == 1_000_000_000, "never less than what a busy machine may lose"


def test_the_longest_step_that_is_believed_fits_a_plan() -> None:
    link = link_of(Owner())
    for _ in range(9):
        link.answered(StepTimings(forward_us=STEP_US_MAX, sample_us=STEP_US_MAX, tokens_computed=7))
    assert Plan(expected_step_us=link.expected_step_us(7)).expected_step_us == 2 * STEP_US_MAX
