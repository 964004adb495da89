"""What one streamed token costs the gateway: processor time of the gateway process per token.

A real store, a scripted scheduler and the gateway, each its own process; the client is this one.
`--streams 256 --tokens 200` prints one JSON line; `--step-s 0` offers more than anybody can carry,
which is what a core sustains: `tokens_per_cpu_s`. The gateway has the first core, and everything
else the others (`--no-pin`: as the system likes). `--tls`: over TLS. `--first-byte`: instead, the
time to the first byte of `--streams` prompts of 1,000 tokens, one after the other. `--save` keeps
the line.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import psutil

from benchmarks.recording import record
from kaiten.local.ports import HeldPort
from kaiten.tls import TLS, aio_channel
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from ledger import Ledger
from tests.fakes.scripted_scheduler import ScriptedScheduler
from tests.support.store_server import StoreServer
from tests.support.tls_files import Authority
from tests.support.tokenizers import byte_level_bpe, write_model_folder


async def read_grpc(stub: Any, tokens: int, stop: list[str]) -> tuple[int, int]:
    request = pb.GenerateRequest(
        text="the quick brown fox jumps over the lazy dog",
        sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
        stop=stop,
    )
    got = messages = 0
    async for response in stub.Generate(request):
        messages += 1
        if response.event.HasField("delta"):
            got += response.event.delta.token_count
    return got, messages


async def read_http(client: httpx.AsyncClient, tokens: int, stop: list[str]) -> tuple[int, int]:
    body = {"model": "m", "prompt": "the quick brown fox", "max_tokens": tokens, "stream": True}
    body |= {"ignore_eos": True, "return_token_ids": True, "stop": stop or None}
    got = messages = 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                messages += 1
                got += len(json.loads(line[6:])["choices"][0].get("token_ids", ()))
    return got, messages


PROMPT_TOKENS: Final = 1000


async def first_bytes_ms(client: httpx.AsyncClient, requests: int) -> list[float]:
    """Of one stream at a time, with another prompt of 1,000 tokens each."""
    waits = []
    for number in range(requests):
        prompt = [(number + place * 7) % 250 + 1 for place in range(PROMPT_TOKENS)]
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, "stream": True}
        begin_s = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            await anext(reply.aiter_raw())
            waits.append((time.perf_counter() - begin_s) * 1e3)
    return sorted(waits)


async def lead(url: str, step_s: float) -> None:
    """The scheduler process."""
    ledger = await Ledger.connect(url, cell="bench")
    await ledger.check()
    vocab_size = byte_level_bpe().get_vocab_size()
    scheduler = ScriptedScheduler(
        ledger, vocab_size=vocab_size, context_tokens_max=4096, step_s=step_s
    )
    async with scheduler:
        await asyncio.Event().wait()


class Server(NamedTuple):
    """The gateway under load; `tls` is what its clients trust."""

    grpc_port: int
    http_port: int
    pid: int
    tls: TLS | None


async def measure(arguments: argparse.Namespace, server: Server) -> None:
    gateway, tls = psutil.Process(server.pid), server.tls
    stop = ["\n\nUser:", "</answer>"] if arguments.stops else []
    limits = httpx.Limits(max_connections=None)
    async with (
        aio_channel(f"127.0.0.1:{server.grpc_port}", tls or False) as channel,
        httpx.AsyncClient(
            base_url=f"{'https' if tls else 'http'}://127.0.0.1:{server.http_port}",
            limits=limits,
            timeout=120,
            verify=tls.context() if tls else True,
        ) as client,
    ):
        await until_ready(client)

        if arguments.first_byte:
            waits = await first_bytes_ms(client, arguments.streams)
            p50_ms, p95_ms = (round(waits[len(waits) * each // 100], 2) for each in (50, 95))
            taken = {"prompt_tokens": PROMPT_TOKENS, "requests": len(waits)}
            record("first_byte", {**taken, "p50_ms": p50_ms, "p95_ms": p95_ms}, save=arguments.save)
            return

        def read(tokens: int) -> Any:
            if arguments.http:
                return read_http(client, tokens, stop)
            return read_grpc(InferenceServiceStub(channel), tokens, stop)

        await asyncio.gather(*(read(5) for _ in range(8)))
        cpu_s, begin_s = sum(gateway.cpu_times()[:2]), time.perf_counter()
        results = await asyncio.gather(*(read(arguments.tokens) for _ in range(arguments.streams)))
        wall_s = time.perf_counter() - begin_s
        cpu_s = sum(gateway.cpu_times()[:2]) - cpu_s
    tokens, messages = (sum(column) for column in zip(*results, strict=True))
    assert tokens == arguments.streams * arguments.tokens
    figures: dict[str, object] = {
        "protocol": "http" if arguments.http else "grpc",
        "stops": arguments.stops,
        "streams": arguments.streams,
        "tokens": tokens,
        "messages": messages,
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s),
        "cpu_us_per_token": round(cpu_s / tokens * 1e6, 2),
        "cpu_us_per_message": round(cpu_s / messages * 1e6, 2),
        "tokens_per_cpu_s": round(tokens / cpu_s),
        "rss_mb": round(gateway.memory_info().rss / 1e6),
        "is_pinned": arguments.pin,
        "is_tls": arguments.tls,
    }
    record("gateway_streams", figures, save=arguments.save)


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--first-byte", action="store_true")
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--lead", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lead:
        asyncio.run(lead(arguments.lead, arguments.step_s))
        return
    first, *others = sorted(os.sched_getaffinity(0))
    if arguments.pin:
        os.sched_setaffinity(0, others)
    with (
        tempfile.TemporaryDirectory() as name,
        StoreServer(Path(name) / "store") as store,
        HeldPort() as grpc_held,
        HeldPort() as http_held,
    ):
        folder = write_model_folder(Path(name) / "m", config={"max_position_embeddings": 4096})
        grpc_port, http_port = grpc_held.number, http_held.number
        python = [sys.executable, "-m"]
        ports = ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
        ports += ["--log-level", "error"]
        files = Authority(Path(name) / "authority").issue() if arguments.tls else None
        if files is not None:
            ports += ["--tls-cert", str(files.cert), "--tls-key", str(files.key)]
        gateway_flags = ["--model", str(folder), "--redis-url", store.url, "--cell", "bench"]
        gateway = subprocess.Popen([*python, "gateway", *gateway_flags, *ports])
        if arguments.pin:
            os.sched_setaffinity(gateway.pid, {first})
        lead_flags = ["--lead", store.url, "--step-s", str(arguments.step_s)]
        leader = subprocess.Popen([*python, "benchmarks.serving.gateway_streams", *lead_flags])
        try:
            tls = None if files is None else TLS(ca=files.cert)
            asyncio.run(retry_measure(arguments, Server(grpc_port, http_port, gateway.pid, tls)))
        finally:
            for process in (gateway, leader):
                process.kill()
                process.wait()


async def retry_measure(arguments: argparse.Namespace, server: Server) -> None:
    """Once the gateway listens."""
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                break
    await measure(arguments, server)


if __name__ == "__main__":
    main()
