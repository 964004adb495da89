"""What of the peers' runners can be tried without the peers: stand-ins that are programs too."""

import asyncio
import json
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import libraries, servers, side_by_side
from benchmarks.peers.memory import children_cpu_s
from benchmarks.peers.running import PEERS, run_peer
from benchmarks.peers.setting import PeerError, Setting
from benchmarks.peers.tokens import (
    TokensError,
    agreement,
    tokens_of_llama_cpp,
    tokens_of_openai,
)
from kaiten.bench.workload import Job
from tests.support.tcp_server import tcp_server

JOBS = tuple(Job(index=index, prompt=(5, 6, 7), output_tokens=2 + index) for index in range(3))


def setting(folder: Path, **pythons: str) -> Setting:
    return Setting(
        model=folder / "model", dtype="fp32", threads=1, slots=2, jobs=JOBS, pythons=pythons
    )


def program(path: Path, text: str) -> str:
    """An executable Python script."""
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--peers", "hf-one:1,nobody"), "no peer 'nobody'; there are kaiten, "),
        (("--peers", "hf-one:1,kaiten:0"), "names no number of rounds"),
        (("--with", "llama-server=/nowhere"), "llama-server=/nowhere: there is no such program"),
    ],
)
def test_wrong_peers_are_named_before_anything_is_made(
    words: tuple[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["side_by_side", *words])
    with pytest.raises(SystemExit):
        side_by_side.main()
    assert said in capsys.readouterr().err


def test_a_peer_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="--with vllm"):
        run_peer("vllm", setting(tmp_path))
    with pytest.raises(PeerError, match="--with optimum"):
        run_peer("openvino", setting(tmp_path))
    with pytest.raises(PeerError, match="--with llama-server"):
        servers.llama_cpp(setting(tmp_path, **{"llama-server": ""}))
    assert set(PEERS) >= {"kaiten", "hf-continuous", "llama.cpp", "vllm", "openvino"}


LIBRARY = """
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
asked = json.load(open(words["--jobs"]))
jobs = asked["jobs"]
assert [job["output_tokens"] for job in asked["warm"]] == [2, 3, 4]
assert [job["prompt"] for job in asked["warm"]] == [[7, 6, 5]] * 3
print("loading"); print("ready", flush=True)
counts = [job["output_tokens"] - SHORT for job in jobs]
stories = [[[0.5, 1], [0.7, n - 1]] for n in counts]
found = {"stories": stories, "tokens": [[9] * n for n in counts], "cpu_s": 0.25}
json.dump(found, open(words["--out"], "w"))
"""


def scripted(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "script.py"
    path.write_text(text)
    return libraries.library(str(path), "package", "continuous")


def test_a_library_tells_when_what_came(tmp_path: Path) -> None:
    answers = scripted(tmp_path, LIBRARY.replace("SHORT", "0"))(setting(tmp_path))
    assert [outcome.output_tokens for outcome in answers.outcomes] == [2, 3, 4]
    assert [outcome.ttft_s for outcome in answers.outcomes] == [0.5] * 3
    assert answers.tokens == [[9] * 2, [9] * 3, [9] * 4]
    assert answers.start_s > 0
    assert answers.cpu_s == 0.25


def test_a_short_answer_fails_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = scripted(tmp_path, LIBRARY.replace("SHORT", "1").replace("[0.5, 1], ", ""))
    monkeypatch.setitem(PEERS, "short", short)
    with pytest.raises(PeerError, match="3 wrong lengths"):
        run_peer("short", setting(tmp_path))


def test_a_library_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no such model"):
        scripted(tmp_path, "raise SystemExit('no such model')")(setting(tmp_path))


EXPORT = """
import sys
from pathlib import Path
if FAILS: sys.exit("cannot trace")
Path(sys.argv[-1]).mkdir()
"""


def test_the_export_is_made_once_and_never_half(tmp_path: Path) -> None:
    def exporting(*, fails: bool) -> Path:
        program(tmp_path / "optimum-cli", EXPORT.replace("FAILS", str(fails)))
        return libraries.openvino_model(setting(tmp_path, optimum=str(tmp_path / "python")))

    with pytest.raises(PeerError, match="cannot trace"):
        exporting(fails=True)
    assert exporting(fails=False) == tmp_path / "model.openvino"
    assert exporting(fails=True) == tmp_path / "model.openvino", "it is there already"
    assert not list(tmp_path.glob("*.part"))


def test_a_failed_conversion_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    failing = program(tmp_path / "python", "raise SystemExit('no gguf here')")
    known = {"llama-server": sys.executable, "gguf": failing}
    with pytest.raises(PeerError, match="no gguf here"):
        run_peer("llama.cpp", setting(tmp_path, **known))
    assert not list(tmp_path.glob("*.gguf"))


QUANTISE = """
import sys
from pathlib import Path
plain, made, kind = sys.argv[1:]
if FAILS: sys.exit("unknown type")
Path(made).write_text(Path(plain).read_text() + kind)
"""


def test_weights_are_quantised_once_and_never_half(tmp_path: Path) -> None:
    (tmp_path / "model.fp32.gguf").write_text("weights in ")

    def quantising(*, fails: bool) -> Path:
        tool = program(tmp_path / "llama-quantize", QUANTISE.replace("FAILS", str(fails)))
        return servers.quantised_gguf("q8_0", setting(tmp_path, **{"llama-quantize": tool}))

    with pytest.raises(PeerError, match=r"quantising failed:\nunknown type"):
        quantising(fails=True)
    assert quantising(fails=False).read_text() == "weights in q8_0"
    assert quantising(fails=True) == tmp_path / "model.fp32.q8_0.gguf", "it is there already"
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(PeerError, match="--with llama-quantize"):
        servers.quantised_gguf("q4_0", setting(tmp_path, **{"llama-quantize": ""}))


def test_cpu_time_is_that_of_living_children() -> None:
    spin = "import time\nwhile time.process_time() < 0.1: pass\nprint(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert children_cpu_s() >= 0.09
        child.communicate(b"\n")


def test_a_server_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "model.fp32.gguf").touch()
    dying = program(tmp_path / "llama-server", "raise SystemExit('no such weights')")
    with pytest.raises(PeerError, match="no such weights"):
        run_peer("llama.cpp", setting(tmp_path, **{"llama-server": dying}))


MORTAL = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("out of slots", file=sys.stderr, flush=True)
        os._exit(3)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Server).serve_forever()
"""


def test_so_does_one_that_dies_when_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "model.fp32.gguf").touch()
    mortal = program(tmp_path / "llama-server", MORTAL)
    with pytest.raises(PeerError, match=r"it ended with 3:\n(.|\n)*out of slots"):
        run_peer("llama.cpp", setting(tmp_path, **{"llama-server": mortal}))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1), min_size=1))
def test_everybody_agrees_with_themselves(made: list[list[int]]) -> None:
    assert agreement(made, made) == 1


def test_agreement_ends_at_the_first_difference() -> None:
    assert agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert agreement([[1, 2], [3]], [[1, 2], [4]]) == 2 / 3
    assert agreement([[1, 2, 3]], [[1, 2]]) == 2 / 3
    assert agreement([[1], [2], [3]], [[1]]) == 1, "only what both have is compared"
    assert agreement([], [[1]]) == 0


@asynccontextmanager
async def answering(answer: Any) -> AsyncIterator[tuple[str, list[tuple[str, Any]]]]:
    """A server with one answer to everything but a list of models; what it was asked."""
    asked: list[tuple[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split()[1]
        if path == "/v1/models":
            body = json.dumps({"data": [{"id": "m"}]})
        else:
            length = int(head.partition("content-length:")[2].split()[0])
            asked.append((path, json.loads(await reader.readexactly(length))))
            body = json.dumps(answer)
        reply = f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        writer.write(reply.encode())

    async with tcp_server(serve) as port:
        yield f"http://127.0.0.1:{port}", asked


async def test_token_ids_come_from_where_each_server_has_them() -> None:
    async with answering({"choices": [{"text": "x", "token_ids": [4, 5]}]}) as (url, asked):
        assert await tokens_of_openai(url, JOBS[0]) == [4, 5]
        path, body = asked[0]
        assert path == "/v1/completions"
        assert body["model"] == "m"
        assert body["max_tokens"] == body["min_tokens"] == 2
    async with answering({"content": "x", "tokens": [6, 7]}) as (url, asked):
        assert await tokens_of_llama_cpp(url, JOBS[0]) == [6, 7]
        assert asked[0][0] == "/completion"
        assert asked[0][1]["n_predict"] == 2
    async with answering({"choices": [{"text": "x"}]}) as (url, _):
        with pytest.raises(TokensError, match="no token ids"):
            await tokens_of_openai(url, JOBS[0])
