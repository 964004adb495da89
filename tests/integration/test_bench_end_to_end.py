"""`kaiten bench` as a user runs it, against a whole stack of mock workers, over both protocols."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kaiten.cli import app as cli
from tests.support.commands import kaiten
from tests.support.processes import MOCK_WORKER
from tests.support.whole_stack import WholeStack

Bench = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeStack]:
    folder = tmp_path_factory.mktemp("stack")
    with WholeStack(folder, worker_module=MOCK_WORKER) as stack:
        yield stack


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Bench:
    """Exit code and everything that was said, without a process: that it is one, one test shows."""

    def ran(*words: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(("bench", *map(str, words)))
        assert isinstance(left.value.code, int)
        return left.value.code, "".join(capfd.readouterr())

    return ran


def read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Requests and runs of a file of JSON lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = ("request", "run")
    requests, runs = ([line for line in lines if line["kind"] == kind] for kind in kinds)
    return requests, runs


def test_both_protocols_measure_the_same_work(stack: WholeStack, tmp_path: Path) -> None:
    jsonl, report = tmp_path / "runs.jsonl", tmp_path / "report.html"
    code, out, err = kaiten(
        "bench", "compare", f"grpc={stack.door.grpc}", f"http={stack.door.http}",
        *("--count", "12", "--scale", "0.25", "--repeats", "2", "--good-latency-s", "60"),
        *("--jsonl", str(jsonl), "--report", str(report)),
    )  # fmt: skip
    assert code == 0, err
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
    assert "http / grpc" in out + err
    assert report.read_text().count('role="img"') == 7


def test_loops_traces_and_plain_text(stack: WholeStack, here: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:17:0{second}.5000000,{9 + second},{3 + second}" for second in range(6)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    jsonl = tmp_path / "runs.jsonl"
    ways = (
        (stack.door.grpc, "--workload", trace, "--arrivals", "trace:20"),
        (stack.door.grpc, "--workload", "mooncake", "--scale", 0.01, "--count", 8),
        (stack.door.http, "--count", 8, "--concurrency", 2, "--scale", 0.2),
        (stack.door.http, "--count", 3, "--plain", "--arrivals", "poisson:50", "--scale", 0.2),
    )
    for way in ways:
        code, said = here(*way, "--vocab-size", 1500, "--jsonl", jsonl)
        assert code == 0, said
    requests, runs = read(jsonl)
    traced, shared, closed, plain = runs
    assert traced["output_tokens"] == sum(range(3, 9))
    due = [request["due_s"] for request in requests[:6]]
    assert due == pytest.approx([0.05 * index for index in range(6)])
    assert shared["requests_ok"] == closed["requests_ok"] == 8
    assert "text in" in plain["target"]


def test_mistakes_are_one_sentence(here: Bench) -> None:
    """As words of the command; that a process ends so, others show."""
    for words, code, says in (
        (("127.0.0.1:9",), 1, "cannot start: 127.0.0.1:9"),
        (("http://127.0.0.1:9",), 1, "start one with: kaiten serve"),
        # A name that is none, which no resolver is asked for. Brackets of a message are no markup.
        (("a..b",), 1, "[field:hostname lookup"),
        (("127.0.0.1:9", "--workload", "rugged"), 2, "no such file, and no law"),
        (("127.0.0.1:9", "--arrivals", "poisson:x"), 2, "needs positive numbers"),
        (("compare", "127.0.0.1:9", "127.0.0.1:9", "--repeats", "0"), 2, "at least 1, got 0"),
        (("127.0.0.1:9", "--count", "0"), 2, "--count must be above 0"),
        (("compare", "x=127.0.0.1:9", "x=127.0.0.1:9"), 2, "same name"),
    ):
        ended, said = here(*words)
        assert ended == code, said
        assert says in said
        assert "Traceback" not in said
