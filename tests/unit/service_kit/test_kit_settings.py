"""Layers, origins, and complaints that name what was written and the rule."""

import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, SecretStr, model_validator

from service_kit import settings
from service_kit.errors import ConfigError


class Gateway(settings.Settings):
    """Settings of a pretend gateway."""

    grpc_port: int = Field(default=50051, ge=0, le=65535, description="port of the gRPC API")
    grpc_host: str = "127.0.0.1"
    policy: Literal["fcfs", "static"] = "fcfs"
    heartbeat_ms: int = 100
    timeout_ms: int = 1000
    verbose: bool = False
    metrics: bool = True
    url: SecretStr = SecretStr("redis://here")
    names: tuple[str, ...] = ()
    key: SecretStr | None = None
    weight: float | None = None
    folder: Path | None = None

    @model_validator(mode="after")
    def order(self) -> "Gateway":
        if self.heartbeat_ms >= self.timeout_ms:
            raise ValueError("heartbeat_ms must be less than timeout_ms")
        return self


@settings.grouped("Limits")
class Grouped(Gateway):
    rows_max: int = 8


class Needy(settings.Settings):
    model_path: str = Field(description="folder of the checkpoint")


def load(*argv: str, environ: dict[str, str] | None = None) -> Gateway:
    return settings.load(Gateway, "gateway", list(argv), environ or {})


def complaint(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, environ=environ)
    return str(caught.value)


def test_later_layers_win(tmp_path: Path) -> None:
    """Each field is set in one layer more than the one before it."""
    file = tmp_path / "g.toml"
    file.write_text("grpc_port = 1\nheartbeat_ms = 1\ntimeout_ms = 101\n")
    environ = {"KAITEN_GATEWAY_HEARTBEAT_MS": "2", "KAITEN_GATEWAY_TIMEOUT_MS": "102"}
    loaded = load("--config", str(file), "--timeout-ms=103", environ=environ)
    assert (loaded.grpc_host, loaded.grpc_port) == ("127.0.0.1", 1)
    assert (loaded.heartbeat_ms, loaded.timeout_ms) == (2, 103)
    described = settings.describe(loaded)
    assert described["grpc_host"] == {"value": "127.0.0.1", "origin": "default"}
    assert described["grpc_port"] == {"value": 1, "origin": f"file {file}"}
    assert described["heartbeat_ms"] == {"value": 2, "origin": "env KAITEN_GATEWAY_HEARTBEAT_MS"}
    assert described["timeout_ms"] == {"value": 103, "origin": "flag --timeout-ms"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [((), False), (("--verbose",), True), (("--no-verbose",), False), (("--verbose=no",), False)],
)
def test_switches(argv: tuple[str, ...], expected: bool) -> None:
    assert load(*argv).verbose is expected


def test_many_values_are_comma_separated() -> None:
    assert load("--names", "a, b,c").names == ("a", "b", "c")


def test_negative_numbers_are_values() -> None:
    assert load("--weight", "-1.5").weight == -1.5


def test_secrets_are_redacted() -> None:
    loaded = load("--key", "hunter2")
    assert loaded.key is not None
    assert loaded.key.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(settings.describe(loaded))


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        (["--grpc-prot", "1"], {}, ["Unknown option: --grpc-prot.", "Did you mean --grpc-port?"]),
        (["--zzz", "1"], {}, ["Unknown option: --zzz."]),
        (["--grpc-port"], {}, ["--grpc-port requires an argument"]),
        (["--grpc-port=x"], {}, ["flag --grpc-port = 'x'", "valid integer", "port of the gRPC"]),
        (["--grpc-port=70000"], {}, ["'70000'", "less than or equal to 65535"]),
        (["--weight=inf"], {}, ["flag --weight = 'inf'", "finite number"]),
        (["--weight", "nan"], {}, ["flag --weight = 'nan'", "finite number"]),
        (["--policy=fifo"], {}, ["'fifo'", "'fcfs' or 'static'"]),
        (["--grpc-port=1", "--grpc-port=2"], {}, ["--grpc-port specified multiple times"]),
        (["--names=a", "--names=b"], {}, ["--names specified multiple times"]),
        (["--verbose", "--no-verbose"], {}, ["--no-verbose specified multiple times"]),
        (["--verbose=maybe"], {}, ["--verbose", '"maybe"', "into bool"]),
        (["--redis-url.x=1"], {}, ["--redis-url.x"]),
        (["stray"], {}, ["Unused Tokens: ['stray']"]),
        ([], {"KAITEN_GATEWAY_GRPC_PROT": "1"}, ["GRPC_PROT", "Did you mean --grpc-port?"]),
        ([], {"KAITEN_GATEWAY_grpc_port": "1"}, ["Unknown option", "env KAITEN_GATEWAY_grpc_port"]),
        ([], {"KAITEN_GATEWAY_CONFIG": "x"}, ["Unknown option", "env KAITEN_GATEWAY_CONFIG"]),
        ([], {"KAITEN_GATEWAY_GRPC_PORT": "x"}, ["env KAITEN_GATEWAY_GRPC_PORT = 'x'"]),
        (["--heartbeat-ms=9", "--timeout-ms=9"], {}, ["heartbeat_ms must be less than timeout_ms"]),
        (["--config=/no/such"], {}, ["--config /no/such: No such file"]),
    ],
)
def test_complaints(argv: list[str], environ: dict[str, str], parts: list[str]) -> None:
    text = complaint(*argv, environ=environ)
    assert [part for part in parts if part not in text] == []


def test_a_home_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell does it after a space, not after `=`; in files and variables nobody does."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "g.toml").write_text('folder = "~/of-file"\n')
    assert load("--config=~/g.toml").folder == tmp_path / "of-file"
    assert load("--folder=~").folder == tmp_path
    told = complaint("--folder=~nobody-here/x")
    assert "'~nobody-here/x': nobody here has this home folder; write it out" in told
    assert "--config ~nobody-here/x: No such file" in complaint("--config=~nobody-here/x")


def test_many_values_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text('names = ["a", "b,c"]\nverbose = true\nweight = 1.5')
    loaded = load("--config", str(file))
    assert (loaded.names, loaded.verbose, loaded.weight) == (("a", "b", "c"), True, 1.5)
    file.write_text("names = []")
    assert load("--config", str(file)).names == ()


def test_a_secret_of_a_wrong_shape_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "g.toml"
    file.write_text('key = ["hunter2"]')
    assert "hunter2" not in complaint("--config", str(file))


def test_what_stands_behind_a_misspelt_flag_is_not_repeated() -> None:
    assert complaint("--kez=hunter2") == "Unknown option: --kez. Did you mean --key?"


def test_a_bad_secret_is_not_repeated() -> None:
    class Strict(settings.Settings):
        key: SecretStr = Field(min_length=10)

    with pytest.raises(ConfigError) as caught:
        settings.load(Strict, "s", ["--key", "hunter2"], {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grpc_prot = 1", "Did you mean --grpc-port?"),
        ("config = 'x'", 'Unknown option: "[config]"'),
        ("[grpc_port]\nx = 1", "[grpc_port][x]"),
        ("grpc_port = [1, 2]", "int"),
        ("'--help' = 1", "unknown key '--help'"),
        ("grpc_port = true", "'True': input should be a valid integer"),
        ("a = ", "is not TOML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "g.toml"
    file.write_text(text)
    told = complaint("--config", str(file))
    assert str(file) in told
    assert expected in told


def test_a_missing_required_field_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        settings.load(Needy, "needy", [], {})
    assert str(caught.value) == "--model-path must be given: folder of the checkpoint"


def test_other_services_variables_are_not_ours() -> None:
    assert load(environ={"KAITEN_WORKER_ANYTHING": "1"}) == Gateway()


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    shown = " ".join(re.sub("│", "", capsys.readouterr().out).split())
    assert "--grpc-port INT port of the gRPC API [default: 50051]" in shown
    assert "--policy CHOICE [choices: fcfs, static] [default: fcfs]" in shown
    assert "--verbose --no-verbose [default: off]" in shown
    assert "--metrics --no-metrics [default: on]" in shown
    assert "[default: redis://here]" in shown
    assert all(name.replace("_", "-") in shown for name in Gateway.model_fields)


def test_help_groups_the_fields_of_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.load(Grouped, "gateway", ["--help"], {})
    before, _, limits = capsys.readouterr().out.partition("Limits")
    assert "--grpc-port" in before
    assert "--rows-max" in limits
    assert "--grpc-port" not in limits
