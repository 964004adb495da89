"""How soon an overloaded stack says no, in milliseconds.

    python -m benchmarks.faults.refusals [--seconds 10] [--save]

`kaiten serve` with the shipped model. A tenant fills its bound of live requests with long ones,
which go on computing (whatever takes the place of one that ended is as long); then it floods from
`--clients` connections, each asking again as soon as it was refused, over gRPC and with a prompt of
100 kB over HTTP. Beside them a probe asks every 20 ms: its refusals are what is reported, with the
flood's own rate, and how many steps another tenant's stream got meanwhile. Goal: 99 of 100 refusals
within 50 ms, before any work.
"""

import argparse
import asyncio
import hashlib
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import httpx

from benchmarks.recording import record
from benchmarks.serving.stack import Stack, serving
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub

BOUND: Final = 16
PROBE_EVERY_S: Final = 0.02
LONG_TEXT: Final = "word " * 20_000
LONG: Final = SamplingParams(max_tokens=900, min_tokens=900, ignore_eos=True)


def key_of(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {tenant}-key"),)


def write_keys(path: Path) -> None:
    """Two tenants; one is bounded."""
    for name, bounds in (("flood", f"requests_max = {BOUND}"), ("quiet", "")):
        digest = hashlib.sha256(f"{name}-key".encode()).hexdigest()
        with path.open("a") as file:
            file.write(f'[tenants.{name}]\nkeys = ["sha256:{digest}"]\n{bounds}\n')


async def ask(stub: Any) -> float | None:
    """One refusal over gRPC: how long it took, in ms. None: there was room for a long one."""
    begin_s = time.perf_counter()
    request = pb.GenerateRequest(text="x", sampling=LONG)
    try:
        async for _ in stub.Generate(request, metadata=key_of("flood")):
            pass
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return (time.perf_counter() - begin_s) * 1000
    return None


async def ask_http(http: httpx.AsyncClient) -> float | None:
    """One refusal over HTTP, of a long prompt. None: there was room, and the prompt is too long."""
    begin_s = time.perf_counter()
    reply = await http.post("/v1/completions", json={"prompt": LONG_TEXT})
    assert reply.status_code in (400, 429), reply.text
    return (time.perf_counter() - begin_s) * 1000 if reply.status_code == 429 else None


async def occupy(stub: Any) -> list[Any]:
    """Fill the bound with requests that go on for long; the calls keep them alive."""
    calls = []
    for _ in range(BOUND):
        request = pb.GenerateRequest(text="x", sampling=LONG)
        calls.append(stub.Generate(request, metadata=key_of("flood")))
        await calls[-1].read()
    return calls


async def stream(stub: Any, tokens: list[float]) -> None:
    """The other tenant, as if nothing were."""
    while True:
        request = pb.GenerateRequest(text="x", sampling=LONG)
        async for reply in stub.Generate(request, metadata=key_of("quiet")):
            tokens.extend([time.perf_counter()] * reply.event.delta.token_count)


async def measure(stack: Stack, *, clients: int, seconds: float) -> dict[str, object]:
    async with AsyncExitStack() as held:

        async def connect() -> Any:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(stack.grpc, options=options)
            return InferenceServiceStub(await held.enter_async_context(channel))

        stubs = [await connect() for _ in range(clients)]
        probe, others = await connect(), await connect()
        headers = dict(key_of("flood"))
        http = await held.enter_async_context(
            httpx.AsyncClient(base_url=stack.http, headers=headers, timeout=60)
        )
        calls = await occupy(await connect())
        flood_ms: list[float] = []
        probe_ms: dict[str, list[float]] = {"grpc": [], "http": []}
        tokens: list[float] = []

        async def flood(stub: Any) -> None:
            while True:
                note(flood_ms, await ask(stub))

        tasks = [asyncio.create_task(stream(others, tokens))]
        tasks += [asyncio.create_task(flood(stub)) for stub in stubs]
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < seconds:
            note(probe_ms["grpc"], await ask(probe))
            note(probe_ms["http"], await ask_http(http))
            await asyncio.sleep(PROBE_EVERY_S)
        wall_s = time.perf_counter() - begin_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in calls:
            call.cancel()
    return {
        "clients": clients,
        "seconds": round(wall_s, 1),
        "refused_per_s": round(len(flood_ms) / wall_s),
        "others_tokens_per_s": round(len(tokens) / wall_s, 1),
        **{f"{door}_{name}": f for door, ms in probe_ms.items() for name, f in figures(ms).items()},
    }


def note(refusals_ms: list[float], took_ms: float | None) -> None:
    if took_ms is not None:
        refusals_ms.append(took_ms)


def figures(values_ms: list[float]) -> dict[str, float]:
    ordered = sorted(values_ms)
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    last = len(ordered) - 1
    return {name: round(ordered[int(share * last)], 2) for name, share in shares.items()}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, action="append")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        write_keys(keys)
        for clients in arguments.clients or [0, 8]:
            with serving("", "--api-keys-file", str(keys)) as stack:
                found = asyncio.run(measure(stack, clients=clients, seconds=arguments.seconds))
            record("refusals", found, save=arguments.save)


if __name__ == "__main__":
    main()
