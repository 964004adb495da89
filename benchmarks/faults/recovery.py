"""How long a leadership takes over as much as a cell accepts, with a standby at hand all the time.

    python -m benchmarks.faults.recovery [--prompt-tokens 4000000] [--each 8192] [--rounds 3]

Two schedulers, a worker with few slots, and so many tokens of prompts that wait. The leader is
killed and started again, as a supervisor would, `rounds` times. `recovered_ms`: from the kill until
the next leader has all of it and workers may register. `leaderships` is how many began per kill in
the time of several leases: more than one is ping-pong.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.recording import record
from ledger import LedgerLimits
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.processes import ServiceProcess

WORKERS: Final = "benchmarks.core.paced_workers"
# Everything as by default but the store's port.
PLAIN: Final = {
    "lease_ttl_s": 1.5,
    "journal_s": 30,
    "heartbeat_interval_ms": 500,
    "worker_timeout_ms": 4000,
}
MAX_TOKENS: Final = 4096
SLOTS: Final = 4
# Several leases, in which a leadership that cannot last would end.
WATCHED_S: Final = 6.0


async def fill(cluster: Cluster, prompt_tokens: int, each: int) -> int:
    """As many requests as fit, no two prompts alike; how many."""
    draw, count = random.Random(1), prompt_tokens // each
    for _ in range(count):
        prompt = [7 + draw.randrange(1500) for _ in range(each)]
        await cluster.submit(prompt=prompt, max_tokens=MAX_TOKENS)
        # Nobody reads what comes: it is the leaders who are watched.
        await cluster.answers.pop().close()
    return count


def started(cluster: Cluster) -> list[dict[str, Any]]:
    """Leaderships that have begun, of all schedulers, in order."""
    events = [
        event
        for process in cluster.schedulers
        for event in cluster.events(process, "leadership.started")
    ]
    return sorted(events, key=lambda event: int(event["epoch"]))


async def kill_once(cluster: Cluster, leader: ServiceProcess) -> dict[str, float]:
    """What the standby makes of it."""
    before = len(started(cluster))
    leader.kill()
    killed_s = time.monotonic()
    await until(lambda: len(started(cluster)) > before, "another leader", timeout_s=300)
    recovered_s = time.monotonic() - killed_s
    leader.start()
    await asyncio.sleep(WATCHED_S)
    began = len(started(cluster)) - before
    successor = await cluster.leader()
    return {
        "recovered_ms": round(1e3 * recovered_s),
        "leaderships": began,
        "resumed": max(event["resumed"] for event in started(cluster)[-began:]),
        "leader_mb": round(psutil.Process(successor.pid).memory_info().rss / 2**20),
    }


async def measure(folder: Path, prompt_tokens: int, each: int, rounds: int) -> dict[str, object]:
    flags: dict[str, object] = {
        "slots": SLOTS,
        "context_tokens": each + MAX_TOKENS,
        "out": folder / "workers.json",
    }
    limits = LedgerLimits(prompt_tokens_max=prompt_tokens)
    async with Cluster(
        folder, schedulers=2, workers=0, scheduler_flags=PLAIN, limits=limits
    ) as cluster:
        cluster.is_checked = False
        flags["scheduler"] = ",".join(cluster.scheduler_addresses)
        cluster.add("paced", WORKERS, flags).start()
        await cluster.ready(workers=1)
        count = await fill(cluster, prompt_tokens, each)
        rounds_told = []
        for _ in range(rounds):
            leader = await cluster.leader()
            standby = next(each for each in cluster.schedulers if each is not leader)
            await until(
                lambda standby=standby: cluster.events(standby, "leader.followed"), "a standby"
            )
            rounds_told.append(await kill_once(cluster, leader))
        return {"requests": count, "prompt_tokens": count * each, "rounds": rounds_told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompt-tokens", type=int, default=4_000_000)
    parser.add_argument("--each", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kaiten-recovery-") as folder:
        figures = asyncio.run(
            measure(Path(folder), chosen.prompt_tokens, chosen.each, chosen.rounds)
        )
    record("recovery", figures, save=chosen.save)


if __name__ == "__main__":
    main()
