"""Short requests, for twice as long as their results live: what the store needs.

    python -m benchmarks.core.bench_results [--rate 500] [--ttl 60] [--save]

A real leader and workers that compute nothing (`paced_workers`); every request is one token. The
load is 1.2 million of them in the ten minutes that results live, in 512 MiB, made smaller: the
bound is in proportion to rate and TTL, so the same share of it is taken. None may be refused;
`kept_s` is how long the last of them is kept.
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from pathlib import Path
from typing import Final

import psutil
from redis.asyncio import Redis

from benchmarks.core.bench_process import PLAIN, WORKERS, cpu_s
from benchmarks.recording import record
from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import Ledger, LedgerLimits
from tests.support.answers import until
from tests.support.cluster import Cluster

REQUESTS: Final = 1_200_000
BYTES_MAX: Final = 512 << 20
ASKERS: Final = 64
LIVE_MAX: Final = 2048


def id_of(number: int) -> str:
    return f"default:00000000-0000-0000-0000-{number:012d}"


async def ask(ledger: Ledger, count: int, rate: float) -> None:
    """All of them when they are due, and so many at a time."""
    numbers, began_s = itertools.count(), time.monotonic()
    sampling = RowSampling(max_tokens=1, top_p=1.0, logprobs=-1)

    async def asker() -> None:
        while (number := next(numbers)) < count:
            due_s = began_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            asked = SubmitRecord(
                id=id_of(number),
                tenant="default",
                n=1,
                prompt_token_ids=[number % 30_000],
                sampling=sampling,
            )
            await ledger.submit(asked, b"h" * 32)
            if number % ASKERS == 0:
                await until(lambda: is_below(ledger), "fewer are live", timeout_s=600)

    async def is_below(ledger: Ledger) -> bool:
        return (await ledger.load()).choices < LIVE_MAX

    await asyncio.gather(*(asker() for _ in range(ASKERS)))
    await until(lambda: is_idle(ledger), "all have ended", timeout_s=600)


async def is_idle(ledger: Ledger) -> bool:
    return not (await ledger.load()).choices


async def dataset(client: Redis) -> int:
    return int((await client.info("memory"))["used_memory_dataset"])


async def measure(folder: Path, rate: int, ttl_s: int) -> dict[str, object]:
    count, bytes_max = 2 * rate * ttl_s, BYTES_MAX * rate * ttl_s // REQUESTS
    limits = LedgerLimits(result_ttl_s=ttl_s, results_bytes_max=bytes_max)
    flags = {**PLAIN, "result_ttl_s": ttl_s, "journal_mb": 1}
    async with Cluster(folder, workers=0, scheduler_flags=flags, limits=limits) as cluster:
        cluster.is_checked = False
        worker = {"slots": 256, "step_ms": 5, "out": folder / "workers.json"}
        worker["scheduler"] = cluster.scheduler_addresses[0]
        cluster.add("paced", WORKERS, worker).start()
        await cluster.ready(workers=1)
        scheduler = psutil.Process(cluster.schedulers[0].pid)
        async with Redis.from_url(cluster.store.url) as client:
            before, used_s = await dataset(client), cpu_s(scheduler)
            began = time.monotonic()
            peak, watching = [0], asyncio.create_task(ask(cluster.ledger, count, rate))
            while not watching.done():
                await asyncio.sleep(0.25)
                peak[0] = max(peak[0], await dataset(client) - before)
            await watching
            taken_s = time.monotonic() - began
            return {
                "requests": count,
                "ttl_s": ttl_s,
                "requests_per_s": round(count / taken_s),
                "kept_s": await client.ttl(cluster.ledger.keys.result(id_of(count - 1))),
                "bytes_max": bytes_max,
                "peak_bytes": peak[0],
                "kept": await client.dbsize(),
                "scheduler_cpu_ms_per_request": round(1e3 * (cpu_s(scheduler) - used_s) / count, 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rate", type=int, default=500, help="requests per second")
    parser.add_argument("--ttl", type=int, default=60, help="seconds")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kaiten-results-") as folder:
        figures = asyncio.run(measure(Path(folder), chosen.rate, chosen.ttl))
    record("results", figures, save=chosen.save)


if __name__ == "__main__":
    main()
