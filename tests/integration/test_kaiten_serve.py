"""`kaiten serve` with the shipped model: every process real, as a user starts it."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from kaiten.client import AsyncClient, Client
from kaiten.results import Completion
from tests.support.toy_stack import NAMES

ROOT = Path(__file__).parents[2]
WAIT_S = 120
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# A word in the command line of each process.
WORDS = {
    "store": "valkey-server",
    "scheduler": "scheduler_svc",
    "worker-0": "gpu_worker",
    "gateway": "gateway",
}


class Served:
    """A running stack and what it said when it was ready."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.undisturbed: list[Completion] = []
        command = [sys.executable, "-m", "kaiten", "serve", "--data-dir", str(data_dir)]
        command += ["--grpc-port", "0", "--http-port", "0", "--threads", "1", "--dtype", "fp32"]
        with (data_dir / "said").open("w") as said:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT, env=ENV
            )
        self.said = self._until_ready()
        self.address = self._shown(r"gRPC +(\S+)")
        self.http_url = self._shown(r"HTTP +(\S+)")

    def _until_ready(self) -> str:
        """Everything on stdout up to the end of the Python snippet."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line == "PY\n":
                return "".join(lines)
        pytest.fail(f"not ready: {(self.data_dir / 'said').read_text()}")

    def _shown(self, pattern: str) -> str:
        found = re.search(pattern, self.said)
        assert found, self.said
        return found[1]

    def child(self, name: str) -> psutil.Process:
        """The running process of a part."""
        for process in psutil.Process(self.process.pid).children():
            if any(WORDS[name] in word for word in process.cmdline()[:4]):
                return process
        raise AssertionError(f"no process of {name}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=WAIT_S)
        return self.process.returncode


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    stack = Served(tmp_path_factory.mktemp("data"))
    try:
        yield stack
    finally:
        stack.process.kill()
        stack.process.communicate()


def test_the_box_tells_what_is_served(served: Served) -> None:
    for shown in ("kaiten-mini (Llama", "fp32 on cpu", "blocks ×", "sequences", "gateway "):
        assert shown in served.said


def test_the_curl_snippet_answers(served: Served) -> None:
    """The same words that a shell would pass on."""
    words = shlex.split(served.said[served.said.index("curl ") :].split("\n\n")[0])
    answer = httpx.post(
        words[1], content=words[words.index("-d") + 1], headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"].strip()


def test_the_python_snippet_answers(served: Served) -> None:
    program = served.said.split("<<'PY'\n")[1].rsplit("PY", 1)[0]
    ran = subprocess.run(
        [sys.executable, "-"],
        input=program,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
        env=ENV,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.strip()


async def crowd(address: str, started: asyncio.Event | None = None) -> list[Completion]:
    """16 seeded requests at once. `started` is set when each has got some of its output."""
    async with AsyncClient(address, resume_s=60.0) as client:
        streaming = set[int]()

        async def one(seed: int) -> Completion:
            generation = client.generate(
                "Once upon a time",
                seed=seed,
                temperature=1.0,
                max_tokens=200,
                ignore_eos=True,
            )
            async for _ in generation:
                streaming.add(seed)
                if started is not None and len(streaming) == 16:
                    started.set()
            return await generation.result()

        return list(await asyncio.gather(*(one(seed) for seed in range(16))))


@pytest.mark.parametrize("name", ["worker-0", "gateway", "scheduler", "store"])
async def test_a_killed_process_is_not_seen_by_clients(served: Served, name: str) -> None:
    """kill -9 in mid-stream: no error, no token lost or repeated, the undisturbed text."""
    if not served.undisturbed:
        served.undisturbed = await asyncio.wait_for(crowd(served.address), WAIT_S)
    started = asyncio.Event()
    disturbed = asyncio.create_task(crowd(served.address, started))
    await asyncio.wait_for(started.wait(), WAIT_S)
    victim = served.child(name)
    victim.kill()
    results = await asyncio.wait_for(disturbed, WAIT_S)
    assert [r.choices for r in results] == [r.choices for r in served.undisturbed]
    assert {r.choices[0].output_tokens for r in results} == {200}
    assert served.child(name).pid != victim.pid


def test_it_drains_and_leaves_nothing(served: Served) -> None:
    """Last, because it ends the stack: a running answer is finished first, then all go in order."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    with Client(served.address) as client:
        generation = client.generate("Once", max_tokens=200, ignore_eos=True, seed=1)
        assert next(generation).token_count > 0
        answer: list[Completion] = []
        reading = threading.Thread(target=lambda: answer.append(generation.result))
        reading.start()
        assert served.stop() == 0
        reading.join(WAIT_S)
    assert answer[0].choices[0].output_tokens == 200
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    said = (served.data_dir / "said").read_text()
    order = re.findall(r"(\S+) +stopped", said)
    assert order == ["gateway", "scheduler", "worker-0", "store"]
    assert set(order) < set(NAMES)
