"""start → serve → drain → stop in a real process, with real signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service_kit import lifecycle
from service_kit.errors import ConfigError

ROOT = Path(__file__).parents[3]
WAIT_S = 120

# One service for all cases: MODE says which method misbehaves; each method says that it was called.
PROGRAM = """
import asyncio, gc, sys, threading
from service_kit import lifecycle, logs
from service_kit.errors import ConfigError

MODE = sys.argv[1]

def say(word):
    print(word, flush=True)

class Service:
    drain_s = 0.2 if MODE == "slow-drain" else 30.0

    def __init__(self):
        if MODE == "bad-settings":
            raise ConfigError("port is wrong; choose another")

    async def start(self):
        if MODE == "bad-start":
            raise ConfigError("no model; give --model")
        if MODE == "slow-start":
            say("starting")
            await asyncio.Event().wait()
        if MODE == "stuck-thread":
            say("starting")
            await asyncio.to_thread(threading.Event().wait)
        say("started")
        return {"port": 7}

    async def serve(self):
        if MODE == "done":
            return
        if MODE == "collector":
            say(f"{gc.isenabled()} {gc.get_freeze_count() > 20 * len(gc.get_objects())}")
            return
        if MODE == "crash":
            raise ValueError("boom")
        try:
            await asyncio.Event().wait()
        finally:
            say("serve ended")

    async def drain(self):
        say("draining")
        if MODE in ("hang-drain", "slow-drain"):
            try:
                await asyncio.Event().wait()
            finally:
                say("drain cut")
        say("drained")

    async def stop(self):
        say("stopped")

logs.configure("toy")
sys.exit(lifecycle.launch(Service))
"""


@contextmanager
def running(mode: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: "subprocess.Popen[str]") -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out.split("\n")[:-1], err


def events(err: str) -> list[str]:
    return [json.loads(line)["event"] for line in err.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    with running("plain") as process:
        assert said(process) == "started"
        process.send_signal(number)
        code, out, err = finish(process)
    assert (code, out) == (0, ["draining", "drained", "serve ended", "stopped"])
    assert events(err) == ["service.ready", "service.signal", "service.draining", "service.stopped"]
    assert json.loads(err.splitlines()[0])["port"] == 7


def test_the_second_signal_stops_at_once() -> None:
    with running("hang-drain") as process:
        assert said(process) == "started"
        process.send_signal(signal.SIGTERM)
        assert said(process) == "draining"
        process.send_signal(signal.SIGTERM)
        code, out, _ = finish(process)
    assert (code, out) == (0, ["drain cut", "serve ended", "stopped"])


def test_a_drain_has_a_limit() -> None:
    with running("slow-drain") as process:
        assert said(process) == "started"
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
    assert (code, out) == (0, ["draining", "drain cut", "serve ended", "stopped"])
    assert "service.drain_timeout" in events(err)


def test_a_signal_during_start_stops() -> None:
    with running("slow-start") as process:
        assert said(process) == "starting"
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
    assert (code, out) == (0, ["stopped"])
    assert "service.ready" not in events(err)


def test_a_thread_that_hangs_holds_up_no_end() -> None:
    """As the loading of a large model does, or a step that never ends."""
    with running("stuck-thread") as process:
        assert said(process) == "starting"
        process.send_signal(signal.SIGTERM)
        code, out, err = finish(process)
    assert (code, out) == (0, ["stopped"])
    assert events(err)[-1] == "service.stopped"


def test_serve_may_end_by_itself() -> None:
    with running("done") as process:
        code, out, _ = finish(process)
    assert (code, out) == (0, ["started", "stopped"])


def test_the_collector_looks_only_at_what_came_after_the_start() -> None:
    with running("collector") as process:
        code, out, _ = finish(process)
    assert (code, out) == (0, ["started", "True True", "stopped"])


def test_a_crash_is_logged_and_is_exit_code_1() -> None:
    with running("crash") as process:
        code, out, err = finish(process)
    assert (code, out) == (1, ["started", "stopped"])
    (crash,) = [json.loads(line) for line in err.splitlines() if "service.crashed" in line]
    assert "ValueError: boom" in crash["exception"]


@pytest.mark.parametrize(
    ("mode", "sentence", "calls"),
    [
        ("bad-settings", "port is wrong; choose another", []),
        ("bad-start", "no model; give --model", ["stopped"]),
    ],
)
def test_misconfiguration_is_one_sentence(mode: str, sentence: str, calls: list[str]) -> None:
    with running(mode) as process:
        code, out, err = finish(process)
    assert (code, out) == (2, calls)
    told = json.loads(err.splitlines()[-1])
    assert (told["event"], told["reason"]) == ("service.refused", sentence)
    assert "Traceback" not in err


def test_a_person_sees_it_framed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> lifecycle.Service:
        raise ConfigError("no model; give --model")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert lifecycle.launch(build) == 2
    said = capsys.readouterr().err
    assert "cannot start" in said
    assert "no model; give --model" in said
    assert "service.refused" not in said


async def test_a_loop_that_ends_unasked_ends_its_group() -> None:
    """A group alone would go on without it."""

    async def loop(end: asyncio.Future[None]) -> None:
        await end

    async def group(end: asyncio.Future[None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lifecycle.endless(loop(end)))
            tasks.create_task(asyncio.sleep(WAIT_S))

    cancelled, over = asyncio.Future[None](), asyncio.Future[None]()
    cancelled.cancel()
    over.set_result(None)
    for end in (cancelled, over):
        with pytest.raises(ExceptionGroup) as caught:
            await group(end)
        assert "loop ended" in str(caught.value.exceptions[0])
    done = asyncio.create_task(lifecycle.endless(loop(asyncio.Future())))
    await asyncio.sleep(0)
    done.cancel()
    with pytest.raises(asyncio.CancelledError):
        await done
