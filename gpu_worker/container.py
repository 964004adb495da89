"""What the machine, or the container that this process is in, lets it have."""

import os
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")


def free_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """What this process may still take: the machine's available memory or its cgroup's rest."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (available := _counted(Path("/proc/meminfo")).get("MemAvailable:")) is not None:
        free = available * 1024
    if (cgroup := _cgroup(cgroups)) is not None:
        most, used = cgroup
        free = max(min(free, most - used), 0)
    return free


def total_memory_bytes(cgroups: Path = CGROUPS) -> int:
    """What this process is ended beyond: the machine's memory or its cgroup's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cgroup = _cgroup(cgroups)
    return total if cgroup is None else min(total, cgroup[0])


def _cgroup(folder: Path) -> tuple[int, int] | None:
    """Its limit and what it uses, as a container sees it, version 2 or 1; None: there is no limit.

    Pages of files count as used there, and the checkpoint was just read: they are given back as
    soon as somebody wants them.
    """
    for inside, (limit, current, prefix) in {
        folder: ("memory.max", "memory.current", ""),
        folder / "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }.items():
        most, used = (_lines(inside / name) for name in (limit, current))
        if most and used and most[0].strip().isdigit():
            pages = _counted(inside / "memory.stat")
            of_files = sum(pages.get(f"{prefix}{kind}active_file", 0) for kind in ("", "in"))
            return int(most[0]), int(used[0]) - of_files
    return None


def _counted(path: Path) -> dict[str, int]:
    """Of lines of a name, a number and perhaps its unit."""
    parts = (line.split() for line in _lines(path))
    return {name: int(count) for name, count, *_ in parts if count.isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
