"""docker-compose.yml as local processes: it starts, serves, scales, survives and ends clean.

One project for the whole module, used in the order written.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from kaiten.cli.keygen import mint
from kaiten.client import Client
from kaiten.v1.common_pb2 import Capabilities, WorkerDescription
from kaiten.v1.scheduler_service_pb2 import (
    GetStateRequest,
    GetStateResponse,
    RegisterRequest,
)
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.watch_pb2 import WatchRequest
from kaiten.v1.worker_service_pb2 import ExecuteRequest
from kaiten.v1.worker_service_pb2_grpc import WorkerServiceStub
from service_kit.peers import Credential, Peers
from tests.support.compose import PASSWORD, START_S, Container, Rehearsal
from tests.support.processes import command_lines

# As an operator would in .env; small, because many tests share the machine.
ADMIN = "of0the0operator"
SHELL = {
    "KAITEN_STORE_ADMIN_PASSWORD": ADMIN,
    "KAITEN_MODEL_NAME": "mini",
    "KAITEN_WORKER_THREADS": "1",
    "KAITEN_WORKER_KV_MEMORY_MB": "64",
    "KAITEN_GATEWAY_API_KEYS_FILE": "/keys/keys.toml",
}
KEY, ENTRY = mint("acme")
ENTRY += "[tenants.acme]\noperator = true\n"

pytestmark = pytest.mark.timeout(400)
IN_ORDER = "the project grows, loses parts, and is ended"


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    keys = tmp_path_factory.mktemp("keys")
    (keys / "keys.toml").write_text(ENTRY)
    shell = SHELL | {"KAITEN_API_KEYS": str(keys)}
    with Rehearsal(tmp_path_factory.mktemp("project"), shell) as rehearsal:
        yield rehearsal


@pytest.fixture
def project(rehearsal: Rehearsal) -> Rehearsal:
    """All of it up, also after the test that ends it: a process that takes tests from another's
    queue may get earlier ones later.
    """
    ended = [each for each in rehearsal.all() if not each.is_alive]
    if ended or not rehearsal.all():
        for each in ended:
            # Forgotten: it has not crashed.
            each.kill()
        rehearsal.up({"scheduler": 2})
    return rehearsal


def ask(project: Rehearsal, key: str = KEY) -> httpx.Response:
    """One greedy request over HTTP."""
    return httpx.post(
        f"http://{project.containers('gateway')[0].address(8000)}/v1/completions",
        json={"model": "mini", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0},
        headers={"authorization": f"Bearer {key}"},
        timeout=START_S,
    )


def say(project: Rehearsal) -> str:
    """Its text. Until whoever lives has noticed a death and found the others again, a gateway says
    "later", also between two answers: a new leader tells of itself before workers come to it.
    """
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        answers.append(ask(project))
        assert answers[-1].status_code in (200, 503), answers[-1].text
        return answers[-1].status_code == 200

    project.wait(is_answered, "answer")
    return str(answers[-1].json()["choices"][0]["text"])


def client_of(project: Rehearsal) -> Client:
    return Client(project.containers("gateway")[0].address(50051), api_key=KEY)


def state_of(project: Rehearsal, scheduler: Container) -> GetStateResponse:
    with grpc.insecure_channel(scheduler.address(50052)) as channel:
        stub = SchedulerServiceStub(channel)
        metadata = peers_of(project).proof().metadata
        state: GetStateResponse = stub.GetState(
            GetStateRequest(), timeout=START_S, metadata=metadata
        )
    return state


def peers_of(project: Rehearsal) -> Peers:
    """The parts of the project, by what the first of them made."""
    return Peers(Credential(project.folder / "volumes" / "peers" / "credential"))


def leader_of(project: Rehearsal) -> Container:
    def leads(scheduler: Container) -> bool:
        return scheduler.is_alive and state_of(project, scheduler).is_leader

    found: list[Container] = []

    def is_found() -> bool:
        found.extend(filter(leads, project.containers("scheduler")))
        return bool(found)

    project.wait(is_found, "leader")
    return found[0]


def refusal_of(standby: Container, peers: Peers) -> str:
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
                RegisterRequest(address="127.0.0.1:1", worker=worker),
                timeout=START_S,
                metadata=peers.proof().metadata,
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
    at_once = Retry(NoBackoff(), 0)
    for wrong in (None, PASSWORD):
        with (
            pytest.raises(AuthenticationError),
            Redis(port=port, password=wrong, retry=at_once) as stranger,
        ):
            stranger.ping()
    with Redis(port=port, username="kaiten", password=PASSWORD) as client:
        assert client.ping()
        with pytest.raises(NoPermissionError):
            client.flushall()
    lines = [" ".join(words) for words in command_lines()]
    assert any("scheduler_svc" in line for line in lines)
    assert any("valkey-server" in line for line in lines)
    assert not any(PASSWORD in line for line in lines)
    for container in project.all():
        assert PASSWORD not in container.log()


def test_parts_take_nobody_who_has_not_their_credential(project: Rehearsal) -> None:
    """On the inner network too, which scheduler and worker listen on for everybody."""
    (worker,) = project.containers("worker")
    assert "no proof" in refusal_of(project.containers("scheduler")[0], Peers())
    with grpc.insecure_channel(worker.address(50053)) as channel:
        call = WorkerServiceStub(channel).Execute(iter([ExecuteRequest()]), timeout=START_S)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    credential = project.folder / "volumes" / "peers" / "credential"
    assert credential.stat().st_mode & 0o077 == 0
    secret = credential.read_text().strip()
    with grpc.insecure_channel(project.containers("gateway")[0].address(50051)) as channel:
        authorization = (("authorization", f"Bearer {KEY}"),)
        watching = SchedulerServiceStub(channel).Watch(
            WatchRequest(interval_ms=1000), timeout=START_S, metadata=authorization
        )
        assert next(watching).is_snapshot, "a gateway has it"
        watching.cancel()
    assert any("leader.followed" in each.log() for each in project.containers("scheduler"))
    assert not [words for words in command_lines() if secret in " ".join(words)]
    for container in project.all():
        assert secret not in container.log()


def test_a_full_store_refuses_what_is_new_and_ends_what_runs(project: Rehearsal) -> None:
    """As deploy/valkey/valkey.conf says."""
    (store,) = project.containers("valkey")
    host, _, port = store.address(6379).rpartition(":")
    prompt = "Once upon a time"
    with client_of(project) as client, Redis(host, int(port), password=ADMIN) as admin:
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


def test_a_second_scheduler_takes_over(project: Rehearsal) -> None:
    """The dead one is not started again until its standby has served."""
    text = say(project)
    dead = leader_of(project)
    (standby,) = set(project.containers("scheduler")) - {dead}
    assert dead.address(50052) in refusal_of(standby, peers_of(project))
    dead.kill()
    with client_of(project) as client:
        completion = client.complete("Once upon a time", max_tokens=12, temperature=0.0)
    assert completion.choices[0].text == text
    assert not dead.is_alive
    project.up()


# Of a worker: the test after this one; that it comes back is asked in test_stack_faults.
@pytest.mark.parametrize("service", ["gateway", "scheduler", "valkey"])
def test_any_service_may_die_and_come_back(project: Rehearsal, service: str) -> None:
    """Every replica of it at once, and `restart: unless-stopped` does the rest."""
    text = say(project)
    for container in project.containers(service):
        container.kill()
    project.up()
    assert say(project) == text
    project.healthy("gateway")


def test_a_second_worker_needs_no_configuration(project: Rehearsal) -> None:
    """And then the first is not missed."""
    text = say(project)
    project.up({"worker": 2, "scheduler": 2})
    first, second = (worker.address(50053) for worker in project.containers("worker"))

    def connected() -> set[str]:
        state = state_of(project, leader_of(project))
        return {worker.address for worker in state.workers if worker.is_connected}

    project.wait(lambda: connected() == {first, second}, "two workers")
    project.containers("worker").pop(0).remove()
    assert say(project) == text


def test_it_ends_clean_in_the_time_given(project: Rehearsal) -> None:
    codes = project.down()
    assert set(codes.values()) == {0}, codes
    for container in project.all():
        assert '"level": "critical"' not in container.log(), container.log()[-3000:]
