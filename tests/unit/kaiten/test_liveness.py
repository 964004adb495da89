"""What counts as hung: made of answers, states and a clock that the test moves."""

import os
from pathlib import Path

import pytest

from kaiten.local.liveness import BUSY_S, SILENT_S, STOPPED_S, Liveness, ProcessState, state_of

IDLE = ProcessState(cpu_s=7.0)
STOPPED = ProcessState(is_stopped=True, cpu_s=7.0)


def test_who_answers_lives_however_late() -> None:
    liveness = Liveness(0.0)
    for now_s in (4.0, 8.0, 12.0):
        assert liveness.silent(now_s - 0.1, IDLE) == ""
        liveness.answered(now_s)


def test_stopped_by_a_signal_it_is_not_waited_for_long() -> None:
    liveness = Liveness(10.0)
    assert liveness.silent(10.0 + STOPPED_S - 0.1, STOPPED) == ""
    assert liveness.silent(10.0 + STOPPED_S, STOPPED) == "stopped by a signal 2 s ago"


def test_stopped_and_continued_it_lives() -> None:
    liveness = Liveness(0.0)
    assert liveness.silent(STOPPED_S - 0.1, STOPPED) == ""
    assert liveness.silent(STOPPED_S, IDLE) == ""
    assert liveness.silent(STOPPED_S + 0.1, STOPPED) == ""


def test_without_an_answer_and_without_work_it_is_hung() -> None:
    liveness = Liveness(0.0)
    assert liveness.silent(SILENT_S - 0.1, IDLE) == ""
    assert liveness.silent(SILENT_S, IDLE) == "hung: no answer for 5 s"


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_at_work_it_is_given_longer(where: str) -> None:
    """A step, a compilation, a machine that has other work; but no loop for ever."""
    liveness = Liveness(0.0)

    def at(now_s: float) -> ProcessState:
        if where == "disk":
            return ProcessState(is_on_disk=True)
        return ProcessState(cpu_s=now_s * 0.1)

    assert liveness.silent(1.0, at(1.0)) == ""
    assert liveness.silent(BUSY_S - 1, at(BUSY_S - 1)) == ""
    assert liveness.silent(BUSY_S, at(BUSY_S)) == "hung: no answer for 60 s"


def test_what_the_kernel_says_is_read_past_any_name(tmp_path: Path) -> None:
    fields = "T 1 1 1 0 -1 0 1 0 0 0 250 50 0 0 20"
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (a) D (b)) {fields}")
    assert state_of(7, 100, tmp_path) == ProcessState(is_stopped=True, cpu_s=3.0)
    assert state_of(8, 100, tmp_path) is None


def test_of_this_process() -> None:
    state = state_of(os.getpid(), os.sysconf("SC_CLK_TCK"))
    assert state is not None
    assert not state.is_stopped
    assert state.cpu_s > 0
