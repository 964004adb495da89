"""`kaiten serve` with the shipped model: every process real, as a user starts it.

That another model of that name has another ledger: tests/unit/kaiten/local/test_ledger_folders.py.
"""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import psutil
import pytest

from kaiten.client import AsyncClient, Client
from kaiten.client.results import Completion
from tests.support.served import WAIT_S, Served
from tests.support.whole_stack import wait_until

IN_ORDER = "the last test ends the stack"


WORDS = "--max-num-seqs 48 --max-model-len 1024 --metrics-port 0 --log-level warning"
Stand = Callable[[], Served]


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    """The stack that runs. Started again, on the same folder, once a test has ended it: a process
    that takes tests from another's queue may get earlier ones later, too.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(everybodys_folder())
        found: list[Served] = []

        def running() -> Served:
            if not found or found[-1].process.poll() is not None:
                found.append(stack.enter_context(Served(folder / "data", *WORDS.split())))
            return found[-1]

        yield running


@pytest.fixture
def served(stand: Stand) -> Served:
    return stand()


@contextmanager
def everybodys_folder() -> Iterator[Path]:
    """Every user can enter it, and see what is in it: pytest's own are closed to others."""
    with TemporaryDirectory(prefix="of-everybody-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def undisturbed(stand: Stand) -> list[Completion]:
    """What the crowd is told when nothing dies."""
    return asyncio.run(asyncio.wait_for(crowd(stand().address), WAIT_S))


def test_the_box_tells_what_is_served(served: Served) -> None:
    for shown in ("kaiten-mini (Llama", "fp32 on cpu", "blocks ×", "sequences", "gateway "):
        assert shown in served.said


def test_flags_of_the_field_reach_the_parts(served: Served) -> None:
    assert "48 sequences, 1024 tokens each at most" in served.said
    wait_until(served.is_whole, "every part runs again, whatever tests before have killed")
    models = httpx.get(f"{served.http_url}/v1/models", timeout=WAIT_S).json()
    assert models["data"][0]["max_model_len"] == 1024


def test_every_part_has_its_page_of_metrics(served: Served) -> None:
    (shown,) = re.findall(r"metrics +(http.*)", served.said)
    ports = re.findall(r":(\d+)", shown)
    pages = dict.fromkeys(ports, "")

    def are_all_there() -> bool:
        # Of a part that another test has killed there is none until it has started again.
        for port in (port for port, page in pages.items() if not page):
            with suppress(httpx.TransportError):
                pages[port] = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        return all(pages.values())

    wait_until(are_all_there, "a page of each part")
    counted = (
        "kaiten_gateway_is_ready",
        "kaiten_is_leader",
        "kaiten_is_leader",
        "kaiten_worker_rows",
    )
    assert [name in page for name, page in zip(counted, pages.values(), strict=True)] == [True] * 4


def test_the_curl_snippet_answers(served: Served) -> None:
    """The same words that a shell would pass on."""
    words = shlex.split(served.snippet("curl "))
    answer = httpx.post(
        words[1],
        content=words[words.index("-d") + 1],
        headers={"content-type": "application/json"},
        timeout=WAIT_S,
    )
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"].strip()


def test_the_python_snippet_answers(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(served.program(), "snippet", "exec"), {})
    out, err = capsys.readouterr()
    assert out.strip()
    assert not err


def test_it_listens_on_its_public_ports_and_on_sockets_else(served: Served) -> None:
    """Metrics were asked for, on loopback: of two schedulers and a worker."""
    public = {int(url.rpartition(":")[2]) for url in (served.address, served.http_url)}
    assert len(public) == 2
    (shown,) = re.findall(r"metrics +(http.*)", served.said)
    asked = {int(port) for port in re.findall(r"[0-9]:(\d+)", shown)} - public
    assert len(asked) == 3
    # A part that another test has killed may be starting again.
    wait_until(lambda: served.listening() == public | asked, "all to listen, and nobody else")
    parts = {f"{name}.sock" for name in ("gateway", "scheduler", "standby", "store", "worker-0")}
    assert {path.name for path in served.data_dir.rglob("*") if path.is_socket()} == parts


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_reaches_the_public_ports_and_nothing_else(served: Served) -> None:
    pids = [each.pid for each in psutil.Process(served.process.pid).children(recursive=True)]
    # Written by this test.
    ours = {served.data_dir, served.data_dir / "said"}
    paths = [path for path in served.data_dir.rglob("*") if path not in ours]
    assert {"logs", "run", "lock"} <= {path.name for path in paths}
    assert len(pids) >= 5
    told = stranger(
        paths=[str(path) for path in paths],
        environs=[f"/proc/{pid}/environ" for pid in pids],
        ports=[int(url.rpartition(":")[2]) for url in (served.address, served.http_url)],
        control=str(served.data_dir / "said"),
    )
    assert told == {"opened": [], "connected": 2, "control": True}


def stranger(**asked: object) -> dict[str, object]:
    """What a process of the user `nobody` could open and connect to."""
    program = """
import encodings.idna, json, os, socket, sys  # nothing is found later
asked = json.load(sys.stdin)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
def opens(path):
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            open(path, "rb").read(1)
        return True
    except OSError:
        pass
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
            return True
        except OSError:
            return False
connected = 0
for port in asked["ports"]:
    socket.create_connection(("127.0.0.1", port), timeout=30).close()
    connected += 1
opened = [path for path in asked["paths"] + asked["environs"] if opens(path)]
print(json.dumps({"opened": opened, "connected": connected, "control": opens(asked["control"])}))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    answer: dict[str, object] = json.loads(ran.stdout)
    return answer


TOKENS: Final = 40
# Languages without so short a sentence: who is replaced must find their place in it again.
LONG: Final[list[dict[str, Any]]] = [
    {"regex": "([a-z]{1,9} ){400}"},
    {"json": {"type": "array", "items": {"enum": ["crab", 7, None]}, "minItems": 400}},
]


async def crowd(address: str, started: asyncio.Event | None = None) -> list[Completion]:
    """8 seeded requests at once, half of them constrained. `started` is set when each has got some
    of its output.
    """
    async with AsyncClient(address, resume_s=WAIT_S) as client:
        streaming = set[int]()

        async def one(seed: int) -> Completion:
            constrained = {"structured_outputs": LONG[seed // 2 % 2]}
            wish: Any = constrained if seed % 2 else {"ignore_eos": True}
            generation = client.generate(
                "Once upon a time", seed=seed, temperature=1.0, max_tokens=TOKENS, **wish
            )
            async for _ in generation:
                streaming.add(seed)
                if started is not None and len(streaming) == 8:
                    started.set()
            return await generation.result()

        return list(await asyncio.gather(*(one(seed) for seed in range(8))))


# Who is stopped is killed a moment later: a kill by itself is asked of two only. Of a worker it is
# asked in test_llm and test_stack_faults, of a store in test_compose_rehearsal.
@pytest.mark.parametrize(
    ("number", "name"),
    [
        *((signal.SIGSTOP, name) for name in ("worker-0", "gateway", "scheduler", "store")),
        (signal.SIGKILL, "gateway"),
        (signal.SIGKILL, "scheduler"),
    ],
)
async def test_a_process_that_is_lost_is_replaced_and_not_seen_by_clients(
    served: Served, undisturbed: list[Completion], number: signal.Signals, name: str
) -> None:
    """In mid-stream: no error, no token lost or repeated, the undisturbed text. Nobody sends
    SIGCONT: who is stopped is ended.
    """
    # Found before: answers are short.
    victim = served.leader() if name == "scheduler" else served.child(name)
    started = asyncio.Event()
    disturbed = asyncio.create_task(crowd(served.address, started))
    begun = asyncio.create_task(started.wait())
    await asyncio.wait((disturbed, begun), timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert begun.done(), disturbed
    victim.send_signal(number)
    results = await asyncio.wait_for(disturbed, WAIT_S)
    assert [r.choices for r in results] == [r.choices for r in undisturbed]
    assert {r.choices[0].output_tokens for r in results} == {TOKENS}
    await asyncio.to_thread(victim.wait, WAIT_S)
    successor = served.leader() if name == "scheduler" else served.child(name)
    assert successor.pid != victim.pid


def test_a_request_is_resumed_by_the_next_start(stand: Stand) -> None:
    """All of it killed in mid-stream and started again: what it had accepted goes on."""
    asked: Any = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.0}
    killed = stand()
    with Client(killed.address, resume_s=0.1) as client:
        whole = client.complete("Once upon a time", **asked)
        # Killing the rest takes a moment, in which the gateway may see us leave.
        running = client.generate(
            "Once upon a time", request_id="accepted-before", keep_running=True, **asked
        )
        next(running)
        killed.process.kill()
        killed.process.wait()
    started = stand()
    assert started.data_dir == killed.data_dir
    with Client(started.address) as client:
        assert client.attach("accepted-before").result.choices == whole.choices
    assert len(list(started.data_dir.glob("store-*"))) == 1


def test_it_drains_and_leaves_nothing(served: Served) -> None:
    """Last, because it ends the stack: a running answer is finished first, then all go in order."""
    wait_until(served.is_whole, "every part runs again, whatever tests before have killed")
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
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []
    said = (served.data_dir / "said").read_text()
    order = re.findall(r"(\S+) +stopped", said)
    assert [order[0], set(order[1:3]), *order[3:]] == [
        *("gateway", {"scheduler", "standby"}, "worker-0", "store")
    ]
