"""Logs are JSON lines on stderr, also those of libraries; telemetry is off unless asked for."""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import pytest
import structlog

from service_kit import logs, telemetry
from service_kit.errors import ConfigError


@pytest.fixture(autouse=True)
def _restore() -> object:
    yield
    structlog.reset_defaults()
    logging.basicConfig(handlers=[logging.NullHandler()], force=True)


def test_lines_are_json_with_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway")
    log = structlog.get_logger()
    log.debug("hidden")
    log.info("request.accepted", request_id="r1", prompt_tokens=3)
    logging.getLogger("lib").warning("count is %d", 7)
    logging.getLogger("lib").info("hidden too")
    ours, theirs = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (ours["event"], ours["request_id"], ours["prompt_tokens"]) == (
        "request.accepted",
        "r1",
        3,
    )
    assert (ours["level"], ours["service"]) == ("info", "gateway")
    assert (theirs["event"], theirs["logger"], theirs["level"]) == ("count is 7", "lib", "warning")


def test_a_collector_that_is_away_is_told_of_once_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("gateway")
    exporter, other = logging.getLogger("opentelemetry.exporter"), logging.getLogger("lib")
    begun_s = 1_800_000_000.0
    for at_s in (0, 1, 59, 60, 61):
        for logger, code, signal in (
            (exporter, "UNAVAILABLE", "traces"),
            (exporter, "UNAVAILABLE", "metrics"),
            (exporter, "DEADLINE_EXCEEDED", "traces"),
            (other, "UNAVAILABLE", "traces"),
        ):
            # Its last part is another each time.
            said = (signal, "collector:4317", code, at_s)
            record = logger.makeRecord(
                logger.name, logging.WARNING, "", 1, "%s %s %s %s", said, None
            )
            record.created = begun_s + at_s
            logger.handle(record)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [each["event"] for each in told if each["logger"] != "lib"] == [
        f"{signal} collector:4317 {code} {at_s}"
        for at_s in (0, 60)
        for code, signal in (
            ("UNAVAILABLE", "traces"),
            ("UNAVAILABLE", "metrics"),
            ("DEADLINE_EXCEEDED", "traces"),
        )
    ]
    assert sum(each["logger"] == "lib" for each in told) == 5


def test_exceptions_carry_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("gateway")
    structlog.get_logger().error("broke", exc_info=ValueError("why"))
    assert "ValueError: why" in json.loads(capsys.readouterr().err)["exception"]


def _full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def _unread_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("opened", [_full_disk, _unread_pipe])
def test_a_log_that_cannot_be_written_ends_nobody(
    opened: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    # What is left in it cannot be written at its end either.
    with suppress(OSError), os.fdopen(opened(), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure("gateway")
        for _ in range(1000):
            structlog.get_logger().info("request.accepted", request_id="r1")
            count += 1
    assert count == 1000


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="log level 'loud' is unknown; choose one of debug"):
        logs.configure("gateway", "loud")


@pytest.mark.parametrize(
    ("given", "traces", "metrics"),
    [
        ({}, "", ""),
        ({telemetry.ENDPOINT: "http://a"}, "http://a", "http://a"),
        ({telemetry.ENDPOINT: "http://a", "OTEL_TRACES_EXPORTER": "none"}, "", "http://a"),
        ({telemetry.ENDPOINT: "http://a", "OTEL_METRICS_EXPORTER": "prometheus"}, "http://a", ""),
        ({telemetry.ENDPOINT: "http://a", "OTEL_METRICS_EXPORTER": "x, otlp"}, *["http://a"] * 2),
        ({telemetry.ENDPOINT: "http://a", "OTEL_SDK_DISABLED": "True"}, "", ""),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"}, "http://b", ""),
        (
            {telemetry.ENDPOINT: "http://a", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c"},
            *("http://a", "http://c"),
        ),
    ],
)
def test_each_signal_goes_where_the_variables_say(
    given: dict[str, str], traces: str, metrics: str
) -> None:
    assert telemetry.endpoint_of(telemetry.TRACES, given) == traces
    assert telemetry.endpoint_of(telemetry.METRICS, given) == metrics


def test_no_endpoint_means_no_export() -> None:
    assert telemetry.configure("gateway", {}) is None


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "must be a number above 0, got '0'"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "must be a number above 0, got 'soon'"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "inf", "must be a number above 0, got 'inf'"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1", "must be a number above 0, got '-1'"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "must be 'gzip', if it is set, got 'zip'"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "must be 'grpc', if it is set"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such/file", "'/no/such/file' cannot be read"),
    ],
)
def test_what_nothing_could_be_sent_with_is_refused(name: str, value: str, rule: str) -> None:
    given = {telemetry.ENDPOINT: "http://localhost:4317", name: value}
    for signal in (telemetry.TRACES, telemetry.METRICS):
        with pytest.raises(ConfigError, match=f"{name}:? {rule}"):
            telemetry.endpoint_of(signal, given)
    assert telemetry.endpoint_of(telemetry.TRACES, {name: value}) == ""
    assert telemetry.endpoint_of(telemetry.TRACES, {**given, name: ""})


@pytest.mark.parametrize(
    "secret",
    [
        "Authorization: Bearer secret=",
        "api-key",
        "x=1,a b=secret",
        "x=secret;y",
        "x=\tsecret\u00e9",
    ],
)
def test_headers_that_are_none_are_refused_and_not_told(secret: str) -> None:
    """The SDK would write them into the log."""
    given = {telemetry.ENDPOINT: "http://localhost:4317", "OTEL_EXPORTER_OTLP_HEADERS": secret}
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS must be name=value") as found:
        telemetry.endpoint_of(telemetry.TRACES, given)
    assert "secret" not in str(found.value)
    for right in ("api-key=a%20b", "Authorization=Bearer abc==, x-y = 1,", ""):
        given["OTEL_EXPORTER_OTLP_HEADERS"] = right
        assert telemetry.endpoint_of(telemetry.TRACES, given)


def test_an_endpoint_without_the_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "EXPORTER", "opentelemetry.no_such.exporter")
    with pytest.raises(ConfigError, match=r"pip install 'kaiten\[otlp\]'"):
        telemetry.configure("gateway", {telemetry.ENDPOINT: "http://localhost:4317"})
