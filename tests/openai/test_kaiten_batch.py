"""`kaiten batch`: a file of lines in, a file of answers out, whatever happens to the command."""

import fcntl
import hashlib
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import NotFoundError, OpenAI

from kaiten.cli import app as cli
from kaiten.cli.batch import Files, Note, Server, _retry_after_s
from kaiten.local.ports import HeldPort
from tests.support.commands import Command
from tests.support.served import ENV, ROOT
from tests.support.terminal import Terminal
from tests.support.whole_stack import MODEL, WAIT_S, WholeStack, wait_until

Refused = Callable[..., tuple[int, str]]


def write(path: Path, bodies: Sequence[dict[str, Any]], *more: str) -> Path:
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body})
        for at, body in enumerate(bodies)
    ]
    path.write_text("\n".join([*lines, *more]) + "\n")
    return path


def asked(prompt: str, tokens: int = 6) -> dict[str, Any]:
    told = {"model": MODEL, "prompt": prompt, "max_tokens": tokens}
    return told | {"temperature": 0, "ignore_eos": True}


def begun(url: str, path: Path, *words: str) -> Command:
    return Command("batch", str(path), "--url", url, *words)


def run(url: str, path: Path, *words: str) -> tuple[int, str]:
    code, out, err = begun(url, path, *words).ends()
    return code, out + err


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """`run` without a process, for what ends before it begins."""

    def ran(url: str, path: Path, *words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(("batch", str(path), "--url", url, *words))
        assert isinstance(left.value.code, int)
        return left.value.code, "".join(capsys.readouterr())

    return ran


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_in_answers_out(whole_stack: WholeStack, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("The chef"), asked("Tea")])
    # As some editors write it.
    path.write_text(f"\n{path.read_text()}", encoding="utf-8-sig")
    code, said = run(whole_stack.door.http, path)
    assert code == 0, said
    assert "completed: 2 of 2 lines answered" in said
    answers = lines_of(tmp_path / "lines.output.jsonl")
    assert [each["custom_id"] for each in answers] == ["0", "1"]
    assert {path.name for path in tmp_path.iterdir()} == {"lines.jsonl", "lines.output.jsonl"}


def test_a_line_that_is_wrong_is_told_and_the_others_are_answered(
    whole_stack: WholeStack, tmp_path: Path
) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("The chef"), {"prompt": 1}], "no json")
    # As SDKs of OpenAI's have it.
    code, said = run(f"{whole_stack.door.openai}/", path)
    assert code == 1
    assert "completed: 1 of 3 lines answered" in said
    assert "2 not answered, and why:" in said
    assert len(lines_of(tmp_path / "lines.errors.jsonl")) == 2


def test_killed_and_run_again_it_goes_on(
    whole_stack: WholeStack, client: OpenAI, tmp_path: Path
) -> None:
    path = write(tmp_path / "lines.jsonl", [asked(f"Plate {n}", 50) for n in range(24)])
    before = {each.id for each in client.batches.list()}

    def mine() -> list[Any]:
        return [each for each in client.batches.list() if each.id not in before]

    with whole_stack.held():
        process = begun(whole_stack.door.http, path)
        wait_until(mine, "it is begun")
        process.kill()
    wait_until(lambda: mine()[0].request_counts.completed > 0, "a line is answered")
    path_of_note = tmp_path / "lines.jsonl.batch"
    note = json.loads(path_of_note.read_text())
    code, said = run(whole_stack.door.http, path)
    assert code == 0, said
    assert "completed: 24 of 24 lines answered" in said
    (batch,) = mine()
    assert batch.input_file_id == note["file_id"]
    answers = lines_of(tmp_path / "lines.output.jsonl")
    assert sorted(int(each["custom_id"]) for each in answers) == [*range(24)]
    assert not path_of_note.exists()
    # What was uploaded takes nobody's room any more.
    with pytest.raises(NotFoundError):
        client.files.retrieve(batch.input_file_id)


def test_a_disk_without_room_leaves_what_was_there(whole_stack: WholeStack, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked(f"Plate {n}", 50) for n in range(24)])
    output = tmp_path / "lines.output.jsonl"
    output.write_text("of yesterday\n")
    with whole_stack.held():
        process = begun(whole_stack.door.http, path)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    code, out, err = process.ends()
    assert code == 1
    assert f"{output} cannot be written: File too large" in (out + err).replace("\n", "")
    assert output.read_text() == "of yesterday\n"
    assert {each.name for each in tmp_path.iterdir()} == {
        "lines.jsonl", "lines.jsonl.batch", "lines.output.jsonl",
    }  # fmt: skip
    code, said = run(whole_stack.door.http, path)
    assert code == 0, said
    assert len(lines_of(output)) == 24


def test_answers_that_are_gone_are_told_of(
    refused: Refused, whole_stack: WholeStack, client: OpenAI, tmp_path: Path
) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    output = tmp_path / "lines.output.jsonl"
    output.write_text("of yesterday\n")
    note, before = tmp_path / "lines.jsonl.batch", {each.id for each in client.batches.list()}
    # Its command must not have its answer before it is killed.
    with whole_stack.held():
        process = begun(whole_stack.door.http, path)
        wait_until(lambda: {each.id for each in client.batches.list()} - before, "it is begun")
        process.kill()
    (id,) = {each.id for each in client.batches.list()} - before
    wait_until(lambda: client.batches.retrieve(id).output_file_id, "it is answered")
    client.files.delete(str(client.batches.retrieve(id).output_file_id))
    code, said = refused(whole_stack.door.http, path)
    assert code == 1
    assert f"delete {note} to begin anew" in said.replace("\n", " ")
    assert output.read_text() == "of yesterday\n"


@pytest.mark.parametrize("is_begun", [True, False])
def test_an_interrupted_command_says_what_goes_on(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, is_begun: bool, tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "ask", interrupted)
    path, url = write(tmp_path / "lines.jsonl", [asked("Tea")]), "http://127.0.0.1:1"
    if is_begun:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        Note(url=url, digest=digest, file_id="file-1", key="k").write(Files(path).note)
    code, said = refused(url, path)
    assert code == 130
    assert ("the batch goes on without you" in said) is is_begun


def test_other_lines_are_another_batch(whole_stack: WholeStack, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Plate", 800) for _ in range(40)])
    note = tmp_path / "lines.jsonl.batch"
    # Nor is what nobody will read computed meanwhile.
    with whole_stack.held():
        process = begun(whole_stack.door.http, path)
        wait_until(note.exists, "it is uploaded")
        process.kill()
        content = path.read_text()
        write(path, [asked("Tea")])
        code, said = run(whole_stack.door.http, path)
        assert code == 1
        assert "is of a batch with other lines: delete it to begin anew" in said.replace("\n", " ")
        path.write_text(content)
        code, said = run(whole_stack.door.http, path, "--cancel")
    assert code == 1
    assert "cancelled: " in said
    assert not note.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}\n", "the first line is no request"),
        ("", "the first line is no request"),
        ("[" * 100_000, "the first line is no request"),
    ],
)
def test_what_is_no_batch_is_not_begun(
    refused: Refused, content: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(content)
    with HeldPort() as port:
        code, told = refused(f"http://{port.address}", path)
    assert code == 1
    assert said in told
    assert [*tmp_path.iterdir()] == [path]


def test_what_the_gateway_refuses_leaves_nothing_behind(
    refused: Refused, whole_stack: WholeStack, client: OpenAI, tmp_path: Path
) -> None:
    before = [each.id for each in client.files.list(purpose="batch")]
    path = tmp_path / "lines.jsonl"
    path.write_text('{"url": "/v1/embeddings"}\n')
    code, said = refused(whole_stack.door.http, path)
    assert code == 1
    assert "error: endpoint: " in said
    assert [*tmp_path.iterdir()] == [path]
    assert [each.id for each in client.files.list(purpose="batch")] == before


def test_without_room_for_its_note_it_leaves_nothing_behind(
    refused: Refused, whole_stack: WholeStack, client: OpenAI, tmp_path: Path
) -> None:
    before = [each.id for each in client.files.list(purpose="batch")]
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    (tmp_path / "lines.jsonl.batch.new").mkdir()
    code, said = refused(whole_stack.door.http, path)
    assert code == 1
    assert "lines.jsonl.batch cannot be written: Is a directory" in said.replace("\n", "")
    assert [each.id for each in client.files.list(purpose="batch")] == before


def test_it_goes_on_where_nobody_reads_how_it_goes(whole_stack: WholeStack, tmp_path: Path) -> None:
    """`kaiten batch lines.jsonl 2>&1 | head -1`."""
    path = write(tmp_path / "lines.jsonl", [asked(f"Plate {n}") for n in range(4)])
    command = f"'{sys.executable}' -m kaiten batch {path} --url {whole_stack.door.http}"
    line = f"set -o pipefail; {command} 2>&1 | true"
    done = subprocess.run(["bash", "-c", line], timeout=WAIT_S, cwd=ROOT, env=ENV, check=False)
    assert done.returncode == 0
    assert len(lines_of(tmp_path / "lines.output.jsonl")) == 4
    assert not (tmp_path / "lines.jsonl.batch").exists()


def test_a_bar_where_somebody_looks(whole_stack: WholeStack, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Plate", 40) for _ in range(20)])
    with Terminal("batch", str(path), "--url", whole_stack.door.http) as terminal:
        terminal.until("20/20")
        terminal.until("completed: 20 of 20 lines answered")
        assert terminal.ends() == 0


def answering(status: int, body: bytes, **headers: str) -> HTTPServer:
    """Somebody else's server, with one answer for all."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

    return HTTPServer(("127.0.0.1", 0), Handler)


@pytest.mark.parametrize(
    ("status", "body", "said", "keeps"),
    [
        (401, b'{"error": {"message": "send an API key"}}', "KAITEN_API_KEY", True),
        (400, b'{"error": {"message": "endpoint: no"}}', "endpoint: no", False),
        (200, b"<html>", "does not answer as a gateway does", True),
        (200, b"[]", "does not answer as a gateway does", True),
        (200, b'{"id": "a"}', "does not answer as a gateway does", True),
        (200, b'{"id": "a", "status": "b"}', "does not answer as a gateway does", True),
        (502, b"<html>", "HTTP 502 of", True),
    ],
)
def test_only_what_was_not_begun_is_forgotten(
    refused: Refused, status: int, body: bytes, said: str, keeps: bool, tmp_path: Path
) -> None:
    """Who comes back without a key must not begin anew: lines would be answered twice."""
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    files = Files(path)
    with answering(status, body) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        Note(url=url, digest=digest, file_id="file-1", key="k").write(files.note)
        code, told = refused(url, path)
        server.shutdown()
        thread.join()
    assert code == 1
    assert said in told
    assert files.note.exists() is keeps


@pytest.mark.parametrize(
    ("said", "wait_s"),
    [("3", 3.0), ("", 0.0), ("nan", 0.0), ("-1", 0.0), ("1e9", 0.0), ("Wed, 21 Oct 2026", 0.0)],
)
def test_a_wait_that_a_server_names(said: str, wait_s: float) -> None:
    assert _retry_after_s(httpx.Response(503, headers={"retry-after": said})) == wait_s


def test_a_batch_that_was_not_begun_is_not_cancelled(refused: Refused, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    code, said = refused("http://127.0.0.1:1", path, "--cancel")
    assert code == 1
    assert "was begun" in said
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("path", [".", "/", ""])
def test_what_has_no_name_has_no_batch(refused: Refused, path: str) -> None:
    code, said = refused("http://127.0.0.1:1", Path(path), "--cancel")
    assert code == 1
    assert "was begun" in said


def test_a_note_that_is_none_is_told_of(refused: Refused, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    for content in ("[]", "{}", "no json", "[" * 100_000):
        Files(path).note.write_text(content)
        code, said = refused("http://127.0.0.1:1", path, "--cancel")
        assert code == 1
        assert "delete it to begin anew" in said.replace("\n", " ")


def test_a_name_that_no_host_has_is_nobody(refused: Refused, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    code, said = refused(f"http://{'a' * 300}", path)
    assert code == 1
    assert "does not answer" in said


def test_nobody_is_there(refused: Refused, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    with HeldPort() as port:
        code, said = refused(f"http://{port.address}", path)
        assert code == 1
        assert "does not answer" in said
        assert "start one with: kaiten serve" in said
        code, said = refused(f"http://{port.address}", tmp_path / "none.jsonl")
    assert code == 1
    assert "none.jsonl: No such file or directory" in said


def test_of_two_commands_at_once_the_second_begins_nothing(
    refused: Refused, tmp_path: Path
) -> None:
    """Each line would be answered twice."""
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    with path.open("rb") as followed, HeldPort() as port:
        fcntl.flock(followed, fcntl.LOCK_EX)
        code, said = refused(f"http://{port.address}", path)
        assert code == 1
        assert f"another kaiten batch follows {path}: wait for it, or end it" in said
        # It may be told to end.
        Note(url="http://a", digest="", file_id="file-1", key="k").write(Files(path).note)
        _, said = refused(f"http://{port.address}", path, "--cancel")
        assert "another kaiten batch" not in said


def test_who_loses_the_gateway_is_told_that_the_batch_does_not(
    refused: Refused, tmp_path: Path
) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    with HeldPort() as port:
        url = f"http://{port.address}"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        Note(url=url, digest=digest, file_id="file-1", key="k").write(Files(path).note)
        code, said = refused(url, path)
    assert code == 1
    assert "does not answer" in said
    assert "the same command comes back to it" in said


def test_a_port_of_grpc_is_none_of_http(refused: Refused, tmp_path: Path) -> None:
    path = write(tmp_path / "lines.jsonl", [asked("Tea")])
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        code, said = refused(f"http://127.0.0.1:{port}", path)
    finally:
        server.stop(0)
    assert code == 1
    assert "does this port speak HTTP? kaiten serve has it on 8000" in said
