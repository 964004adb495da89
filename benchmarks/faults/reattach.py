"""A thousand clients come back at once beside streams that run: how long do those pause?

    python -m benchmarks.faults.reattach [--streams 256] [--clients 1000] [--save]

A store, a scheduler, two mock workers of two steps a second and a gateway, each its own process.
`--streams` clients follow what they asked for; then so many others, all from another process,
attach at once to requests that run, from position 0. `pause_ms` is the longest a stream waited for
its next token while they came, less a step: the goal is 200. `reads` are the gateway's reads of the
journal's tail meanwhile, as the store counts the script; the goal is 10.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Redis

from benchmarks.core.bench_process import PLAIN
from benchmarks.recording import record
from kaiten.client import AsyncClient
from kaiten.mini import CHECKPOINT
from ledger import LedgerLimits
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.processes import GATEWAY

WORKERS: Final = 2
STEP_MS: Final = 500
MAX_TOKENS: Final = 400
# Before anybody comes back, so many tokens are there to be read again.
TOKENS_BEFORE: Final = 8
# Streams of one connection.
CLIENTS_EACH: Final = 250


async def read(client: AsyncClient, seed: int, heard_s: list[float]) -> None:
    """One stream, token by token."""
    generation = client.generate(
        token_ids=[7 + seed % 1500, 9, 11], seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    async for _ in generation:
        heard_s += [time.monotonic()]


async def storm(address: str, names: Sequence[str]) -> float:
    """Everybody attaches at once; the seconds until the last of them has heard something."""
    clients = [AsyncClient(address) for _ in range(0, len(names), CLIENTS_EACH)]
    began_s = time.monotonic()

    async def attach(index: int, name: str) -> None:
        generation = clients[index // CLIENTS_EACH].attach(name, keep_running=True)
        await anext(generation)
        await generation.close()

    await asyncio.gather(*(attach(index, name) for index, name in enumerate(names)))
    taken_s = time.monotonic() - began_s
    for client in clients:
        await client.close()
    return taken_s


async def in_another_process(address: str, names: Sequence[str]) -> float:
    command = [sys.executable, "-m", "benchmarks.faults.reattach", "--storm", address]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate(json.dumps(names).encode())
    if process.returncode:
        raise RuntimeError(f"the clients ended with {process.returncode}")
    return float(said)


async def reads_of(client: Redis) -> int:
    """XRANGE is called by the history script, and by nobody else while one leader leads."""
    stats: dict[str, Any] = await client.info("commandstats")
    return int(stats.get("cmdstat_xrange", {"calls": 0})["calls"])


async def measure(folder: Path, streams: int, count: int) -> dict[str, object]:
    rows = -(-(streams + count) // WORKERS)
    worker = {
        "slots": rows,
        "step_ms": STEP_MS,
        "kv_blocks": rows * 32,
        "step_tokens": rows + 2048,
    }
    limits = LedgerLimits(requests_max=streams + count)
    async with Cluster(
        folder,
        workers=WORKERS,
        scheduler_flags=PLAIN,
        worker_flags=worker,
        limits=limits,
    ) as cluster:
        cluster.is_checked = False
        port = cluster.hold_port()
        flags = {"redis_url": cluster.store.url, "model": CHECKPOINT, "grpc_port": port.number}
        cluster.add("gateway", GATEWAY, {**flags, "http_port": 0}).start()
        names = []
        for _ in range(count):
            answer = await cluster.submit(max_tokens=MAX_TOKENS)
            names.append(answer.record.id.partition(":")[2])
            await cluster.answers.pop().close()
        heard_s: list[list[float]] = [[] for _ in range(streams)]
        async with AsyncClient(port.address, resume_s=60.0) as client:
            reading = [
                asyncio.create_task(read(client, seed, heard)) for seed, heard in enumerate(heard_s)
            ]
            await until(lambda: min(map(len, heard_s)) > TOKENS_BEFORE, "all read", timeout_s=300)
            async with Redis.from_url(cluster.store.url) as store:
                quiet_s, before = longest_s(heard_s, 0.0), await reads_of(store)
                began_s = time.monotonic()
                taken_s = await in_another_process(port.address, names)
                await asyncio.sleep(2.0)
                reads = await reads_of(store) - before
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        return {
            "streams": streams,
            "clients": count,
            "attached_s": round(taken_s, 2),
            "pause_ms": round(1e3 * longest_s(heard_s, began_s)) - STEP_MS,
            "pause_ms_before": round(1e3 * quiet_s) - STEP_MS,
            "reads": reads,
        }


def longest_s(heard_s: list[list[float]], since_s: float) -> float:
    """Between two tokens of a stream, the first few of it left out: its prompt came between."""
    return max(
        after - before
        for each in heard_s
        for before, after in itertools.pairwise(each[4:])
        if after > since_s
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--storm", help="only the clients, for the gateway there")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    if chosen.storm:
        print(asyncio.run(storm(chosen.storm, json.load(sys.stdin))))
        return
    with tempfile.TemporaryDirectory(prefix="kaiten-reattach-") as folder:
        figures = asyncio.run(measure(Path(folder), chosen.streams, chosen.clients))
    record("reattach", figures, save=chosen.save)


if __name__ == "__main__":
    main()
