"""The command as users meet it: a real process, its output, its exit code, never a traceback."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kaiten.cli import app as cli
from kaiten.cli import packages
from kaiten.local import services
from kaiten.local.stack import WORKERS_MAX
from kaiten.mini import CHECKPOINT
from tests.support.commands import here, said_by

ROOT = Path(__file__).parents[4]


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
    code, said = said_by("--help")
    assert code == 0
    commands = ("serve", "gateway", "scheduler", "worker", "generate", "chat", "doctor", "keygen")
    assert [name for name in (*commands, "healthcheck") if name not in said] == []


def test_a_shell_completes_flags(tmp_path: Path) -> None:
    code, said = said_by("--install-completion", HOME=str(tmp_path), SHELL="/bin/bash")
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
    code, said = said_by("serve", "--help")
    assert code == 0
    for names in ("--http-port --port", "--slots --max-num-seqs", "--kv-dtype --kv-cache-dtype"):
        assert names in said
    for default in ("50051", "8000", "127.0.0.1", ".kaiten"):
        assert f"[default: {default}]" in said
    assert "default: fair" in said


@pytest.mark.parametrize("command", ["bench", "chat", "explain", "ps", "serve", "watch"])
def test_help_shows_no_default_as_python_writes_it(command: str) -> None:
    code, said = said_by(command, "--help")
    assert (code, re.findall(r"default: *(?:False|True|[(\[\"'])", said)) == (0, [])


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
        ("--enable-deterministic-inference", "--deterministic"),
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


def test_a_variable_that_is_empty_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of variables leave those that are not wanted."""
    for name in ("KAITEN_REDIS_URL", "KAITEN_TLS", "KAITEN_TLS_CA"):
        monkeypatch.setenv(name, "")
    for command in ("serve", "ps"):
        _, bound, _ = cli.app.parse_args([command])
        assert bound.arguments == {}


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
        (["run", "--ctx-size", "1"], "kaiten run has no --ctx-size: use --context-tokens"),
        (["run", "--port=1"], "kaiten run has no --port: kaiten serve has it"),
        (["run", "--slotss", "1"], "Did you mean --slots?"),
        (["ps", "localhost:50051"], "by its flag: --address localhost:50051"),
        (["ps", "a:1", "b:2"], "kaiten ps does not take a:1 b:2: see kaiten ps --help"),
        (["ps", "all of them"], "kaiten ps does not take 'all of them': see kaiten ps --help"),
        (["serve", "--mem-fraction-static", "0.8"], "use --gpu-memory-share"),
        (["serve", "--http-port", "70000"], "Must be <= 65535"),
        (["serve", "--metrics-port", "-1"], "Must be >= 0"),
        (["doctor", "--grpc-port", "70000"], "Must be <= 65535"),
        (["serve", "--workers", "0"], "Must be >= 1"),
        (["serve", "--workers", f"{WORKERS_MAX + 1}"], f"Must be <= {WORKERS_MAX}"),
        (["serve", "--workers", "1.5"], "--workers must be a whole number, got 1.5"),
        (["generate", "hi", "--max-tokens", "9.9"], "--max-tokens must be a whole number, got 9.9"),
        (["bench", "--count", "1.0"], "--count must be a whole number, got 1.0"),
        (["batch", "f", "--address", "a:1"], "kaiten batch has no --address: its HTTP API is"),
        (
            ["explain", "r", "--url=a:1"],
            "kaiten explain has no --url: its gRPC API is meant by --a",
        ),
        (["chat", "--host", "a"], "kaiten chat has no --host: its gRPC API is meant by --address"),
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
        (["--host", ""], "--host is empty", "0.0.0.0"),
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
    code, said = said_by("serve", "--kv-dtype", "fp16")
    assert (code, "fp16" in said) == (2, True)
    code, said = said_by("serve", "no-such-folder")
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
