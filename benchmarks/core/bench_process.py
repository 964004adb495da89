"""What a step costs the scheduler's process: CPU time, and how soon a worker has its next plan.

    python -m benchmarks.core.bench_process [--loads 1x16,16x16,16x256] [--seconds 20] [--save]
                                               [--transports tcp,unix]

A real store, a scheduler's process as `kaiten scheduler` starts it, and workers that compute
nothing (`paced_workers`), each of so many rows that decode at 50 steps/s. Figures are of the time
in which everybody decodes. `cpu_ms_per_step` is the whole process's, the threads of gRPC too;
`starved` is the share of their time in which workers waited for a plan, `plan_ms` the time from a
result to the plan that came behind it. Of several transports each load is served by each in turn.

Goals: 0.6 ms at 16 rows; 16 workers of 256 rows, with a plan within 20 ms at the 99th percentile.
"""

import argparse
import asyncio
import json
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.recording import record
from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import LedgerLimits
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.processes import ServiceProcess

WORKERS: Final = "benchmarks.core.paced_workers"
STEP_MS: Final = 20
PROMPT_TOKENS: Final = 64
# More than there is time for.
MAX_TOKENS: Final = 12_000
# Everything as by default.
PLAIN: Final = {
    "lease_ttl_s": 1.5,
    "journal_s": 30,
    "heartbeat_interval_ms": 500,
    "worker_timeout_ms": 4000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many workers, and rows of each."""

    workers: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> "Load":
        workers, _, rows = text.partition("x")
        return cls(workers=int(workers), rows=int(rows))


async def fill(cluster: Cluster, load: Load) -> None:
    """A request for every row."""
    for number in range(load.workers * load.rows):
        prompt = [7 + (number * 131 + i * 17) % 1500 for i in range(PROMPT_TOKENS)]
        asked = SubmitRecord(
            id=f"default:{number}",
            tenant="default",
            n=1,
            prompt_token_ids=prompt,
            sampling=RowSampling(max_tokens=MAX_TOKENS, top_p=1.0, logprobs=-1),
        )
        await cluster.ledger.submit(asked, b"")


async def everybody_decodes(cluster: Cluster, load: Load) -> None:
    async def is_full() -> bool:
        state = await cluster.state()
        return state is not None and state.running == load.workers * load.rows

    await until(is_full, "a row for everybody", timeout_s=180)
    await asyncio.sleep(2.0)


def workers_of(cluster: Cluster, load: Load, out: Path) -> ServiceProcess:
    flags = {
        "scheduler": cluster.scheduler_addresses[0],
        "workers": load.workers,
        "slots": load.rows,
        "context_tokens": MAX_TOKENS + PROMPT_TOKENS,
        "step_ms": STEP_MS,
        "out": out,
    }
    if cluster.scheduler_addresses[0].startswith("unix:"):
        flags["sockets"] = out.parent
    return cluster.add("paced", WORKERS, flags)


async def serve(load: Load, seconds: float, transport: str) -> dict[str, object]:
    limits = LedgerLimits(requests_max=load.workers * load.rows)
    with tempfile.TemporaryDirectory(prefix="kaiten-process-") as scratch:
        out = Path(scratch) / "workers.json"
        flags, socket = dict[str, object](PLAIN), Path(scratch) / "scheduler.sock"
        if transport == "unix":
            flags["grpc_socket"] = socket
        cell = Cluster(Path(scratch), workers=0, scheduler_flags=flags, limits=limits)
        if transport == "unix":
            cell.scheduler_addresses = [f"unix:{socket}"]
        async with cell:
            cell.is_checked = False
            workers = workers_of(cell, load, out)
            workers.start()
            await cell.ready(workers=load.workers)
            await fill(cell, load)
            await everybody_decodes(cell, load)
            figures = await watched(cell, workers, seconds)
            workers.send(signal.SIGTERM)
            workers.join()
            told: dict[str, object] = json.loads(out.read_text())
            asked = {"transport": transport, "workers": load.workers, "rows": load.rows}
            return {**asked, **figures, **told}


async def watched(cell: Cluster, workers: ServiceProcess, seconds: float) -> dict[str, object]:
    """Of so many seconds: what the processes used, by record of the journal, which is a step."""
    used = {
        "cpu": psutil.Process(cell.schedulers[0].pid),
        "store_cpu": psutil.Process(cell.store.pid),
        "workers_cpu": psutil.Process(workers.pid),
    }
    workers.send(signal.SIGUSR1)
    before, began = {name: cpu_s(process) for name, process in used.items()}, await seq_of(cell)
    await asyncio.sleep(seconds)
    steps = await seq_of(cell) - began
    found = {
        f"{name}_ms_per_step": round((cpu_s(process) - before[name]) / steps * 1e3, 3)
        for name, process in used.items()
    }
    share = (cpu_s(used["cpu"]) - before["cpu"]) / seconds
    return {**found, "cpu_share": round(share, 3), "records": steps}


async def seq_of(cell: Cluster) -> int:
    lease = await cell.ledger.leader()
    assert lease is not None
    return lease.journal_seq


def cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--loads", default="1x16,16x16,16x256")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--transports", default="tcp", help="between scheduler and workers")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    loads = [Load.parse(text) for text in chosen.loads.split(",")]
    for _ in range(chosen.rounds):
        results = [
            asyncio.run(serve(load, chosen.seconds, transport))
            for load in loads
            for transport in chosen.transports.split(",")
        ]
        record("scheduler_process", {"results": results}, save=chosen.save)


if __name__ == "__main__":
    main()
