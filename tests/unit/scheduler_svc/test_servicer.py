"""What a worker that announces itself is refused for, before anybody looks who leads."""

import pytest

from protos.kaiten.v1.common_pb2 import WorkerDescription
from protos.kaiten.v1.scheduler_service_pb2 import RegisterRequest
from scheduler_svc.servicer import Servicer
from scheduler_svc.settings import SchedulerSettings
from service_kit.errors import InvalidRequest, NotLeader


async def register(*, step_tokens: int, mixed_tokens: int = 0) -> None:
    worker = WorkerDescription(
        boot_id="b", slots_max=8, step_tokens_max=step_tokens, mixed_tokens_max=mixed_tokens
    )
    await Servicer(SchedulerSettings()).Register(RegisterRequest(address="a", worker=worker), None)


@pytest.mark.parametrize(
    ("step_tokens", "mixed_tokens", "field"),
    [
        (8, 0, "worker.step_tokens_max"),
        (20, 8, "worker.mixed_tokens_max"),
        (20, 21, "worker.mixed_tokens_max"),
    ],
)
async def test_every_step_needs_room_for_a_prompt_beside_the_rows(
    step_tokens: int, mixed_tokens: int, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await register(step_tokens=step_tokens, mixed_tokens=mixed_tokens)
    assert [each.field for each in refused.value.violations] == [field]


@pytest.mark.parametrize("mixed_tokens", [0, 9, 20])
async def test_budgets_with_room_are_taken(mixed_tokens: int) -> None:
    with pytest.raises(NotLeader):
        await register(step_tokens=20, mixed_tokens=mixed_tokens)
