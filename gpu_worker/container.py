"""What the machine, or the container that this process is in, lets it have."""

import os
from math import inf
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


def core_count(cgroups: Path = CGROUPS) -> int:
    """Cores that this process has whole. Compute threads wait for each other at every operator: of
    more than the container's share of time is enough for, all stand still once it is used up.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), _cpu_quota(cgroups))))


def _cpu_quota(folder: Path) -> float:
    """Of cores, by cgroups of version 2 or 1; infinite: there is none."""
    before = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    files = [folder / "cpu.max", *(folder / "cpu" / name for name in before)]
    told = " ".join(line for path in files for line in _lines(path)).split()
    return int(told[0]) / int(told[1]) if told and told[0].isdigit() else inf


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
