"""A profile of a worker's steps: over the wire, of a process under load, and what may go wrong."""

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity

from gpu_worker import profile
from gpu_worker.service import step_profile
from gpu_worker.service.step_profile import STEPS_MAX, StepProfile
from kaiten.client import AsyncClient
from kaiten.local.private import unix_address
from kaiten.mini import CHECKPOINT
from kaiten.v1.worker_service_pb2 import ProfileRequest
from tests.fakes.mock_worker import MockDevice, token_function
from tests.support.answers import until
from tests.support.cluster import Cluster, is_answering
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.processes import GATEWAY, WORKER
from tests.support.worker_server import (
    LIMITS,
    WAIT_S,
    LeaderStream,
    Served,
    run_to_end,
    serving,
)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    device = MockDevice(token_function(np.arange(3, LIMITS.vocab_size)))
    async with serving(device) as served:
        yield served


async def pieces(call: Any) -> bytes:
    return b"".join([response.piece async for response in call])


async def compute(stream: LeaderStream) -> None:
    """One request of eight steps."""
    scheduler = MiniScheduler(LIMITS, lease_steps=3)
    scheduler.submit([5, 6, 7], sampling(max_tokens=8))
    await run_to_end(stream, scheduler)


def steps_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "step"]


async def once_free(served: Served) -> bytes:
    """Of one step, as soon as the profile before has come to its end."""
    while True:
        try:
            return await pieces(served.stub.Profile(ProfileRequest(steps=1), timeout=WAIT_S))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise


async def begun(served: Served) -> None:
    await until(lambda: served.engine._profile is not None, "the profile")


async def test_steps_are_marked_with_their_plan(served: Served) -> None:
    stream = await LeaderStream.open(served)
    call = served.stub.Profile(ProfileRequest(steps=5), timeout=WAIT_S)
    await begun(served)
    await compute(stream)
    trace = json.loads(gzip.decompress(await pieces(call)))
    marks = steps_of(trace)
    # Five, and those after it to the end of their plan: of plan 1 one step, then leases of three.
    told = [(mark["args"]["plan_id"], mark["args"]["step"]) for mark in marks]
    assert told == sorted(told)
    assert 5 <= len(told) < 8
    assert marks[0]["name"] == "plan 1 step 0"
    assert marks[0]["args"]["tokens"] == 3
    plans = {event["name"]: event for event in trace["traceEvents"] if "plan" in event["name"]}
    for mark in marks:
        # One clock: a step lies in the run of its plan.
        run = plans[f"plan {mark['args']['plan_id']}"]
        assert run["ts"] <= mark["ts"] + mark["dur"] <= run["ts"] + run["dur"]


async def test_one_at_a_time_and_who_goes_away_is_not_waited_for(served: Served) -> None:
    stream = await LeaderStream.open(served)
    first = served.stub.Profile(ProfileRequest(steps=200), timeout=WAIT_S)
    await begun(served)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pieces(served.stub.Profile(ProfileRequest(steps=1), timeout=WAIT_S))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
    await until(lambda: served.engine._profile is None, "the end of the profile")
    second = asyncio.create_task(once_free(served))
    await begun(served)
    await compute(stream)
    assert steps_of(json.loads(gzip.decompress(await second)))
    assert not served.crashes


async def test_who_leaves_at_once_and_asks_again_never_has_two_at_work(served: Served) -> None:
    """Two sessions of torch's profiler at once kill the process: no call begins beside one that is
    on its way, though whoever it was for has gone.
    """
    asked = refused = 0
    while asked < 20 or not refused:
        asked += 1
        call = served.stub.Profile(ProfileRequest(steps=5), timeout=WAIT_S)
        reading = asyncio.ensure_future(call.read())
        # Longer from go to go: on a slow machine the next may come when all is over.
        await asyncio.wait({reading}, timeout=0.02 * (1 + asked / 20))
        call.cancel()
        await asyncio.wait({reading})
        refused += not reading.cancelled() and reading.exception() is not None
    last = asyncio.create_task(once_free(served))
    while not last.done():
        await compute(await LeaderStream.open(served))
    assert steps_of(json.loads(gzip.decompress(await last)))
    assert not served.crashes


async def test_a_profiler_that_refuses_is_told_and_the_steps_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = torch.profiler.profile.stop

    def refuse(_: object) -> None:
        raise RuntimeError("no room for a trace")

    def stop_and_refuse(profile: torch.profiler.profile) -> None:
        stop(profile)
        refuse(profile)

    for call, refused in ("start", refuse), ("stop", stop_and_refuse):
        with monkeypatch.context() as patched:
            patched.setattr(StepProfile, "prepare", lambda _: None)
            patched.setattr(torch.profiler.profile, call, refused)
            asked = asyncio.create_task(
                pieces(served.stub.Profile(ProfileRequest(steps=1), timeout=WAIT_S))
            )
            while not asked.done():
                await compute(await LeaderStream.open(served))
            with pytest.raises(grpc.aio.AioRpcError, match="refuses: no room for a trace"):
                await asked
    assert not served.crashes


@pytest.mark.parametrize("steps", [0, STEPS_MAX + 1])
async def test_as_many_steps_as_a_trace_can_hold(served: Served, steps: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=rf"must be 1 to {STEPS_MAX}, got {steps}"):
        await pieces(served.stub.Profile(ProfileRequest(steps=steps), timeout=WAIT_S))


def test_the_computing_thread_finds_loaded_what_a_gpus_profile_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the thread that loads it waits for that GPU alone, as the end of a profile does."""
    told: list[object] = []

    class Told:
        def __init__(self, activities: list[object]) -> None:
            told.append(activities)

        def start(self) -> None:
            pass

        stop = start

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        told.append(device.index)
        yield
        told.append("off")

    monkeypatch.setattr(step_profile, "profile", Told)
    monkeypatch.setattr(torch.cuda, "device", on)
    gpu = torch.device("cuda", 1)
    StepProfile.prepare(gpu)
    StepProfile(3, gpu)
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    assert told == [1, kinds, "off", kinds]


def test_one_that_nobody_wants_any_more_does_not_begin() -> None:
    unwanted = StepProfile(3)
    unwanted.ended.cancel()
    assert not unwanted.begin()


async def test_of_a_worker_that_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its streams go on meanwhile, and the trace has what they are computed with."""
    out = tmp_path / "trace.json.gz"
    async with Cluster(tmp_path, workers=0) as cluster:
        port = cluster.hold_port()
        small = {"model": CHECKPOINT, "kv_blocks": 64, "slots": 4, "threads": 1, "step_tokens": 512}
        worker = cluster.add_worker(small, WORKER)
        worker.start()
        flags = {"redis_url": cluster.store.url, "model": CHECKPOINT, "grpc_port": port.number}
        cluster.add("gateway", GATEWAY, flags | {"http_port": 0}).start()
        await cluster.ready(workers=1)
        (ready,) = cluster.events(worker, "service.ready")
        argv = ["--worker", ready["address"], "--steps", "10", "--out", str(out)]
        await until(partial(is_answering, port.address), "a ready gateway")
        async with AsyncClient(port.address) as client:
            profiling = asyncio.create_task(asyncio.to_thread(profile.main, argv))
            while not profiling.done():
                told = await client.complete("Once upon a time", max_tokens=40)
                assert told.choices[0].finish_reason in ("stop", "length")
        assert await profiling == 0
    assert "open it at" in capsys.readouterr().out
    trace = json.loads(gzip.decompress(out.read_bytes()))
    assert len(steps_of(trace)) >= 10
    assert any(event.get("cat") == "cpu_op" for event in trace["traceEvents"])


def test_a_worker_by_the_name_that_kaiten_serve_gives_it(tmp_path: Path) -> None:
    sockets = tmp_path / "run"
    sockets.mkdir()
    (sockets / "worker-1.sock").touch()
    settings = profile.ProfileSettings(worker="worker-1", data_dir=tmp_path)
    assert profile.address_of(settings) == unix_address(sockets / "worker-1.sock")


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("worker-7", r"--worker worker-7: there is no .*worker-7.sock; is `kaiten serve` running"),
        ("dns:anybody:80", "--worker must be host:port or unix:/path"),
    ],
)
def test_a_worker_that_is_not_there(
    worker: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile.main(["--worker", worker, "--data-dir", str(tmp_path)]) == 2
    assert re.search(said, capsys.readouterr().err)
