"""What several servers cost beside one, and how long nothing is promised when a primary is lost.

    python -m benchmarks.core.bench_stores [--save]

All servers are processes of this machine, appendonly, fsync at every turn, so replicas take disk
and processor from the primary: beside hosts of their own this is the dear end. A pause is what one
who commits without rest waits, from the kill to the next commit that counts; of it a cluster and
Sentinels wait NODE_TIMEOUT_MS or DOWN_AFTER_MS before they believe it.
"""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.core.bench_ledger import (
    COMMITS,
    SEQUENCES,
    one_by_one,
    pipelined,
    record_of,
    submits,
)
from benchmarks.recording import record
from ledger import Leader, Ledger, LedgerLimits
from tests.support.store_group import (
    DOWN_AFTER_MS,
    NODE_TIMEOUT_MS,
    Group,
    SentinelGroup,
    StoreCluster,
)
from tests.support.store_server import StoreServer

CELL = "0"
LIMITS = LedgerLimits(retry_s=60.0)
# Replicas that must have a promise, and where.
PROMISES: dict[str, dict[str, Any]] = {
    "": {},
    "replicas_1_memory": {"replicas_min": 1, "replicas_ack": "memory"},
    "replicas_1_disk": {"replicas_min": 1, "replicas_ack": "disk"},
}
PAUSES = 3
ROUNDS = 3
KINDS: dict[str, Callable[[Path], Group]] = {"cluster": StoreCluster, "sentinel": SentinelGroup}


async def speed(url: str, promise: dict[str, Any], pids: Sequence[int]) -> dict[str, float]:
    """Also what a token costs, in processor time: here, and in all the servers that have it."""
    limits = replace(LIMITS, **promise)
    ledger = await Ledger.connect(url, cell=CELL, limits=limits)
    await ledger.check()
    leader = await ledger.elect("bench", time.time_ns(), seen=await ledger.leader(), has_ended=True)
    assert leader is not None
    numbers = await one_by_one(ledger, leader)
    ours_s, theirs_s = time.process_time(), cpu_s(pids)
    numbers |= await pipelined(ledger, leader, leader.journal_seq + COMMITS + 1)
    tokens = COMMITS * SEQUENCES
    numbers["client_cpu_us_per_token"] = (time.process_time() - ours_s) * 1e6 / tokens
    numbers["servers_cpu_us_per_token"] = (cpu_s(pids) - theirs_s) * 1e6 / tokens
    numbers |= await submits(ledger, leader.nonce)
    await ledger.close()
    return numbers


def cpu_s(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def pause_s(group: Group, *, is_killed: bool) -> float:
    """Of one who commits all the time, when the primary is lost in the middle of it."""
    await asyncio.to_thread(group.heal)
    ledger = await Ledger.connect(group.url, cell=CELL, limits=LIMITS)
    leader = await ledger.elect("bench", time.time_ns(), seen=await ledger.leader(), has_ended=True)
    assert leader is not None
    longest = 0.0
    seq = leader.journal_seq
    old = group.primary
    hurt_at = time.perf_counter() + 0.5
    is_hurt = False
    while not is_hurt or time.perf_counter() < hurt_at + 1.0:
        if not is_hurt and time.perf_counter() > hurt_at:
            old.kill() if is_killed else old.freeze()
            is_hurt = True
        started = time.perf_counter()
        seq, leader = await one_more(ledger, leader, seq)
        longest = max(longest, time.perf_counter() - started)
    await ledger.close()
    return longest


async def one_more(ledger: Ledger, leader: Leader, seq: int) -> tuple[int, Leader]:
    """A commit that counts. A store that went back in time wants another election first."""
    while True:
        try:
            await ledger.commit(leader, record_of(seq + 1, range(1, 257), base=leader.journal_seq))
            return seq + 1, leader
        except Exception:
            found = await ledger.elect(
                "bench", time.time_ns(), seen=await ledger.leader(), has_ended=True
            )
            assert found is not None
            leader, seq = found, found.journal_seq


def speeds(server: StoreServer, groups: Mapping[str, Group]) -> dict[str, object]:
    """Medians of rounds in which each has its turn, so that a busy machine is busy for all."""
    places = [("single", "", server.url, [server])]
    for kind, group in groups.items():
        group.heal()
        places += [(kind, promise, group.url, group.shard()) for promise in PROMISES]
    taken: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for kind, promise, url, servers in places:
            numbers = asyncio.run(speed(url, PROMISES[promise], [each.pid for each in servers]))
            for each, number in numbers.items():
                taken.setdefault("_".join(filter(None, (kind, promise, each))), []).append(number)
    return {name: round(statistics.median(numbers), 3) for name, numbers in taken.items()}


def pauses(groups: Mapping[str, Group]) -> dict[str, object]:
    found: dict[str, object] = {}
    for kind, group in groups.items():
        for how, is_killed in (("killed", True), ("frozen", False)):
            taken = [asyncio.run(pause_s(group, is_killed=is_killed)) for _ in range(PAUSES)]
            found[f"{kind}_pause_s_{how}"] = [round(each, 2) for each in sorted(taken)]
            found[f"{kind}_pause_s_{how}_p50"] = round(statistics.median(taken), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    options = parser.parse_args()
    figures: dict[str, object] = {
        "cluster_node_timeout_ms": NODE_TIMEOUT_MS, "sentinel_down_after_ms": DOWN_AFTER_MS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(StoreServer(folder / "single"))
        groups: dict[str, Group] = {
            kind: stack.enter_context(make(folder / kind)) for kind, make in KINDS.items()
        }
        figures |= speeds(server, groups)
        figures |= pauses(groups)
    record("stores", figures, save=options.save)


if __name__ == "__main__":
    main()
