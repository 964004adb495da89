"""How long streams stand still when their leader is gone, in milliseconds.

    python -m benchmarks.faults.takeover [--rounds 5] [--save]

`serve`: `kaiten serve` with the shipped model, its leader killed while clients read: the longest a
client waits for its next token, the gateway and the prompt computed again included. `killed` and
`stopped`: two schedulers, a mock worker of 10 ms per step, and who reads the ledger as a gateway
does; the leader is killed, or put aside (SIGSTOP), as a lost host is to others. `alone`: the only
scheduler is killed and started again at once. `hung`: a step of one of two workers does not end
while the worker says that it lives. Goals: 1,500 where a process ends, 3,000 where one is lost,
5,000 where one hangs.
"""

import argparse
import asyncio
import itertools
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from benchmarks.recording import record
from kaiten.client import AsyncClient
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.served import Served

CLIENTS: Final = 4
# Everything as by default but the store's port; nobody waits long for who is silent.
PLAIN: Final = {"lease_ttl_s": 1.5, "heartbeat_interval_ms": 500, "worker_timeout_ms": 4000}


async def longest_wait_s(served: Served) -> float:
    """Kill the leader under clients that read; the longest wait of any."""
    async with AsyncClient(served.address, resume_s=60.0) as client:
        heard_s: list[list[float]] = [[] for _ in range(CLIENTS)]

        async def read(index: int) -> None:
            generation = client.generate(
                "Once upon a time", seed=index, max_tokens=400, ignore_eos=True
            )
            async for _ in generation:
                heard_s[index].append(time.monotonic())

        reading = [asyncio.create_task(read(index)) for index in range(CLIENTS)]
        await until(lambda: min(map(len, heard_s)) > 20, "everybody reads")
        leader = await asyncio.to_thread(served.leader)
        leader.kill()
        killed_s = time.monotonic()
        await asyncio.gather(*reading)
    # From the first token that came after the death on, and back to the one before it.
    return max(
        after - before
        for each in heard_s
        for before, after in itertools.pairwise(each)
        if after > killed_s
    )


async def by_serve(folder: Path, rounds: int) -> list[float]:
    with Served(folder) as served:
        waits_s = []
        for _ in range(rounds):
            waits_s.append(await longest_wait_s(served))
            # Whoever was killed stands by again.
            await until(lambda: len(served.children("scheduler")) == 2, "two schedulers")
            await asyncio.sleep(2.0)
        return waits_s


async def by_cluster(
    folder: Path, rounds: int, end: Callable[[Cluster], Awaitable[None]], *, count: int
) -> list[float]:
    waits_s = []
    for number in range(rounds):
        async with Cluster(
            folder / str(number),
            schedulers=count,
            scheduler_flags=PLAIN,
            worker_flags={"step_ms": 10},
        ) as cluster:
            if count > 1:
                await until(
                    lambda cluster=cluster: any(
                        cluster.events(each, "leader.followed") for each in cluster.schedulers
                    ),
                    "the standby follows",
                )
            answers = await cluster.submit_many(CLIENTS, max_tokens=600)
            for answer in answers:
                await answer.has_tokens(20)
            await end(cluster)
            await cluster.all_done()
            waits_s.append(max(answer.gap_s_max for answer in answers))
            for process in cluster.schedulers:
                if process.is_alive:
                    process.send(signal.SIGCONT)
    return waits_s


async def by_hanging(folder: Path, rounds: int) -> list[float]:
    waits_s = []
    for number in range(rounds):
        async with Cluster(
            folder / str(number), scheduler_flags=PLAIN, worker_flags={"step_ms": 10}
        ) as cluster:
            cluster.add_worker({"step_ms": 10, "gates": cluster.gates(100)}).start()
            await cluster.ready(workers=2)
            answers = await cluster.submit_many(2 * CLIENTS, max_tokens=200)
            await cluster.all_done()
            waits_s.append(max(answer.gap_s_max for answer in answers))
            cluster.open_gates()
    return waits_s


async def kill(cluster: Cluster) -> None:
    (await cluster.leader()).send(signal.SIGKILL)


async def put_aside(cluster: Cluster) -> None:
    (await cluster.leader()).send(signal.SIGSTOP)


async def restart(cluster: Cluster) -> None:
    leader = await cluster.leader()
    leader.kill()
    leader.start()


def summary(waits_s: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(1000 * statistics.median(waits_s)),
        "most_ms": round(1000 * max(waits_s)),
        "rounds": len(waits_s),
    }


async def measure(folder: Path, rounds: int) -> dict[str, object]:
    return {
        "serve": summary(await by_serve(folder / "serve", rounds)),
        "killed": summary(await by_cluster(folder / "killed", rounds, kill, count=2)),
        "stopped": summary(await by_cluster(folder / "stopped", rounds, put_aside, count=2)),
        "alone": summary(await by_cluster(folder / "alone", rounds, restart, count=1)),
        "hung": summary(await by_hanging(folder / "hung", rounds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), chosen.rounds))
    record("takeover", figures, save=chosen.save)


if __name__ == "__main__":
    main()
