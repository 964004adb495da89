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


def test_no_endpoint_means_no_export() -> None:
    assert telemetry.configure("gateway", {}) is None
    unwanted = {telemetry.ENDPOINT: "http://localhost:4317", telemetry.SWITCH: "none"}
    assert telemetry.configure("gateway", unwanted) is None


def test_an_endpoint_without_the_exporter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "EXPORTER", "opentelemetry.no_such.exporter")
    with pytest.raises(ConfigError, match=r"pip install 'kaiten\[otlp\]'"):
        telemetry.configure("gateway", {telemetry.ENDPOINT: "http://localhost:4317"})
