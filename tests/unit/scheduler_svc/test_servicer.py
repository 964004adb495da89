"""What a worker that announces itself is refused for, before anybody looks who leads."""

from pathlib import Path

import pytest

from kaiten.v1.common_pb2 import FEATURE_LOGPROBS, Capabilities, WorkerDescription
from kaiten.v1.scheduler_service_pb2 import RegisterRequest
from scheduler_svc import membership
from scheduler_svc.servicer import Servicer
from scheduler_svc.settings import SchedulerSettings
from service_kit.errors import InvalidRequest, NotLeader

SOUND = {
    "context_tokens_max": 64,
    "block_size": 16,
    "block_count": 4,
    "slots_max": 8,
    "step_tokens_max": 20,
    "mixed_tokens_max": 0,
    "vocab_size": 300,
    "capabilities": Capabilities(plan_version=1),
}


async def register(**changed: int | str | Capabilities) -> None:
    worker = WorkerDescription(**({"boot_id": "b"} | SOUND | changed))  # type: ignore[arg-type]
    await Servicer(SchedulerSettings()).Register(
        RegisterRequest(address="a:1", worker=worker), None
    )


@pytest.mark.parametrize("address", ["dns:///host:1", "host", "unix:a", "unix:/run/docker.sock"])
async def test_what_a_leader_would_not_dial_is_refused(address: str) -> None:
    """A worker says where it is, and the leader opens a connection to there."""
    worker = WorkerDescription(**({"boot_id": "b"} | SOUND))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"address: must be (host:port|unix:/)"):
        await Servicer(SchedulerSettings()).Register(
            RegisterRequest(address=address, worker=worker), None
        )


async def test_sockets_are_dialled_by_who_listens_on_one() -> None:
    worker = WorkerDescription(**({"boot_id": "b"} | SOUND))  # type: ignore[arg-type]
    servicer = Servicer(SchedulerSettings(grpc_socket=Path("/run/scheduler.sock")))
    with pytest.raises(NotLeader):
        await servicer.Register(RegisterRequest(address="unix:/run/w.sock", worker=worker), None)


@pytest.mark.parametrize("field", ["block_size", "block_count", "slots_max", "vocab_size"])
async def test_a_worker_that_can_hold_nothing_is_refused(field: str) -> None:
    """The core takes these for granted: it would end, and the worker would only come again."""
    with pytest.raises(InvalidRequest, match=rf"^worker\.{field}: must be in \[1, \d+\], got 0$"):
        await register(**{field: 0})


@pytest.mark.parametrize("field", ["block_size", "block_count", "slots_max"])
async def test_a_worker_whose_books_would_fill_the_memory_is_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"worker\.{field}: must be in .* got 4294967295"):
        await register(**{"step_tokens_max": 2**32 - 1, field: 2**32 - 1})


@pytest.mark.parametrize("field", ["boot_id", "model", "fingerprint", "device", "kv_dtype"])
async def test_a_worker_with_a_megabyte_of_name_is_refused(field: str) -> None:
    """Every renewal of the lease would carry it to the store and to all gateways."""
    match = rf"worker\.{field}: must have at most 1024 characters, got 1048576"
    with pytest.raises(InvalidRequest, match=match):
        await register(**{field: "x" * (1 << 20)})


async def test_a_worker_with_more_layer_groups_than_layers_is_refused() -> None:
    worker = WorkerDescription(**({"boot_id": "b"} | SOUND))  # type: ignore[arg-type]
    for _ in range(65):
        worker.capabilities.layer_groups.add()
    request = RegisterRequest(address="a:1", worker=worker)
    with pytest.raises(InvalidRequest, match=r"layer_groups: must be at most 64, got 65"):
        await Servicer(SchedulerSettings()).Register(request, None)


async def test_a_context_without_room_for_an_answer_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"worker\.context_tokens_max: must be in \[2, "):
        await register(context_tokens_max=1)


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
        await register(step_tokens_max=step_tokens, mixed_tokens_max=mixed_tokens)
    assert [each.field for each in refused.value.violations] == [field]


@pytest.mark.parametrize("mixed_tokens", [0, 9, 20])
async def test_budgets_with_room_are_taken(mixed_tokens: int) -> None:
    with pytest.raises(NotLeader):
        await register(mixed_tokens_max=mixed_tokens)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (Capabilities(), r"plan_version: must be at least 1, got 0: this scheduler writes plans"),
        (Capabilities(plan_version=1, slot_tokens_max=257), "slot_tokens_max: must be at most 256"),
        (
            Capabilities(plan_version=1, slot_tokens_max=3),
            "must be more than 3 times slots_max",
        ),
        (
            Capabilities(plan_version=1, features=[FEATURE_LOGPROBS] * 65),
            "must have at most 64",
        ),
    ],
)
async def test_capabilities_that_cannot_be_planned_with_are_refused(
    told: Capabilities, match: str
) -> None:
    with pytest.raises(InvalidRequest, match=match):
        await register(capabilities=told)


async def test_a_worker_that_reads_later_plans_too_is_taken() -> None:
    with pytest.raises(NotLeader):
        await register(capabilities=Capabilities(plan_version=2, slot_tokens_max=2))


async def test_a_worker_of_an_older_plan_is_refused_once_the_leader_writes_a_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "PLAN_VERSION", 2)
    with pytest.raises(InvalidRequest, match="must be at least 2, got 1"):
        await register()
