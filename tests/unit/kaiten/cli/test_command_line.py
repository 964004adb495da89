"""The command as users meet it: a real process, its output, its exit code, never a traceback."""

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kaiten.cli import app as cli
from kaiten.cli import packages
from kaiten.local import services
from kaiten.local.ports import HeldPort
from kaiten.mini import CHECKPOINT
from service_kit.errors import InvalidRequest, Unauthenticated
from tests.support import commands
from tests.support.scripted_gateway import ScriptedGateway, accepted, delta, done, finished

ROOT = Path(__file__).parents[4]
Ask = Callable[..., Awaitable[tuple[int, str]]]


def kaiten(*arguments: str, stdin: str = "", **environment: str) -> tuple[int, str]:
    """Exit code and everything written. Words are joined, because boxes wrap them."""
    code, out, err = commands.kaiten(*arguments, stdin=stdin, environ=environment)
    return code, re.sub(r"[\s│]+", " ", out + err)


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The same without a process: for many cases of one kind, of which one has a process."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    said = "".join(capsys.readouterr())
    assert isinstance(left.value.code, int)
    return left.value.code, re.sub(r"[\s│]+", " ", said)


def test_keygen_gives_the_key_and_its_entry_apart() -> None:
    """As a shell starts it."""
    made = [sys.executable, "-m", "kaiten", "keygen", "acme"]
    done = subprocess.run(made, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout.startswith('\n[[keys]]\ntenant = "acme"\ndigest = "sha256:')
    key = done.stderr.rpartition(" ")[2].strip()
    assert key.startswith("kt-")
    assert key not in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--config"),
        ("generate", "--file"),
        ("generate", "hi", "--json-schema"),
        ("generate", "hi", "--api-key-file"),
        ("generate", "hi", "--tls-ca"),
        ("batch",),
    ],
)
def test_a_home_of_nobody_is_a_file_that_is_not_there(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, said = here(capsys, *words, "~nobody-here/x")
    assert code in (1, 2)
    assert "~nobody-here/x" in said
    assert "o such file" in said


@pytest.mark.parametrize("words", ["--help", "bench --help", "gateway --help", "--version"])
def test_who_reads_no_further_is_no_error(words: str) -> None:
    """`kaiten --help | head -1`, as a shell with pipefail has it."""
    reading, writing = os.pipe()
    os.close(reading)
    made = [sys.executable, "-m", "kaiten", *words.split()]
    done = subprocess.run(made, stdout=writing, stderr=subprocess.PIPE, timeout=280, cwd=ROOT)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_keygen_refuses_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = here(capsys, "keygen", "a b")
    assert (code, "must match" in said) == (2, True)


def test_help_names_every_command() -> None:
    code, said = kaiten("--help")
    assert code == 0
    commands = ("serve", "gateway", "scheduler", "worker", "generate", "chat", "doctor", "keygen")
    assert [name for name in (*commands, "healthcheck") if name not in said] == []


def test_a_shell_completes_flags(tmp_path: Path) -> None:
    code, said = kaiten("--install-completion", HOME=str(tmp_path), SHELL="/bin/bash")
    assert code == 0, said
    (script,) = tmp_path.rglob("completions/kaiten")
    program = """
source "$1"; set -- $(complete -p kaiten); COMP_WORDS=(kaiten serve --max-mo); COMP_CWORD=2
while [ "$1" != -F ]; do shift; done; "$2"; echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "-c", program, "bash", str(script)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["--max-model-len"], done.stderr


def test_serve_shows_its_defaults() -> None:
    code, said = kaiten("serve", "--help")
    assert code == 0
    for names in ("--http-port --port", "--slots --max-num-seqs", "--kv-dtype --kv-cache-dtype"):
        assert names in said
    for default in ("50051", "8000", "127.0.0.1", ".kaiten"):
        assert f"[default: {default}]" in said
    assert "default: fair" in said


@pytest.mark.parametrize("command", ["bench", "chat", "explain", "generate", "ps", "watch"])
def test_help_shows_no_default_as_python_writes_it(command: str) -> None:
    code, said = kaiten(command, "--help")
    assert (code, re.findall(r"default: *(?:False|[(\[\"'])", said)) == (0, [])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--port 1", "--http-port 1"),
        ("--data-parallel-size 2", "--workers 2"),
        ("--max-model-len 96", "--context-tokens 96"),
        ("--max-num-seqs 4", "--slots 4"),
        ("--max-num-batched-tokens 96", "--step-tokens 96"),
        ("--max-batch-tokens 96", "--step-tokens 96"),
        ("--gpu-memory-utilization 0.5", "--gpu-memory-share 0.5"),
        ("--num-gpu-blocks-override 64", "--kv-blocks 64"),
        ("--num-blocks 64", "--kv-blocks 64"),
        ("--kv-cache-dtype fp8_e4m3", "--kv-dtype fp8"),
        ("--dtype bfloat16", "--dtype bf16"),
        ("--dtype half", "--dtype fp16"),
        ("--dtype float32", "--dtype fp32"),
        ("--scheduling-policy fcfs", "--policy fcfs"),
        ("--max-logprobs 3", "--logprobs-max 3"),
        ("--allowed-origins https://a.example", "--cors-origins https://a.example"),
        ("--long-prefill-token-threshold 9", "--long-prefill-tokens 9"),
        ("--max-long-partial-prefills 2", "--long-prefills-max 2"),
        ("--model owner/name", "owner/name"),
    ],
)
def test_names_of_the_field_are_taken_and_shown_beside_ours(theirs: str, ours: str) -> None:
    assert served_by(theirs) == served_by(ours) != served_by("")


@cache
def served_by(words: str) -> dict[str, Any]:
    """What `kaiten serve` is told by them."""
    _, bound, _ = cli.app.parse_args(["serve", *words.split()])
    return bound.arguments


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--prot", "1"], "Did you mean --port?"),
        (["--max-model-length", "1"], "Did you mean --max-model-len?"),
        (["--max-total-tokens=1"], "no --max-total-tokens: use --context-tokens"),
        (["--enable-prefix-caching"], "blocks of equal prefixes are always reused"),
        (["--slots", "4", "--max-num-seqs", "8"], "specified multiple times"),
    ],
)
def test_a_name_that_is_none_gets_the_right_one(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = here(capsys, "serve", *arguments)
    assert (code, hint in said) == (2, True), said


def test_a_file_gives_the_flags_that_the_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "kaiten.toml"
    file.write_text('port = 1\nmax-num-seqs = 4\nstep-tokens = 96\ndtype = "half"\n')
    _, bound, _ = cli.app.parse_args(["serve", "--config", str(file), "--slots", "8"])
    worker = bound.arguments["worker"]
    assert bound.arguments["http_port"] == 1
    assert (worker.slots, worker.step_tokens, worker.dtype) == (8, 96, "fp16")


def test_a_store_is_named_by_a_flag_as_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/integration/test_serve_secrets.py` shows where a password goes from there."""
    url = "redis://:pa55@10.0.0.1:6379"
    _, by_flag, _ = cli.app.parse_args(["serve", "--redis-url", url])
    monkeypatch.setenv("KAITEN_REDIS_URL", url)
    _, by_environment, _ = cli.app.parse_args(["serve"])
    assert by_flag.arguments == by_environment.arguments == {"redis_url": url}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory"),
        ("slots", "is not TOML"),
        ("slotz = 4", "unknown key 'slotz'; did you mean slots?"),
        ("ctx-size = 4", "unknown key 'ctx-size': use --context-tokens"),
        ("watch = true", "unknown key 'watch'"),
        ("config = 'x'", "unknown key 'config'"),
        ("[worker]\nslots = 4", "unknown key 'worker'"),
        ("slots = 'many'", 'unable to convert "many" into int'),
    ],
)
def test_a_wrong_file_is_refused(
    content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kaiten.toml"
    if content is not None:
        file.write_text(content)
    code, said = here(capsys, "serve", "--config", str(file))
    assert (code, says in said) == (2, True), said


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serv"], 'Did you mean "serve"?'),
        (["serve", "--grpc-prot", "1"], "Did you mean --grpc-port?"),
        (["serve", "--ctx-size", "1"], "no --ctx-size: use --context-tokens"),
        (["serve", "--enable-auto-tool-choice"], "tools are always on"),
        (["ps", "localhost:50051"], "by its flag: --address localhost:50051"),
        (["ps", "a:1", "b:2"], "kaiten ps does not take a:1 b:2: see kaiten ps --help"),
        (["ps", "all of them"], "kaiten ps does not take 'all of them': see kaiten ps --help"),
        (["serve", "--dtype", "fp8"], "fp8"),
        (["serve", "--weight-dtype", "int3"], "int3"),
        (["serve", "--kv-dtype", "fp16"], "fp16"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = here(capsys, *arguments)
    assert code == 2
    assert hint in said


@pytest.mark.parametrize(
    ("arguments", "cause", "fix"),
    [
        (["no-such-folder"], "is neither a folder nor a hub id", "give the folder"),
        (["/"], "/ has no config.json", "give the folder of a checkpoint"),
        (["--workers", "0"], "--workers must be at least 1, got 0", ""),
        (["--http-port", "70000"], "--http-port must be in [0, 65535], got 70000", "0 picks a"),
        (["--revision", "v2"], "this one is a folder here", "owner/name"),
        (["--host", "no such host"], "no such host is no address of this machine", "--host"),
    ],
)
def test_serve_refuses_with_cause_and_fix(
    tmp_path: Path, arguments: list[str], cause: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--data-dir", str(tmp_path), "--grpc-port", "0", *arguments)
    code, said = here(capsys, "serve", *words)
    assert code == 1
    assert "cannot start" in said
    assert cause in said
    assert fix in said


def test_serve_refuses_a_file_where_its_folder_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").touch()
    ports = ("--grpc-port", "0", "--http-port", "0")
    code, said = here(capsys, "serve", "--data-dir", str(tmp_path), *ports)
    assert code == 1
    assert "cannot be a folder of this user's alone: File exists" in said


def test_mistakes_and_refusals_are_exit_codes_of_a_process() -> None:
    code, said = kaiten("serve", "--kv-dtype", "fp16")
    assert (code, "fp16" in said) == (2, True)
    code, said = kaiten("serve", "no-such-folder")
    assert (code, "cannot start" in said) == (1, True)


def test_a_role_takes_its_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the line goes through untouched, `--help` and `--version` too."""
    seen: list[list[str]] = []

    def execve(_path: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        assert str(ROOT) in environ["PYTHONPATH"].split(os.pathsep)
        seen.append([*command])
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    rest = ("--help", "--version", "--x", "-1")
    for line, module in [
        *(((role, *rest), module) for role, module in services.MODULES.items()),
        (("archive", "steps", *rest), services.REPLAY),
    ]:
        with pytest.raises(SystemExit):
            cli.main(line)
        assert seen.pop() == [sys.executable, "-P", "-m", "kaiten.part", module, *line[1:]]


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (("worker", "--help"), "worker"),
        (("gateway",), "gateway"),
        (("scheduler",), "scheduler"),
        (("archive", "ls"), "scheduler"),
        (("serve", "--model", str(CHECKPOINT)), "serve"),
    ],
)
def test_what_is_not_installed_is_named(
    command: tuple[str, ...],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = packages.PACKAGES[extra][0]
    monkeypatch.setattr(packages, "version_of", lambda name: None if name == missing else "1")
    code, said = here(capsys, *command)
    assert code == 1
    assert f"not installed: {missing} pip install 'kaiten[{extra}]'" in said


def test_a_tree_that_nobody_installed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "version_of", lambda name: None if name == "kaiten" else "1")
    assert here(capsys, "--version") == (0, "not installed: a source tree ")
    code, said = here(capsys, "serve")
    assert (code, "not installed: kaiten pip install" in said) == (1, True)


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


async def run_beside(
    gateway: ScriptedGateway, *arguments: str, stdin: str = "", **environment: str
) -> tuple[int, str]:
    words = (*arguments, "--address", gateway.address)
    return await asyncio.to_thread(kaiten, *words, stdin=stdin, **environment)


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


@pytest.mark.parametrize("words", [["generate", "Say:"], ["chat"], ["bench"]])
def test_no_flag_takes_the_key_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody on the machine could read it."""
    code, said = here(capsys, *words, "--api-key", "kt-a")
    assert code == 2
    assert "--api-key-file" in said


async def test_bench_sends_the_key_and_keeps_it_to_itself(tmp_path: Path) -> None:
    script = [accepted(), delta(0, "Hi"), finished(2), done(2)]
    kept = tmp_path / "kept.jsonl"
    file = tmp_path / "key"
    file.write_text("kt-secret")
    words = ("--count", "1", "--warmup", "0", "--jsonl", str(kept), "--api-key-file", str(file))
    async with ScriptedGateway(script) as gateway:
        code, said = await asyncio.to_thread(kaiten, "bench", gateway.address, *words)
    assert code == 0, said
    assert [metadata["authorization"] for metadata in gateway.metadata] == ["Bearer kt-secret"]
    assert '"kind": "run"' in kept.read_text()
    assert "kt-secret" not in kept.read_text()
