"""What the services cost: gateway, ledger, scheduler and gRPC around a worker whose model is a
function.

    python -m benchmarks.serving.chain [--save]

1. One request over a worker that sleeps 2.6 ms per step: the time per output token beyond these 2.6
ms is the chain's. 2. 256 requests at once over a worker whose steps cost nothing: how many tokens
per second the chain carries from the scheduler's decision to the client's socket, everything on
this machine, the clients included.

The clients read frames without parsing them (only the last one of each stream), so that they cost
as little as possible.
"""

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.recording import ROOT, record
from kaiten.local.ports import HeldPort
from kaiten.mini import CHECKPOINT
from kaiten.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from tests.support.store_server import StoreServer

STEP_MS = 2.6
ONE_TOKENS = 400
CROWD, CROWD_TOKENS = 256, 400
READY_S_MAX = 60.0
METHOD = "/kaiten.v1.InferenceService/Generate"


@contextlib.contextmanager
def chain(step_ms: float) -> Iterator[tuple[str, dict[str, int]]]:
    """The gateway's address and the pids of a chain over a mock worker."""
    model = ["--model", str(CHECKPOINT)]
    with (
        HeldPort() as grpc_port,
        HeldPort() as scheduler_port,
        tempfile.TemporaryDirectory(prefix="kaiten-chain-") as folder,
        StoreServer(Path(folder) / "store") as store,
        (Path(folder) / "log").open("w") as log,
    ):
        redis = ["--redis-url", store.url]
        commands = {
            "scheduler": ["scheduler_svc", *redis, "--grpc-port", str(scheduler_port.number)],
            "worker": [
                "tests.fakes.mock_worker", *model, "--scheduler", scheduler_port.address,
                "--step-ms", str(step_ms), "--slots", str(CROWD), "--step-tokens", "4096",
                "--kv-blocks", "16384",
            ],
            "gateway": [
                "gateway", *model, *redis, "--grpc-port", str(grpc_port.number), "--http-port", "0",
            ],
        }  # fmt: skip
        processes = {
            name: subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stderr=log)
            for name, command in commands.items()
        }
        try:
            yield (
                grpc_port.address,
                {name: process.pid for name, process in processes.items()},
            )
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait(timeout=30)


async def ready(channel: Any) -> None:
    give_up_at = time.monotonic() + READY_S_MAX
    while True:
        try:
            await stream(channel, 1)
        except grpc.aio.AioRpcError:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.2)
        else:
            return


async def stream(channel: Any, tokens: int) -> tuple[list[float], int]:
    """Arrival times of the frames of one request, and the tokens it brought."""
    request = GenerateRequest(text="The chef")
    request.sampling.max_tokens = tokens
    request.sampling.ignore_eos = True
    call = channel.unary_stream(METHOD, request_serializer=GenerateRequest.SerializeToString)
    arrivals, last = [], b""
    async for frame in call(request):
        arrivals.append(time.perf_counter())
        last = frame
    return arrivals, GenerateResponse.FromString(last).event.done.usage.output_tokens


async def one_request() -> dict[str, object]:
    """Milliseconds per output token beyond the worker's step."""
    added = []
    with chain(STEP_MS) as (address, _):
        async with grpc.aio.insecure_channel(address) as channel:
            await ready(channel)
            for _ in range(5):
                arrivals, tokens = await stream(channel, ONE_TOKENS)
                # Frames: accepted, the tokens, finished, done.
                per_token_ms = (arrivals[-1] - arrivals[1]) / (tokens - 1) * 1e3
                added.append(per_token_ms - STEP_MS)
    return {"step_ms": STEP_MS, "added_ms_per_token": round(statistics.median(added), 3)}


async def crowd() -> dict[str, object]:
    """Tokens per second through everything, and what the processes hold."""
    rates = []
    with chain(0.0) as (address, pids):
        async with grpc.aio.insecure_channel(address) as channel:
            await ready(channel)
            for _ in range(5):
                started = time.perf_counter()
                waiting = (stream(channel, CROWD_TOKENS) for _ in range(CROWD))
                tokens = sum(count for _, count in await asyncio.gather(*waiting))
                rates.append(tokens / (time.perf_counter() - started))
        rss_mb = {n: psutil.Process(pid).memory_info().rss >> 20 for n, pid in pids.items()}
        cpu_s = {n: round(sum(psutil.Process(pid).cpu_times()[:2]), 1) for n, pid in pids.items()}
    return {
        "sequences": CROWD,
        "tokens_per_s": round(statistics.median(rates)),
        "rss_mb": rss_mb,
        "cpu_s": cpu_s,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    figures: dict[str, object] = {"one_request": await one_request(), "crowd": await crowd()}
    record("chain", figures, save=chosen.save)


if __name__ == "__main__":
    asyncio.run(main())
