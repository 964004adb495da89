"""docker-compose.yml as local processes: it starts, serves, scales, survives and ends clean.

One project for the whole module, used in the order written.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError

from kaiten.cli.keygen import mint
from kaiten.client import Client
from kaiten.v1.common_pb2 import Capabilities, WorkerDescription
from kaiten.v1.scheduler_service_pb2 import (
    GetStateRequest,
    GetStateResponse,
    RegisterRequest,
)
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from tests.support.compose import PASSWORD, START_S, Container, Rehearsal

# As an operator would in .env; small, because many tests share the machine.
SHELL = {
    "KAITEN_MODEL_NAME": "mini",
    "KAITEN_WORKER_THREADS": "1",
    "KAITEN_WORKER_KV_MEMORY_MB": "64",
    "KAITEN_GATEWAY_API_KEYS_FILE": "/keys/keys.toml",
}
KEY, ENTRY = mint("acme")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    keys = tmp_path_factory.mktemp("keys")
    (keys / "keys.toml").write_text(ENTRY)
    shell = SHELL | {"KAITEN_API_KEYS": str(keys)}
    with Rehearsal(tmp_path_factory.mktemp("project"), shell) as rehearsal:
        rehearsal.up({"scheduler": 2})
        yield rehearsal


def ask(project: Rehearsal, key: str = KEY) -> httpx.Response:
    """One greedy request over HTTP."""
    return httpx.post(
        f"http://{project.containers('gateway')[0].address(8000)}/v1/completions",
        json={"model": "mini", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0},
        headers={"authorization": f"Bearer {key}"},
        timeout=START_S,
    )


def say(project: Rehearsal) -> str:
    """Its text."""
    answer = ask(project)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def client_of(project: Rehearsal) -> Client:
    return Client(project.containers("gateway")[0].address(50051), api_key=KEY)


def state_of(scheduler: Container) -> GetStateResponse:
    with grpc.insecure_channel(scheduler.address(50052)) as channel:
        stub = SchedulerServiceStub(channel)
        state: GetStateResponse = stub.GetState(GetStateRequest(), timeout=START_S)
    return state


def leader_of(project: Rehearsal) -> Container:
    def leads(scheduler: Container) -> bool:
        return scheduler.is_alive and state_of(scheduler).is_leader

    found: list[Container] = []

    def is_found() -> bool:
        found.extend(filter(leads, project.containers("scheduler")))
        return bool(found)

    project.wait(is_found, "leader")
    return found[0]


def refusal_of(standby: Container) -> str:
    """What it tells a worker that wants to register."""
    worker = WorkerDescription(
        boot_id="b",
        block_size=1,
        block_count=1,
        slots_max=1,
        step_tokens_max=2,
        context_tokens_max=2,
        vocab_size=1,
        capabilities=Capabilities(plan_version=1),
    )
    with grpc.insecure_channel(standby.address(50052)) as channel:
        try:
            SchedulerServiceStub(channel).Register(
                RegisterRequest(address="127.0.0.1:1", worker=worker), timeout=START_S
            )
        except grpc.RpcError as error:
            return str(error.details())
    raise AssertionError("a standby took a worker")


def test_it_serves_http_and_grpc(project: Rehearsal) -> None:
    text = say(project)
    with client_of(project) as client:
        assert client.models() == ("mini",)
        completion = client.complete("Once upon a time", max_tokens=12, temperature=0.0)
    assert text
    assert completion.choices[0].text == text


def test_it_lets_in_who_has_a_key(project: Rehearsal) -> None:
    """A key that is appended counts without a restart, also when the file is replaced whole."""
    assert ask(project, "kt-other").status_code == 401
    late, entry = mint("late")
    keys = Path(project.shell["KAITEN_API_KEYS"])
    (keys / "new").write_text(ENTRY + entry)
    os.replace(keys / "new", keys / "keys.toml")
    project.wait(lambda: ask(project, late).status_code == 200, "a second key")


def test_the_store_asks_for_a_password_that_nobody_can_read(project: Rehearsal) -> None:
    (store,) = project.containers("valkey")
    port = int(store.address(6379).rpartition(":")[2])
    with pytest.raises(AuthenticationError), Redis(port=port) as stranger:
        stranger.ping()
    with Redis(port=port, password=PASSWORD) as client:
        assert client.ping()
    processes = psutil.Process().children(recursive=True)
    lines = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in processes]
    assert any(b"scheduler_svc" in line for line in lines)
    assert any(b"valkey-server" in line for line in lines)
    assert not any(PASSWORD.encode() in line for line in lines)
    for container in project.all():
        assert PASSWORD not in container.log()


def test_a_full_store_refuses_what_is_new_and_ends_what_runs(project: Rehearsal) -> None:
    """As deploy/valkey.conf says."""
    (store,) = project.containers("valkey")
    host, _, port = store.address(6379).rpartition(":")
    prompt = "Once upon a time"
    with client_of(project) as client, Redis(host, int(port), password=PASSWORD) as admin:
        undisturbed = client.complete(prompt, max_tokens=150, ignore_eos=True, temperature=0.0)
        bound = admin.config_get("maxmemory")["maxmemory"]
        assert int(bound) > 0
        running = client.generate(prompt, max_tokens=150, ignore_eos=True, temperature=0.0)
        first = next(running).text
        admin.config_set("maxmemory", 1)
        refused = ask(project)
        assert refused.status_code == 503
        assert "out of memory" in refused.text
        assert first + "".join(delta.text for delta in running) == undisturbed.choices[0].text
        assert running.result.choices[0].output_tokens == 150
        admin.config_set("maxmemory", bound)
    assert say(project)


def test_a_second_worker_needs_no_configuration(project: Rehearsal) -> None:
    project.up({"worker": 2, "scheduler": 2})
    first, second = (worker.address(50053) for worker in project.containers("worker"))

    def connected() -> set[str]:
        state = state_of(leader_of(project))
        return {worker.address for worker in state.workers if worker.is_connected}

    project.wait(lambda: connected() == {first, second}, "two workers")
    assert say(project)


def test_a_second_scheduler_takes_over(project: Rehearsal) -> None:
    """The dead one is not started again until its standby has served."""
    text = say(project)
    dead = leader_of(project)
    (standby,) = set(project.containers("scheduler")) - {dead}
    assert dead.address(50052) in refusal_of(standby)
    dead.kill()
    with client_of(project) as client:
        completion = client.complete("Once upon a time", max_tokens=12, temperature=0.0)
    assert completion.choices[0].text == text
    assert not dead.is_alive
    project.up()


@pytest.mark.parametrize("service", ["gateway", "worker", "scheduler", "valkey"])
def test_any_service_may_die_and_come_back(project: Rehearsal, service: str) -> None:
    """Every replica of it at once, and `restart: unless-stopped` does the rest."""
    text = say(project)
    for container in project.containers(service):
        container.kill()
    project.up()

    def answers() -> bool:
        # Until whoever lives has noticed and found the others again, it says "later".
        status = ask(project).status_code
        assert status in (200, 503)
        return status == 200

    project.wait(answers, "answer")
    project.healthy("gateway")
    assert say(project) == text


def test_it_ends_clean_in_the_time_given(project: Rehearsal) -> None:
    codes = project.down()
    assert set(codes.values()) == {0}, codes
    for container in project.all():
        assert '"level": "critical"' not in container.log(), container.log()[-3000:]
