"""`kaiten bench` as a user runs it, against a whole stack of mock workers, over both protocols."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kaiten.cli import app as cli
from kaiten.mini import CHECKPOINT
from tests.support.answers import until
from tests.support.cluster import Cluster, is_answering
from tests.support.processes import GATEWAY

WAIT_S = 200


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Addresses of a stack: gRPC and HTTP."""
    async with Cluster(folder, workers=1) as cluster:
        grpc_port, http_port = cluster.hold_port(), cluster.hold_port()
        flags = {
            "redis_url": cluster.store.url,
            "model": CHECKPOINT,
            "grpc_port": grpc_port.number,
            "http_port": http_port.number,
        }
        cluster.add("gateway", GATEWAY, flags).start()
        await until(lambda: is_answering(grpc_port.address), "a ready gateway")
        yield grpc_port.address, f"http://{http_port.address}"


async def bench(*words: object) -> tuple[int, str]:
    """Exit code and everything that was said."""
    command = [sys.executable, "-m", "kaiten", "bench", *map(str, words)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert process.returncode is not None
    return process.returncode, said.decode()


def read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Requests and runs of a file of JSON lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = ("request", "run")
    requests, runs = ([line for line in lines if line["kind"] == kind] for kind in kinds)
    return requests, runs


async def test_both_protocols_measure_the_same_work(tmp_path: Path) -> None:
    async with serving(tmp_path / "stack") as (grpc_address, http_url):
        jsonl, report = tmp_path / "runs.jsonl", tmp_path / "report.html"
        code, said = await bench(
            "compare", f"grpc={grpc_address}", f"http={http_url}",
            *("--count", 12, "--scale", 0.25, "--repeats", 2, "--good-latency-s", 60),
            *("--jsonl", jsonl, "--report", report),
        )  # fmt: skip
        assert code == 0, said
        requests, runs = read(jsonl)
        assert [run["name"] for run in runs] == ["grpc", "http", "grpc", "http"], "in turns"
        assert len(requests) == 4 * 12
        for run in runs:
            assert run["requests_ok"] == 12
            assert run["wrong_length"] == 0
            assert run["errors"] == {}
            assert run["goodput_share"] == 1
            assert run["output_tokens"] == runs[0]["output_tokens"]
            assert run["prompt_tokens"] == runs[0]["prompt_tokens"]
            assert 0 < run["ttft_s"]["p50"] <= run["latency_s"]["p50"]
        for request in requests:
            assert sum(f["tokens"] for f in request["frames"]) == request["output_tokens_asked"]
        assert "http / grpc" in said
        assert report.read_text().count('role="img"') == 7


async def test_loops_traces_and_plain_text(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:0{second}.5000000,{9 + second},{3 + second}" for second in range(6)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    async with serving(tmp_path / "stack") as (grpc_address, http_url):
        jsonl = tmp_path / "runs.jsonl"
        ways = (
            (grpc_address, "--workload", trace, "--arrivals", "trace:20"),
            (grpc_address, "--workload", "mooncake", "--scale", 0.01, "--count", 8),
            (http_url, "--count", 8, "--concurrency", 2, "--scale", 0.2),
            (http_url, "--count", 3, "--plain", "--arrivals", "poisson:50", "--scale", 0.2),
        )
        for way in ways:
            code, said = await bench(*way, "--vocab-size", 1500, "--jsonl", jsonl)
            assert code == 0, said
        requests, runs = read(jsonl)
        traced, shared, closed, plain = runs
        assert traced["output_tokens"] == sum(range(3, 9))
        due = [request["due_s"] for request in requests[:6]]
        assert due == pytest.approx([0.05 * index for index in range(6)])
        assert shared["requests_ok"] == closed["requests_ok"] == 8
        assert "text in" in plain["target"]


def test_mistakes_are_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    """As words of the command; that a process ends so, others show."""
    for words, code, says in (
        (("127.0.0.1:9",), 1, "cannot start: 127.0.0.1:9"),
        (("http://127.0.0.1:9",), 1, "start one with: kaiten serve"),
        (("no.such.host",), 1, "lookup"),  # brackets of a message are no markup
        (("127.0.0.1:9", "--workload", "rugged"), 2, "no such file, and no law"),
        (("127.0.0.1:9", "--arrivals", "poisson:x"), 2, "needs positive numbers"),
        (("compare", "127.0.0.1:9", "127.0.0.1:9", "--repeats", "0"), 2, "at least 1, got 0"),
        (("127.0.0.1:9", "--count", "0"), 2, "--count must be above 0"),
        (("compare", "x=127.0.0.1:9", "x=127.0.0.1:9"), 2, "same name"),
    ):
        with pytest.raises(SystemExit) as left:
            cli.main(("bench", *words))
        said = "".join(capfd.readouterr())
        assert left.value.code == code, said
        assert says in said
        assert "Traceback" not in said
