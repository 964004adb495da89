"""What a process says of its start and its end, read from its log."""

import pytest

from kaiten.local import log_reading

REFUSED = """\
{"event": "settings", "level": "info"}
{"event": "service.refused", "level": "error", "reason": "port 1 is taken; choose another"}
"""
LOGGED = """\
{"event": "service.crashed", "level": "critical", "exception": "Traceback …\\nValueError: boom"}
{"event": "service.stopped", "level": "info"}
"""
NOTED = """\
{"event": "service.crashed", "level": "critical", "reason": "DeviceLost: the GPU failed", \
"exception": "Traceback …\\nDeviceLost: the GPU failed\\nwhile plan 7 was run"}
"""
TRACE = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
ModuleNotFoundError: No module named 'torch'
"""
# Of a store whose files a newer one has written.
NEWER = """\
7:M 28 Nov 2026 20:40:53.467 * Reading RDB base file on AOF loading...
7:M 28 Nov 2026 20:40:53.467 # Can't handle RDB format version 99
7:M 28 Nov 2026 20:40:53.467 # Error reading the RDB base file a.1.base.rdb, AOF loading aborted
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (REFUSED, "port 1 is taken; choose another"),
        (LOGGED, "ValueError: boom"),
        (NOTED, "DeviceLost: the GPU failed"),
        ('{"event": "model.refused", "level": "error"}', "model.refused"),
        (TRACE, "ModuleNotFoundError: No module named 'torch'"),
        (NEWER, "7:M 28 Nov 2026 20:40:53.467 # Can't handle RDB format version 99"),
        ("{not json\n\n", "{not json"),
        ('{"event": "settings", "model": "' + "x" * 5000, '{"event": "settings", "model": "'),
        ('{"event": "store.waiting", "reason": "refused"}', "store.waiting: refused"),
        ("", ""),
    ],
)
def test_the_cause_of_a_death(log: str, cause: str) -> None:
    said = log_reading.cause_of(log)
    assert said.startswith(cause)
    assert said.removeprefix(cause).strip("x") == ""
    assert len(said) <= 300


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        ("worker-0 ended with signal SIGKILL", "--dtype bf16"),
        ("scheduler ended with signal SIGKILL", "there is none left"),
        ("worker-0 ended with exit code 1: RuntimeError: can't start new thread", "ulimit -u"),
        ("[Errno 11] Resource temporarily unavailable", "ulimit -u"),
        ("store ended with exit code 1: # Can't handle RDB format version 99", "at least as new"),
        ("port 1 is taken; choose another", ""),
    ],
)
def test_the_fix_of_a_cause(cause: str, fix: str) -> None:
    assert fix in log_reading.fix_of(cause)
    assert bool(log_reading.fix_of(cause)) == bool(fix)


@pytest.mark.parametrize("name", ["gateway", "scheduler", "standby", "store"])
def test_a_dtype_is_of_workers(name: str) -> None:
    assert "dtype" not in log_reading.fix_of(f"{name} ended with signal SIGKILL")


def test_what_a_starting_process_does() -> None:
    log = '{"event": "a"}\n{"event": "weights.loading", "done": 2, "total": 9}\nnoise\n'
    assert log_reading.activity_of(log) == log_reading.Activity(
        event="weights.loading", done=2, total=9
    )
    phase = log_reading.activity_of('{"event": "worker.phase", "phase": "load"}')
    assert phase == log_reading.Activity(event="worker.phase load", done=0, total=0)
    waiting = log_reading.activity_of('{"event": "store.waiting", "reason": "it [may] come"}')
    assert waiting == log_reading.Activity(
        event="store.waiting: it [may] come", is_waiting=True, done=0, total=0
    )
    assert log_reading.activity_of("noise\n") is None
