"""What one client's abuse costs the others: health and streams beside huge texts, template bombs,
500 clients that never read, and bodies that are hostile, slow, many or too large (`hostile`).

A real store, a scripted scheduler, the gateway and the abuser, each its own process; this one
measures. `python -m benchmarks.faults.abuse --save` runs every phase for `--seconds` and writes one
line per phase. Goals: p99 of health under 100 ms, p99 of streams less than 100 ms above the quiet
one; beside 500 clients that never read within 10 % of it, and memory bounded; beside hostile bodies
nothing more than 50 ms above the quiet p99 and memory at most ten times a request's bytes (of small
ones, a megabyte's). Needs a quiet machine.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import psutil

from benchmarks.faults import hostile
from benchmarks.recording import record
from kaiten.local.ports import HeldPort
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.store_server import StoreServer
from tests.support.tokenizers import write_model_folder

STREAMS: Final = 16
STEP_S: Final = 0.05
TOKENS: Final = 4000
CROWD: Final = 500
HEALTH_EVERY_S: Final = 0.01
WARM_S: Final = 2.0
# Doubles a string forty times when asked to.
TEMPLATE: Final = (
    "{% if messages[0].content == 'bomb' %}{% set ns = namespace(x=[0]) %}"
    "{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}"
    "{% elif messages[0].content == 'loop' %}{% for i in range(10000) %}{% for j in range(10000) %}"
    "{% if i == j %}{% endif %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)
# "all_read" is what as many clients cost that behave.
PHASES: Final = (
    "quiet",
    "texts",
    "templates",
    "lists",
    "controls",
    "slow",
    "many_bodies",
    "large_bodies",
    "all_read",
    "never_read",
)
CONTEXT_TOKENS: Final = 4096
# What a gateway lets in of a text before it is tokenized.
TEXT_BYTES: Final = CONTEXT_TOKENS * 128
# A request's memory is measured to this much at best, beside all else that goes on.
BYTES_MIN: Final = 1_000_000


@dataclass(slots=True)
class Felt:
    """What the others feel, in milliseconds."""

    gaps_ms: list[float] = field(default_factory=list)
    health_ms: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "stream_gap_p50_ms": _share(self.gaps_ms, 0.5),
            "stream_gap_p99_ms": _share(self.gaps_ms, 0.99),
            "stream_gap_max_ms": _share(self.gaps_ms, 1.0),
            "health_p50_ms": _share(self.health_ms, 0.5),
            "health_p99_ms": _share(self.health_ms, 0.99),
            "health_max_ms": _share(self.health_ms, 1.0),
            "gaps": len(self.gaps_ms),
            "health_checks": len(self.health_ms),
        }


def _share(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The gateway under test."""

    grpc: str
    http: str
    process: psutil.Process


@contextmanager
def gateway() -> Iterator[Target]:
    """Store, scheduler and gateway as processes."""
    with ExitStack() as held:
        name = held.enter_context(tempfile.TemporaryDirectory())
        store = held.enter_context(StoreServer(Path(name) / "store"))
        config = {"max_position_embeddings": CONTEXT_TOKENS}
        folder = write_model_folder(Path(name) / "m", config=config, chat_template=TEMPLATE)
        grpc_port, http_port = (held.enter_context(HeldPort()) for _ in range(2))
        flags = ["--model", str(folder), "--redis-url", store.url, "--cell", "bench"]
        flags += ["--grpc-port", str(grpc_port.number), "--http-port", str(http_port.number)]
        served = held.enter_context(_process("gateway", *flags, "--log-level", "error"))
        lead = ["--lead", store.url, "--step-s", str(STEP_S)]
        held.enter_context(_process("benchmarks.serving.gateway_streams", *lead))
        yield Target(
            grpc=grpc_port.address,
            http=f"http://{http_port.address}",
            process=psutil.Process(served.pid),
        )


@contextmanager
def _process(module: str, *flags: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-m", module, *flags])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


# The others


async def follow(target: Target, felt: Felt) -> None:
    """One well-behaved stream after the other."""
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        stub: Any = InferenceServiceStub(channel)
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        while True:
            last_s = 0.0
            try:
                request = pb.GenerateRequest(text="a stream", sampling=sampling)
                async for _ in stub.Generate(request):
                    now_s = time.perf_counter()
                    if last_s:
                        felt.gaps_ms.append((now_s - last_s) * 1000)
                    last_s = now_s
            finally:
                # What is still waited for counts as long as it has lasted.
                if last_s:
                    felt.gaps_ms.append((time.perf_counter() - last_s) * 1000)


async def watch_health(target: Target, felt: Felt) -> None:
    async with httpx.AsyncClient(base_url=target.http, timeout=60) as http:
        while True:
            begin_s = time.perf_counter()
            try:
                reply = await http.get("/health")
            finally:
                felt.health_ms.append((time.perf_counter() - begin_s) * 1000)
            assert reply.status_code == 200
            await asyncio.sleep(HEALTH_EVERY_S)


async def measure(target: Target, phase: str, seconds: float) -> dict[str, Any]:
    """One phase: the others first, then the abuser, then the clock."""
    felt = Felt()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(follow(target, felt)) for _ in range(STREAMS)]
        running.append(tasks.create_task(watch_health(target, felt)))
        await asyncio.sleep(WARM_S)
        before = target.process.memory_info().rss
        forget_peak(target)
        with ExitStack() as held:
            if phase != "quiet":
                flags = ("--abuse", phase, "--grpc", target.grpc, "--http", target.http)
                held.enter_context(_process("benchmarks.faults.abuse", *flags))
                # Its imports are not what is measured.
                await asyncio.sleep(WARM_S)
            felt.gaps_ms.clear()
            felt.health_ms.clear()
            cpu_s, begin_s = sum(target.process.cpu_times()[:2]), time.perf_counter()
            await asyncio.sleep(seconds)
            wall_s = time.perf_counter() - begin_s
            cpu_s = sum(target.process.cpu_times()[:2]) - cpu_s
            grown = target.process.memory_info().rss - before
            peak = peak_bytes(target)
        for task in running:
            task.cancel()
    return felt.figures() | {
        "phase": phase,
        "streams": STREAMS,
        "seconds": round(wall_s, 1),
        "gateway_cpu_share": round(cpu_s / wall_s, 3),
        "gateway_rss_mb": round(before / 1e6),
        "gateway_grown_mb": round(grown / 1e6, 1),
        "gateway_peak_mb": round(peak / 1e6, 1),
    }


def forget_peak(target: Target) -> None:
    """From now on the peak of its resident memory counts."""
    Path(f"/proc/{target.process.pid}/clear_refs").write_text("5")


def peak_bytes(target: Target) -> int:
    status = Path(f"/proc/{target.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def memory_of_each(target: Target, bodies: Sequence[hostile.Body]) -> float:
    """The most that one of these requests makes of its bytes, sent alone, small ones first."""
    worst = 0.0
    async with httpx.AsyncClient(base_url=target.http, timeout=300, headers=JSON) as http:
        path, body = WARM_UP
        await http.post(path, content=body)
        for path, body in sorted(bodies, key=lambda each: len(each[1])):
            before = target.process.memory_info().rss
            forget_peak(target)
            await http.post(path, content=body)
            grown = peak_bytes(target) - before
            worst = max(worst, grown / max(len(body), BYTES_MIN))
    return round(worst, 1)


async def until_ready(target: Target) -> None:
    async with httpx.AsyncClient(base_url=target.http, timeout=60) as http, asyncio.timeout(60):
        while True:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


# The abuser, a process of its own


async def abuse(kind: str, target_grpc: str, target_http: str) -> None:
    """Until killed."""
    if kind in ("never_read", "all_read"):
        await crowd(target_grpc, is_reading=kind == "all_read")
        return
    if kind == "slow":
        await hostile.send_slowly(target_http)
    if kind == "many_bodies":
        await hostile.send_at_once(target_http)
    if kind in BODIES:
        await hostile.send(target_http, BODIES[kind]())
    async with httpx.AsyncClient(base_url=target_http, timeout=60) as http:
        bodies = texts() if kind == "texts" else templates()
        while True:
            await asyncio.gather(
                *(http.post(path, content=body, headers=JSON) for path, body in bodies)
            )


JSON: Final = hostile.JSON
# What a first request of a kind imports or starts is not its own.
WARM_UP: Final = ("/tokenize", b'{"messages":[{"role":"user","content":"%s"}]}' % (b"word " * 1000))
# Sent one by one, and what each makes of its bytes is measured.
BODIES: Final[dict[str, Callable[[], list[hostile.Body]]]] = {
    "lists": hostile.lists,
    "controls": lambda: hostile.controls(TEXT_BYTES),
    "large_bodies": hostile.too_large,
}


def texts() -> list[tuple[str, bytes]]:
    """Refused by length alone, refused once counted, and all that may be tokenized."""
    return [
        ("/v1/completions", b'{"prompt": "' + b"x" * 27_000_000 + b'"}'),
        ("/v1/completions", b'{"prompt": "' + b"word " * 3_000_000 + b'"}'),
        ("/v1/completions", b'{"prompt": "' + b"word " * 800_000 + b'"}'),
        ("/tokenize", b'{"prompt": "' + "日本語".encode() * 400_000 + b'"}'),
    ]


def templates() -> list[tuple[str, bytes]]:
    """One that outgrows its memory, one that outlasts its time."""
    path = "/v1/chat/completions"
    body = b'{"messages": [{"role": "user", "content": "%s"}]}'
    return [(path, body % b"bomb"), (path, body % b"loop")]


async def crowd(target_grpc: str, *, is_reading: bool) -> None:
    """500 streams over ten connections."""
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    request = pb.GenerateRequest(text="never read this", sampling=sampling)
    channels = [
        # Of equal channels gRPC makes one connection.
        grpc.aio.insecure_channel(target_grpc, options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(10)
    ]
    calls = []
    for index in range(CROWD):
        stub: Any = InferenceServiceStub(channels[index % len(channels)])
        calls.append(stub.Generate(request))
        await calls[-1].initial_metadata()
    if is_reading:
        await asyncio.gather(*map(read, calls))
    await asyncio.Event().wait()


async def read(call: Any) -> None:
    async for _ in call:
        pass


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--phase", choices=PHASES[1:], action="append")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--note", default="", help="kept with the figures")
    for hidden in ("--abuse", "--grpc", "--http"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.abuse:
        asyncio.run(abuse(arguments.abuse, arguments.grpc, arguments.http))
        return
    quiet: dict[str, Any] = {}
    for phase in ("quiet", *(arguments.phase or PHASES[1:])):
        with gateway() as target:
            figures = asyncio.run(_run(target, phase, arguments.seconds))
        quiet = quiet or figures
        p99 = figures["stream_gap_p99_ms"] / quiet["stream_gap_p99_ms"]
        beside = {
            "p99_to_quiet": round(p99, 3),
            "gap_over_quiet_p99_ms": figures["stream_gap_max_ms"] - quiet["stream_gap_p99_ms"],
            "health_over_quiet_p99_ms": figures["health_max_ms"] - quiet["health_p99_ms"],
        }
        record("abuse", figures | beside | {"note": arguments.note}, save=arguments.save)


async def _run(target: Target, phase: str, seconds: float) -> dict[str, Any]:
    await until_ready(target)
    alone: dict[str, Any] = {}
    if phase in BODIES:
        alone["memory_over_request_bytes"] = await memory_of_each(target, BODIES[phase]())
    return await measure(target, phase, seconds) | alone


if __name__ == "__main__":
    main()
