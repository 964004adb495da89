"""Hung or only slow? What a process answers, and what the kernel says of it. Judged without I/O."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kaiten.local.log_reading import Activity, activity_of

# Stopped by a signal it cannot answer, and nobody's work goes on.
STOPPED_S: Final = 2.0
# Neither answering nor computing: it waits for what will not come.
SILENT_S: Final = 5.0
# Computing without an answer. Loops end, and a machine may have other work.
BUSY_S: Final = 60.0
# Between two looks. Who did not look for longer was put aside: nobody's silence is known then.
AWAY_S: Final = 4.0
# Of a core. Less is what a process takes whose threads only look at their clocks.
BUSY_CORES: Final = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """Of a process that does not answer. `cpu_s`: processor time of all its threads so far."""

    is_stopped: bool = False
    is_on_disk: bool = False
    cpu_s: float = 0.0


class Liveness:
    """What is known of one process since it last answered. Seconds are the caller's clock."""

    def __init__(self, now_s: float) -> None:
        self.answered(now_s)

    def answered(self, now_s: float) -> None:
        self._answered_s = self._ran_s = self._looked_s = now_s
        self._first: ProcessState | None = None

    def silent(self, now_s: float, state: ProcessState) -> str:
        """Why it must be ended; empty while it may be waited for."""
        if now_s - self._looked_s > AWAY_S:
            self.answered(now_s)
        self._looked_s = now_s
        if self._first is None:
            self._first = state
        if not state.is_stopped:
            self._ran_s = now_s
        elif now_s - self._ran_s >= STOPPED_S:
            return f"stopped by a signal {now_s - self._ran_s:.0f} s ago"
        silent_s = now_s - self._answered_s
        is_busy = state.is_on_disk or state.cpu_s - self._first.cpu_s >= BUSY_CORES * silent_s
        if silent_s >= (BUSY_S if is_busy else SILENT_S):
            return f"hung: no answer for {silent_s:.0f} s"
        return ""


class StartProgress:
    """Of one process: how far it has come. A large model may take any time, step by step."""

    def __init__(self, now_s: float) -> None:
        self._did: Activity | None = None
        self._moved_s = now_s

    def idle_s(self, now_s: float, log: str) -> float:
        """How long it has done nothing new, by its log; to wait, and say so, is nothing."""
        doing = activity_of(log)
        if doing is not None and not doing.is_waiting and doing != self._did:
            self._did, self._moved_s = doing, now_s
        return now_s - self._moved_s


def state_of(pid: int, ticks_per_s: int, proc: Path = Path("/proc")) -> ProcessState | None:
    """None: it has ended, or this system does not say."""
    try:
        said = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The name before may hold anything, a parenthesis too: proc(5).
    state, *rest = said.rpartition(")")[2].split()
    return ProcessState(
        is_stopped=state == "T",
        is_on_disk=state == "D",
        cpu_s=(int(rest[10]) + int(rest[11])) / ticks_per_s,
    )
