"""What several servers cost beside one, how long nothing is promised when a primary is lost, and
what of that which was acknowledged is gone then.

    python -m benchmarks.core.bench_stores [--kinds cluster,sentinel] [--parts speeds,failovers]
        [--rounds 3] [--save]

All servers are processes of this machine, appendonly, fsync at every turn, so replicas take disk
and processor from the primary: beside hosts of their own this is the dear end. Speeds are medians
of rounds in which a single server and each setting have their turns. A pause is what one who
commits without rest waits, from the kill to the next commit that counts; of it a cluster and
Sentinels wait NODE_TIMEOUT_MS or DOWN_AFTER_MS before they believe it. `lost` are commits that
were acknowledged and that the next primary does not have: of a primary that is killed, frozen, or
killed when no replica has heard of it for BEHIND_S. It comes back when there is another.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from service_kit.errors import OutOfOrder, StaleLeader, Unavailable
from tests.support.answers import until
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
# A primary is lost: killed, frozen, or killed when its replicas are BEHIND_S behind.
HOW = ("killed", "frozen", "killed_behind")
BEHIND_S = 0.5
KINDS: dict[str, Callable[[Path], Group]] = {"cluster": StoreCluster, "sentinel": SentinelGroup}


async def speed(url: str, promise: dict[str, Any], pids: Sequence[int]) -> dict[str, float]:
    """Also what a token costs, in processor time: here, and in all the servers that have it."""
    limits = replace(LIMITS, **promise)
    ledger = await Ledger.connect(url, cell=CELL, limits=limits)
    await ledger.check()
    leader = await led(ledger)
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


@dataclass(slots=True)
class Writer:
    """Commits without rest, and remembers what was acknowledged."""

    ledger: Ledger
    leader: Leader
    acknowledged: int = 0
    # Of its own leadership's: the next primary does not have them.
    lost: int = 0
    longest_s: float = 0.0

    @property
    def seq(self) -> int:
        return self.acknowledged or self.leader.journal_seq

    async def write(self) -> None:
        """Until it is cancelled."""
        while True:
            started = time.perf_counter()
            await self.one_more()
            self.longest_s = max(self.longest_s, time.perf_counter() - started)

    async def one_more(self) -> None:
        """A commit that counts. A store that went back in time wants another election first."""
        while True:
            base = self.leader.journal_seq
            try:
                await self.ledger.commit(
                    self.leader, record_of(self.seq + 1, range(1, SEQUENCES + 1), base=base)
                )
            except (OutOfOrder, StaleLeader, Unavailable):
                await self.lead_again()
            else:
                self.acknowledged = self.seq + 1
                return

    async def lead_again(self) -> None:
        lease = await self.ledger.leader()
        if lease is not None and (lease.epoch, lease.nonce) == self.identity:
            self.lost += max(0, self.seq - lease.journal_seq)
        self.leader = await led(self.ledger)
        self.acknowledged = 0

    @property
    def identity(self) -> tuple[int, int]:
        return self.leader.epoch, self.leader.nonce


async def led(ledger: Ledger) -> Leader:
    seen = await ledger.leader()
    leader = await ledger.elect("bench", time.time_ns(), seen=seen, has_ended=True)
    assert leader is not None
    return leader


async def failover(group: Group, promise: str, how: str) -> tuple[float, int]:
    """Of one who commits all the time, when the primary is lost in the middle of it: the longest
    wait in s, and how many commits were acknowledged and are gone.
    """
    limits = replace(LIMITS, **PROMISES[promise])
    ledger = await Ledger.connect(group.url, cell=CELL, limits=limits)
    old, *replicas = group.shard()
    writer = Writer(ledger, await led(ledger))
    writing = asyncio.create_task(writer.write())
    await until(lambda: writer.acknowledged > 0, "a commit")
    await asyncio.sleep(BEHIND_S)
    if how == "killed_behind":
        for replica in replicas:
            await asyncio.to_thread(group.cut_off, old, replica)
        await asyncio.sleep(BEHIND_S)
    writer.longest_s = 0.0
    old.freeze() if how == "frozen" else old.kill()
    for replica in replicas:
        replica.thaw()
    await asyncio.to_thread(group.promoted, old)
    # As who watches it does: with one replica a promise cannot be kept before.
    old.thaw() if how == "frozen" else old.launch()
    seen = writer.seq, writer.leader
    await until(
        lambda: writing.done() or (writer.seq, writer.leader) != seen,
        "a commit at the next primary",
    )
    await asyncio.sleep(BEHIND_S)
    writing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await writing
    await ledger.close()
    return writer.longest_s, writer.lost


def speeds(server: StoreServer, kind: str, group: Group, rounds: int) -> dict[str, object]:
    """Medians of rounds in which each has its turn, so that a busy machine is busy for all."""
    group.heal()
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        shard = group.shard()
        places = [("single", "", server.url, [server])]
        places += [(kind, promise, group.url, shard) for promise in PROMISES]
        for name, promise, url, servers in places:
            # What the one before left would be in the way of who comes later.
            group.admin(servers[0]).flushall()
            pids = [each.pid for each in servers]
            numbers = asyncio.run(speed(url, PROMISES[promise], pids))
            for each, number in numbers.items():
                taken.setdefault("_".join(filter(None, (name, promise, each))), []).append(number)
    return {name: round(statistics.median(numbers), 3) for name, numbers in taken.items()}


def failovers(kind: str, group: Group, rounds: int) -> dict[str, object]:
    """Of every setting and way: pauses and losses, smallest first."""
    taken: dict[str, list[tuple[float, int]]] = {}
    for _ in range(rounds):
        for promise in PROMISES:
            for how in HOW:
                name = "_".join(filter(None, (kind, promise, how)))
                # In this thread: a server ends with the thread that started it.
                group.heal()
                told = asyncio.run(failover(group, promise, how))
                taken.setdefault(name, []).append(told)
                print(name, told, flush=True)
    found: dict[str, object] = {}
    for name, pairs in taken.items():
        pauses, losses = zip(*pairs, strict=True)
        found[f"{name}_pause_s"] = [round(each, 2) for each in sorted(pauses)]
        found[f"{name}_pause_s_p50"] = round(statistics.median(pauses), 2)
        found[f"{name}_lost"] = sorted(losses)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--parts", default="speeds,failovers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    options = parser.parse_args()
    figures: dict[str, object] = {
        "rounds": options.rounds,
        "sequences": SEQUENCES,
        "cluster_node_timeout_ms": NODE_TIMEOUT_MS,
        "sentinel_down_after_ms": DOWN_AFTER_MS,
        "behind_s": BEHIND_S,
    }
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        server = stack.enter_context(StoreServer(folder / "single"))
        for kind in options.kinds.split(","):
            group = stack.enter_context(KINDS[kind](folder / kind))
            if "speeds" in options.parts.split(","):
                figures |= speeds(server, kind, group, options.rounds)
            if "failovers" in options.parts.split(","):
                figures |= failovers(kind, group, options.rounds)
    figures["load_after"] = round(os.getloadavg()[0], 1)
    record("stores", figures, save=options.save)


if __name__ == "__main__":
    main()
