"""`LLM`: a stack that belongs to an object, with the shipped model and all its processes."""

import errno
import gc
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

import kaiten
from kaiten import LLM
from kaiten.cli.display import TerminalDisplay
from kaiten.client import Client
from kaiten.client.errors import (
    InvalidRequestError,
    UnauthenticatedError,
    UnavailableError,
)
from kaiten.local import background
from kaiten.local.background import BackgroundStack
from kaiten.local.model_source import resolve
from kaiten.local.stack import ServeOptions, Stack
from kaiten.start_error import StartError
from tests.support.served import ENV, ROOT, WAIT_S
from tests.support.toy_stack import NAMES, toy_stack

PROMPTS = ["The chef", "A bowl of soup", "Tea"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, dtype="fp32", step_tokens=512, progress=False) as llm:
        yield llm


def test_prompts_in_answers_out(llm: LLM) -> None:
    answers = llm.generate(PROMPTS, max_tokens=12, seed=7, ignore_eos=True)
    assert [answer.usage.output_tokens for answer in answers] == [12] * 3
    (alone,) = llm.generate(PROMPTS[1], max_tokens=12, seed=7, ignore_eos=True)
    assert alone.text == answers[1].text


def test_a_bar_on_a_terminal_counts_answers_and_their_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = io.StringIO()
    terminal = Console(file=seen, force_terminal=True, width=80)
    monkeypatch.setattr("kaiten.llm.console", lambda **_: terminal)
    monkeypatch.setattr(llm, "_has_progress", terminal.is_terminal)
    llm.generate(PROMPTS, max_tokens=12, ignore_eos=True)
    bars = re.findall(
        r"(\d)/3.*? (\d+) tokens", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.getvalue())
    )
    counts = [(int(count), int(tokens)) for count, tokens in bars]
    assert counts == sorted(counts)
    assert all(tokens == 12 * count for count, tokens in counts)
    assert (counts[0], counts[-1]) == ((0, 0), (3, 36))


def test_a_terminal_that_was_closed_costs_no_answer(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, _: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(llm, "_has_progress", True)
    assert len(llm.generate(PROMPTS, max_tokens=4)) == 3


def test_one_conversation_or_several(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hello!"}]
    (one,) = llm.chat(talk, max_tokens=8, temperature=0)
    several = llm.chat([talk, talk], max_tokens=8, temperature=0)
    assert [answer.text for answer in several] == [one.text] * 2
    assert one.text.strip()


@pytest.mark.parametrize("asked", ["hello", ["hello"], [[1, 2]], [{"role": "user"}, "hello"], [[]]])
def test_a_text_is_no_conversation(asked: Any, llm: LLM) -> None:
    """Its letters would be answered one by one, as the beginnings of texts."""
    with pytest.raises(InvalidRequestError, match="each with role and content"):
        llm.chat(asked)


def test_a_wrong_option_is_said_and_harms_nobody(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"temperature: must be a number in \[0, 2\]"):
        llm.generate(PROMPTS, temperature=-1)
    (answer,) = llm.generate("Tea", max_tokens=4, ignore_eos=True)
    assert answer.usage.output_tokens == 4


SNIPPETS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
(README,) = (text for text in SNIPPETS if "import LLM" in text)
EXAMPLE = (ROOT / "examples" / "in_process.py").read_text()


@pytest.mark.parametrize(("program", "lines"), [(README, 2), (EXAMPLE, 3)])
def test_programs_to_copy_from(
    program: str,
    lines: int,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As they stand, but for who begins and ends the stack: starts are seconds."""
    monkeypatch.setattr(kaiten, "LLM", lambda: nullcontext(llm))
    exec(compile(program, "program", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= lines


def test_nobody_else_may_use_its_port(llm: LLM) -> None:
    with Client(llm._stack.stack.grpc_address) as client, pytest.raises(UnauthenticatedError):
        client.complete("hi")


def test_a_worker_that_dies_again_and_again_is_told_to_who_waits(llm: LLM) -> None:
    """Nobody sees the lines of its supervisor."""
    is_told = threading.Event()

    def end_each() -> None:
        ended: set[int] = set()
        while len(ended) < 12 and not is_told.wait(0.02):
            for each in (one for one in _parts() if one.pid not in ended):
                with suppress(psutil.Error):
                    if "gpu_worker" in each.cmdline():
                        each.kill()
                        ended.add(each.pid)

    ending = threading.Thread(target=end_each)
    ending.start()
    try:
        # More than a worker could serve between two looks of the thread, be that a minute.
        with pytest.raises(UnavailableError, match=r"worker-0 dies again and again: .*SIGKILL"):
            llm.generate(PROMPTS * 100, max_tokens=900, ignore_eos=True)
    finally:
        is_told.set()
        ending.join()
    (answer,) = llm.generate("Tea", max_tokens=4, ignore_eos=True)
    assert answer.usage.output_tokens == 4


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    options = ServeOptions(model=resolve(None), data_dir=tmp_path, http_port=-1, grpc_port=0)
    with pytest.raises(StartError, match="--http-port must be in"):
        BackgroundStack(options, TerminalDisplay())
    with pytest.raises(StartError, match="neither a folder nor a hub id"):
        LLM("./nowhere")
    with pytest.raises(TypeError, match="no option 'dtyp'; it has device, dtype"):
        LLM(dtyp="fp32")


LEFT = """
import gc, json, os, psutil, signal, sys
# gRPC says so whenever a program with threads forks, and now and then of a connection that ends.
os.environ |= {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}
from kaiten import LLM
gc.disable()
llm = LLM(threads=1, step_tokens=512, progress=False)
pids = [each.pid for each in psutil.Process().children(recursive=True)]

def of_fork(act):
    if (pid := os.fork()) == 0:
        signal.alarm(30)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def use():
    try:
        llm.generate("Tea")
    except RuntimeError as error:
        os.write(told, str(error).encode())

def forget():
    global llm
    llm = None
    gc.collect()

read, told = os.pipe()
codes = [of_fork(sys.exit), of_fork(forget), of_fork(use)]
(answer,) = llm.generate("Tea", temperature=0)
address, said = llm._stack.stack.private_address, os.read(read, 999).decode()
print(json.dumps(dict(pids=pids, address=address, codes=codes, said=said, text=answer.text)))
"""


@pytest.fixture(scope="module")
def left() -> dict[str, Any]:
    """What a program tells of its stack, its forks and its answer, and leaves all of it. Of its
    forks one ends, as any program does, one forgets it, and one uses it.
    """
    ran = subprocess.run(
        [sys.executable, "-c", LEFT],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
        env=ENV,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def test_it_ends_with_its_program(left: dict[str, Any]) -> None:
    """Which neither closes it nor waits for it."""
    assert len(left["pids"]) >= 5
    assert not any(psutil.pid_exists(pid) for pid in left["pids"])
    assert not Path(left["address"].removeprefix("unix:")).parents[1].exists()


def test_forks_of_its_program_end_nothing_and_are_told(left: dict[str, Any]) -> None:
    assert left["codes"] == [0, 0, 0]
    assert "is of the process that this was forked from" in left["said"]
    assert left["text"].strip()


def test_it_ends_where_it_is_found_to_be_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread collects it: its own, too. Of stand-ins: how parts end is not asked here."""

    @contextmanager
    def planned(_: ServeOptions) -> Iterator[Stack]:
        yield replace(toy_stack(tmp_path, {}), private_address=f"unix:{tmp_path}/nobody")

    async def collect() -> None:
        gc.collect()

    monkeypatch.setattr(background, "planned_stack", planned)
    gc.disable()
    try:
        llm = LLM(progress=False)
        parts = [psutil.Process(int(path.read_text())) for path in tmp_path.glob("*.pid")]
        loop, llm.cycle = llm._stack.loop, llm  # type: ignore[attr-defined]
        del llm
        assert all(part.is_running() for part in parts)
        loop.start(collect()).result(WAIT_S)
    finally:
        gc.enable()
    assert len(parts) == len(NAMES)
    assert psutil.wait_procs(parts, WAIT_S)[1] == []


def _parts() -> list[psutil.Process]:
    return psutil.Process(os.getpid()).children()
