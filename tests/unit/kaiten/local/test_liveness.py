"""What counts as hung, and how a supervisor asks its children through their ends and starts."""

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from kaiten.local.health import LIVE, Health
from kaiten.local.liveness import (
    BUSY_S,
    SILENT_S,
    STOPPED_S,
    Liveness,
    ProcessState,
    StartProgress,
    state_of,
)
from kaiten.local.private import unix_address
from tests.support.answers import until
from tests.support.relay import Relay

IDLE = ProcessState(cpu_s=7.0)
STOPPED = ProcessState(is_stopped=True, cpu_s=7.0)


def looked(
    liveness: Liveness, since_s: float, until_s: float, state: Callable[[float], ProcessState]
) -> str:
    """What the last look says, when there was one every second; none before says anything."""
    for now_s in (since_s + step for step in range(1, int(until_s - since_s))):
        assert liveness.silent(now_s, state(now_s)) == ""
    return liveness.silent(until_s, state(until_s))


def test_a_start_may_take_any_time_if_it_gets_on() -> None:
    start, log = StartProgress(0.0), ""
    for layer in range(9):
        log += f'{{"event": "worker.loading", "done": {layer}, "total": 9}}\n'
        assert start.idle_s(200.0 * layer, log) == 0
        assert start.idle_s(200.0 * layer + 199, log) == 199
    # To wait for another is to do nothing, however often it is said.
    for again in range(2):
        log += f'{{"event": "worker.unregistered", "reason": "nobody leads, {again}"}}\n'
        assert start.idle_s(2000.0 + again, log) == 400 + again


def idle(_now_s: float) -> ProcessState:
    return IDLE


def test_who_answers_lives_however_late() -> None:
    liveness = Liveness(0.0)
    for now_s in (3.0, 6.0, 9.0):
        assert liveness.silent(now_s - 0.1, IDLE) == ""
        liveness.answered(now_s)


def test_stopped_by_a_signal_it_is_not_waited_for_long() -> None:
    liveness = Liveness(10.0)
    assert liveness.silent(10.0 + STOPPED_S - 0.1, STOPPED) == ""
    assert liveness.silent(10.0 + STOPPED_S, STOPPED) == "stopped by a signal 2 s ago"


def test_stopped_and_continued_it_lives() -> None:
    liveness = Liveness(0.0)
    assert liveness.silent(STOPPED_S - 0.1, STOPPED) == ""
    assert liveness.silent(STOPPED_S, IDLE) == ""
    assert liveness.silent(STOPPED_S + 0.1, STOPPED) == ""


def test_without_an_answer_and_without_work_it_is_hung() -> None:
    assert looked(Liveness(0.0), 0.0, SILENT_S - 0.1, idle) == ""
    assert looked(Liveness(0.0), 0.0, SILENT_S, idle) == "hung: no answer for 5 s"


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_at_work_it_is_given_longer(where: str) -> None:
    """A step, a compilation, a machine that has other work; but no loop for ever."""

    def at(now_s: float) -> ProcessState:
        if where == "disk":
            return ProcessState(is_on_disk=True)
        return ProcessState(cpu_s=now_s * 0.1)

    assert looked(Liveness(0.0), 0.0, BUSY_S - 0.1, at) == ""
    assert looked(Liveness(0.0), 0.0, BUSY_S, at) == "hung: no answer for 60 s"


def test_who_was_put_aside_itself_begins_to_count_anew() -> None:
    """Ctrl-Z and fg: the minutes between are nobody's silence."""
    liveness = Liveness(0.0)
    back_s = 600.0
    assert liveness.silent(back_s, STOPPED) == ""
    assert looked(liveness, back_s, back_s + SILENT_S, idle) == "hung: no answer for 5 s"


def test_what_the_kernel_says_is_read_past_any_name(tmp_path: Path) -> None:
    fields = "T 1 1 1 0 -1 0 1 0 0 0 250 50 0 0 20"
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a) D (b)) {fields}")
    assert state_of(7, 100, tmp_path) == ProcessState(is_stopped=True, cpu_s=3.0)
    assert state_of(8, 100, tmp_path) is None


def test_of_this_process() -> None:
    state = state_of(os.getpid(), os.sysconf("SC_CLK_TCK"))
    assert state is not None
    assert not state.is_stopped
    assert state.cpu_s > 0


@asynccontextmanager
async def served(address: str) -> AsyncIterator[HealthServicer]:
    server = grpc.aio.server()
    health = HealthServicer()
    add_HealthServicer_to_server(health, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield health
    finally:
        await server.stop(0)


async def test_who_ends_and_is_started_again_is_found_by_the_same_asker(tmp_path: Path) -> None:
    address = unix_address(tmp_path / "a door")
    health = Health(address)
    assert not await health.is_serving()
    assert not await health.answers()
    for _ in range(2):
        async with served(address) as told:
            told.set("", HealthCheckResponse.NOT_SERVING)
            await until(health.answers, "it is found")
            assert not await health.is_serving()
            told.set("", HealthCheckResponse.SERVING)
            assert await health.is_serving()
            told.set(LIVE, HealthCheckResponse.NOT_SERVING)
            assert not await health.answers()
            told.set(LIVE, HealthCheckResponse.SERVING)
            assert await health.answers()
        assert not await health.answers()


async def test_who_takes_a_while_to_say_hello_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that is busy with other things."""
    monkeypatch.setattr("kaiten.local.health.PING_TIMEOUT_S", 60.0)
    address = unix_address(tmp_path / "door")
    async with served(address), Relay(address, delay_s=0.3) as relay:
        await until(Health(relay.address).answers, "it is reached")
        # Ten of a tenth of a second each would be given up.
        assert len(relay.connections) < 4


async def test_a_killed_ones_socket_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(path))
    assert path.exists()
    assert not await Health(unix_address(path)).answers()


async def test_who_listens_and_says_nothing_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kaiten.local.health.PING_TIMEOUT_S", 0.1)
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert not await Health(unix_address(path)).answers()
