"""Commands that ask a gateway: what they send, what they print, and whose key nobody sees."""

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kaiten.api_key import api_key
from kaiten.cli.complaint import complain
from kaiten.client import UnavailableError
from kaiten.local.ports import HeldPort
from kaiten.v1 import common_pb2
from service_kit.errors import InvalidRequest, Unauthenticated
from tests.support.commands import here, kaiten, said_by
from tests.support.scripted_gateway import ScriptedGateway, accepted, delta, done, finished
from tests.support.terminal import Terminal

Ask = Callable[..., Awaitable[tuple[int, str]]]


def test_healthcheck_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with HeldPort() as port:
        code, said = here(capsys, "healthcheck", port.address)
    assert code == 1
    assert f"{port.address} unavailable" in said


def test_generate_without_a_gateway_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HeldPort() as port:
        code, said = here(capsys, "generate", "hi", "--address", port.address)
    assert code == 1
    assert "start one with: kaiten serve" in said


def test_an_archive_that_is_not_there_is_no_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "nowhere"
    code, said = here(capsys, "explain", "some", "--archive", str(where))
    assert (code, said.strip()) == (2, f"{where}: no such folder")


async def run_beside(
    gateway: ScriptedGateway, *arguments: str, stdin: str = "", **environment: str
) -> tuple[int, str]:
    words = (*arguments, "--address", gateway.address)
    return await asyncio.to_thread(said_by, *words, stdin=stdin, **environment)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """`run_beside` without a process, which others have."""

    async def asked(
        gateway: ScriptedGateway, *arguments: str, stdin: str = "", **environment: str
    ) -> tuple[int, str]:
        words = (*arguments, "--address", gateway.address)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
            # Only a main thread may have handlers.
            patch.setattr(signal, "signal", lambda *_: None)
            for name, value in environment.items():
                patch.setenv(name, value)
            return await asyncio.to_thread(here, capsys, *words)

    return asked


async def test_generate_streams_the_text() -> None:
    script = [accepted(), delta(0, "Hello"), delta(5, " you"), finished(9), done(9)]
    async with ScriptedGateway(script) as gateway:
        code, said = await run_beside(
            gateway, "generate", "Say:", "--max-tokens", "9", "--seed", "3", "--stop", "a"
        )
        (request,) = gateway.calls
    assert (code, said) == (0, "Hello you ")
    assert (request.text, request.sampling.max_tokens, request.sampling.seed) == ("Say:", 9, 3)
    assert list(request.stop) == ["a"]


# A title, a clipboard, a cleared screen, the beginning of this line; C1 and DEL.
HOSTILE = "a\x1b]0;b\x07\x1b]52;c;Yg==\x07\x1b[2Jc\r\x9b2J\x7f\td\r\ne"


async def test_a_terminal_does_not_obey_what_a_model_says() -> None:
    script = [accepted(), delta(0, HOSTILE), InvalidRequest("text", "a\x1b[2Jb")]
    async with ScriptedGateway(script, script) as gateway:

        def story() -> None:
            with Terminal("generate", "Say:", "--address", gateway.address) as terminal:
                assert terminal.ends() == 1
                said = terminal.shown
            assert "a␛]0;b␇␛]52;c;Yg==␇␛[2Jc␍\ufffd2J␡\td\ne\nerror: text: a␛[2Jb\n" in said

        await asyncio.to_thread(story)
        words = ("generate", "Say:", "--address", gateway.address)
        piped = await asyncio.to_thread(kaiten, *words)
    read = io.IncrementalNewlineDecoder(None, translate=True).decode(HOSTILE)
    assert piped.out == f"{read}\n", "a program has it as it is"


@pytest.mark.parametrize(
    ("words", "stdin", "hint"),
    [
        (["generate", "a", "--file", "b"], "", "give a prompt or --file, not both"),
        (["generate", "--file", "/nowhere"], "", "--file /nowhere: No such file or directory"),
        (["generate", "--file", sys.executable], "", "is not UTF-8"),
        (["generate", "a", "--json-schema", "/nowhere"], "", "--json-schema /nowhere: No such"),
        (["generate", "a", "--regex", "b", "--grammar", "c"], "", "one of --grammar and --regex"),
        (["generate"], "", "text: must not be empty"),
    ],
)
async def test_what_is_no_prompt(ask: Ask, words: list[str], stdin: str, hint: str) -> None:
    empty = InvalidRequest("text", "must not be empty")
    async with ScriptedGateway([empty]) as gateway:
        code, said = await ask(gateway, *words, stdin=stdin)
    assert (code, hint in said) == (1 if "empty" in hint else 2, True)


@pytest.mark.parametrize("words", [[], ["--file", "FILE"]])
async def test_a_prompt_from_elsewhere(ask: Ask, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text("Say é:\n\n")
    whole = [accepted(), delta(0, "Hi"), finished(2), done(2)]
    async with ScriptedGateway(whole) as gateway:
        given = [str(file) if word == "FILE" else word for word in words]
        stdin = "" if "FILE" in words else "Say é:\n\n"
        code, said = await ask(gateway, "generate", *given, stdin=stdin)
        (request,) = gateway.calls
    assert (code, said, request.text) == (0, "Hi ", "Say é:\n")


@pytest.mark.parametrize(
    ("option", "form"), [("--json-schema", "json"), ("--grammar", "grammar"), ("--regex", "regex")]
)
async def test_an_answer_that_keeps_to_something(
    ask: Ask, tmp_path: Path, option: str, form: str
) -> None:
    file = tmp_path / "language"
    file.write_text("said")
    whole = [accepted(), delta(0, "Hi"), finished(2), done(2)]
    async with ScriptedGateway(whole) as gateway:
        await ask(gateway, "generate", "a", option, "said" if form == "regex" else str(file))
        (request,) = gateway.calls
    wanted = request.sampling.structured_outputs
    assert (wanted.WhichOneof("constraint"), getattr(wanted, form)) == (form, "said")


@pytest.mark.parametrize("words", [["generate", "Say:"], ["chat"]])
async def test_an_answer_that_was_cut_off_is_not_taken_for_a_whole_one(
    ask: Ask, words: list[str]
) -> None:
    cancelled = finished(3, reason=common_pb2.FINISH_REASON_CANCELLED)
    async with ScriptedGateway([accepted(), delta(0, "Hel"), cancelled, done(3)]) as gateway:
        code, said = await ask(gateway, *words, stdin="x\n")
    assert (code, said) == (1, "Hel error: the request was cancelled: its answer is cut off ")


@pytest.mark.parametrize("option", ["--file", "--json-schema"])
async def test_a_mark_that_editors_begin_files_with_is_no_part_of_them(
    ask: Ask, tmp_path: Path, option: str
) -> None:
    file = tmp_path / "text"
    file.write_text("Say:", encoding="utf-8-sig")
    words = [] if option == "--file" else ["Say:"]
    async with ScriptedGateway([accepted(), delta(0, "Hi"), finished(2), done(2)]) as gateway:
        await ask(gateway, "generate", *words, option, str(file))
        (request,) = gateway.calls
    given = request.text if option == "--file" else request.sampling.structured_outputs.json
    assert given == "Say:"


def test_a_failure_is_one_also_where_nobody_reads_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kaiten generate hi 2>&1 | head`."""
    reads, writes = os.pipe()
    os.close(reads)
    nobody = os.fdopen(writes, "w")
    monkeypatch.setattr(sys, "stderr", nobody)
    try:
        assert complain(UnavailableError("gone"), "127.0.0.1:1") == 1
    finally:
        with contextlib.suppress(BrokenPipeError):
            nobody.close()


async def test_an_answer_as_json(ask: Ask) -> None:
    whole = [accepted(), delta(0, "Hi", ids=(7, 8)), finished(2), done(2)]
    async with ScriptedGateway(whole) as gateway:
        code, said = await ask(gateway, "generate", "Say:", "--json")
    told = json.loads(said)
    assert (code, told["usage"]["output_tokens"]) == (0, 2)
    assert told["choices"] == [
        {"text": "Hi", "finish_reason": "stop", "output_tokens": 2, "token_ids": [7, 8]}
    ]


async def test_chat_keeps_the_conversation() -> None:
    first = [accepted(), delta(0, "Hi!"), finished(3), done(3)]
    second = [accepted(), delta(0, "Bye!"), finished(4), done(4)]
    async with ScriptedGateway(first, second) as gateway:
        code, said = await run_beside(
            gateway, "chat", "--system", "Be brief.", stdin="hello\n\ngoodbye\n"
        )
        _, request = gateway.calls
    assert (code, said) == (0, "Hi! Bye! ")
    assert [(m.role, m.content) for m in request.conversation.messages] == [
        ("system", "Be brief."),
        ("user", "hello"),
        ("assistant", "Hi!"),
        ("user", "goodbye"),
    ]


@pytest.mark.parametrize(
    ("stdin", "asked"),
    [
        ("dir C:\\", "dir C:\\"),
        ("one \\\ntwo\\\n", "one \ntwo\\"),
        ('"""one\ntwo', "one\ntwo"),
        ('"""', ""),
    ],
)
async def test_chat_asks_the_last_text_of_a_pipe_though_more_was_to_come(
    ask: Ask, stdin: str, asked: str
) -> None:
    whole = [accepted(), delta(0, "Hi"), finished(2), done(2)]
    async with ScriptedGateway(whole) as gateway:
        code, _ = await ask(gateway, "chat", stdin=stdin)
        told = [call.conversation.messages[-1].content for call in gateway.calls]
    assert (code, told) == (0, [asked] * bool(asked))


@pytest.mark.parametrize("words", [["generate", "Say:"], ["chat"]])
async def test_a_key_is_sent_and_a_missing_one_is_asked_for(
    ask: Ask, words: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("kt-a\n")
    answer = [accepted(), delta(0, "Hi"), finished(2), done(2)]
    refusal = Unauthenticated("send an API key")
    async with ScriptedGateway(answer, answer, [refusal]) as gateway:
        from_file = await ask(gateway, *words, "--api-key-file", str(file), stdin="x\n")
        from_environment = await ask(gateway, *words, stdin="x\n", KAITEN_API_KEY="kt-b")
        code, said = await ask(gateway, *words, stdin="x\n")
    assert from_file == from_environment == (0, "Hi ")
    keys = [metadata.get("authorization") for metadata in gateway.metadata]
    assert keys == ["Bearer kt-a", "Bearer kt-b", None]
    assert code == 1
    assert "give its API key in KAITEN_API_KEY, or with --api-key-file" in said


@pytest.mark.parametrize("words", [["generate", "Say:"], ["chat"], ["bench"]])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        ("", "must hold an API key"),
        ("two words", "visible"),
    ],
)
def test_a_file_without_a_key_is_refused(
    words: list[str],
    content: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anybody is asked; what stands in it is not shown."""
    monkeypatch.setenv("COLUMNS", "300")
    file = tmp_path / "k"
    if content is not None:
        file.write_text(content)
    code, said = here(capsys, *words, "--api-key-file", str(file))
    assert code == 2
    assert f"--api-key-file {file}" in said
    assert says in said
    assert "two words" not in said


def test_a_key_as_editors_and_shells_leave_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("kt-a\r\n", encoding="utf-8-sig")
    assert api_key(file) == "kt-a"
    with pytest.raises(ValueError, match="KAITEN_API_KEY must hold an API key"):
        api_key(None, {"KAITEN_API_KEY": "\udcffkt-a"})


@pytest.mark.parametrize("words", [["generate", "Say:"], ["chat"], ["bench"]])
def test_no_flag_takes_the_key_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody on the machine could read it."""
    code, said = here(capsys, *words, "--api-key", "kt-a")
    assert code == 2
    assert "--api-key-file" in said


async def test_a_bench_whose_file_cannot_be_written_tells_its_figures(tmp_path: Path) -> None:
    """They took long. What else was asked for is written, too."""
    script = [accepted(), delta(0, "Hi"), finished(2), done(2)]
    kept = tmp_path / "kept.jsonl"
    words = ("--count", "1", "--warmup", "0", "--report", "/dev/full", "--jsonl", str(kept))
    async with ScriptedGateway(script) as gateway:
        code, said = await asyncio.to_thread(said_by, "bench", gateway.address, *words)
    assert (code, "output throughput" in said) == (1, True)
    assert "--report /dev/full cannot be written: No space left on device" in said
    assert '"kind": "run"' in kept.read_text()


async def test_a_bench_says_who_speaks_no_tls() -> None:
    async with ScriptedGateway() as gateway:
        url = f"https://{gateway.address}"
        code, said = await asyncio.to_thread(said_by, "bench", url, "--count", "1")
    assert (code, "certificate is missing: it does not speak TLS on this port" in said) == (1, True)


async def test_bench_sends_the_key_and_keeps_it_to_itself(tmp_path: Path) -> None:
    script = [accepted(), delta(0, "Hi"), finished(2), done(2)]
    kept = tmp_path / "kept.jsonl"
    file = tmp_path / "key"
    file.write_text("kt-secret")
    words = ("--count", "1", "--warmup", "0", "--jsonl", str(kept), "--api-key-file", str(file))
    async with ScriptedGateway(script) as gateway:
        code, said = await asyncio.to_thread(said_by, "bench", gateway.address, *words)
    assert code == 0, said
    assert [metadata["authorization"] for metadata in gateway.metadata] == ["Bearer kt-secret"]
    assert '"kind": "run"' in kept.read_text()
    assert "kt-secret" not in kept.read_text()
