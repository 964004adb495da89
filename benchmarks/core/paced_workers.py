"""Many workers in one process that compute nothing: what a scheduler is measured with.

    python -m benchmarks.core.paced_workers --scheduler HOST:PORT --workers 16 --out FILE

Each speaks the whole protocol on a port of its own and takes its steps by the clock; the tokens are
all the same. A step whose plan is not there waits for it, and that is counted. On SIGTERM the
figures of all of them are written to `--out`. A worker's real host is `gpu_worker`; sixteen of
those would need the cores that the scheduler is to be measured on.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import grpc

from kaiten.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    Capabilities,
    WorkerDescription,
)
from kaiten.v1.scheduler_service_pb2 import HeartbeatRequest, RegisterRequest
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.worker_service_pb2 import (
    DescribeResponse,
    ExecuteResponse,
    Opened,
    Plan,
    RowFinished,
    StepResult,
    StepResults,
    StepTimings,
)
from kaiten.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)

BLOCK_SIZE: Final = 16
# Enough for a minute or so.
BLOCKS_PER_ROW: Final = 256
VOCAB_SIZE: Final = 32_000
TOKEN: Final = 1234
HEARTBEAT_S: Final = 0.5
REGISTER_S: Final = 0.1


@dataclass(slots=True)
class Row:
    """Tokens that are known and not computed, and tokens of output still to come."""

    gap: int
    left: int


@dataclass(slots=True)
class Figures:
    """Of one worker, over its life or since `SIGUSR1`."""

    steps: int = 0
    plans: int = 0
    # A step was due and its plan was not there.
    starved_s: float = 0.0
    # From the newest result sent until the plan that came behind it.
    answers_s: list[float] = field(default_factory=list)


class PacedWorker:
    """Rows, plans and a clock; one stream at a time."""

    def __init__(self, boot_id: str, slots: int, context_tokens: int, step_s: float) -> None:
        self.figures = Figures()
        self.step_s = step_s
        self.description = WorkerDescription(
            boot_id=boot_id,
            model="paced",
            fingerprint="paced",
            vocab_size=VOCAB_SIZE,
            context_tokens_max=context_tokens,
            block_size=BLOCK_SIZE,
            block_count=max(slots * BLOCKS_PER_ROW, context_tokens // BLOCK_SIZE + 2),
            slots_max=slots,
            step_tokens_max=slots + 2048,
            capabilities=Capabilities(plan_version=1),
        )
        self._rows: dict[int, Row] = {}

    def stream(self) -> "PacedStream":
        """The older one, if there is one, is over: its leader is."""
        self._rows.clear()
        return PacedStream(self)

    def apply(self, plan: Plan) -> dict[int, int]:
        """Leaves, joins; the chunks of the first step."""
        for slot in plan.leaves:
            del self._rows[slot]
        for join in plan.joins:
            known = len(join.token_ids)
            left = join.prompt_tokens + join.sampling.max_tokens - known
            self._rows[join.slot] = Row(known - join.num_computed_tokens, left)
        return dict(zip(plan.chunk_slots, plan.chunk_tokens, strict=True))

    def step(self, plan: Plan, step: int, chunks: dict[int, int]) -> StepResult:
        """One step of a plan, as the scheduler is told of it."""
        slots, finished, computed, rows = [], [], 0, 0
        for slot, row in self._rows.items():
            count = chunks.get(slot, 1 if row.gap == 1 and row.left else 0)
            computed += count
            rows += count > 0
            if not count or count < row.gap:
                row.gap -= count
                continue
            row.gap, row.left = 1, row.left - 1
            slots.append(slot)
            if not row.left:
                finished.append(RowFinished(slot=slot, reason=FINISH_REASON_LENGTH))
        return StepResult(
            boot_id=self.description.boot_id,
            plan_id=plan.plan_id,
            step=step,
            slots=slots,
            token_ids=[TOKEN] * len(slots),
            finished=finished,
            timings=StepTimings(
                forward_us=int(self.step_s * 1e6), tokens_computed=computed, rows=rows
            ),
        )

    @property
    def is_busy(self) -> bool:
        """A step more would bring something without a newer plan."""
        return any(row.left and row.gap == 1 for row in self._rows.values())


class PacedStream:
    """One Execute call."""

    def __init__(self, worker: PacedWorker) -> None:
        self._worker = worker
        self._plans: deque[Plan] = deque()
        self._has_plan = asyncio.Event()
        self._sent_s = 0.0

    async def read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            figures = self._worker.figures
            figures.plans += 1
            if self._sent_s:
                figures.answers_s.append(time.monotonic() - self._sent_s)
            self._plans.append(request.plan)
            self._has_plan.set()

    async def results(self) -> AsyncIterator[ExecuteResponse]:
        """Every step when it ends; the next plan as soon as it is there between two of them."""
        worker, began_s = self._worker, 0.0
        while True:
            plan = await self._next_plan()
            chunks = worker.apply(plan)
            for step in range(plan.lease_steps):
                # On the beat, unless it waited for its plan, or this process is late.
                now_s = time.monotonic()
                began_s = began_s if now_s - began_s < worker.step_s else now_s
                await asyncio.sleep(began_s + worker.step_s - now_s)
                began_s += worker.step_s
                result = worker.step(plan, step, chunks)
                chunks = {}
                is_over = bool(self._plans) or not worker.is_busy
                result.is_last = step + 1 == plan.lease_steps or is_over
                worker.figures.steps += 1
                self._sent_s = time.monotonic()
                yield ExecuteResponse(results=StepResults(steps=[result]))
                if result.is_last:
                    break

    async def _next_plan(self) -> Plan:
        if not self._plans:
            waits_s, is_busy = time.monotonic(), self._worker.is_busy
            self._has_plan.clear()
            await self._has_plan.wait()
            if is_busy:
                self._worker.figures.starved_s += time.monotonic() - waits_s
        return self._plans.popleft()


class Servicer(WorkerServiceServicer):
    """All workers of this process; `Open` says whose stream it is."""

    def __init__(self, workers: Sequence[PacedWorker]) -> None:
        self._workers = {worker.description.boot_id: worker for worker in workers}

    async def Describe(self, _request: Any, context: Any) -> DescribeResponse:
        """Which of them is asked nobody knows: they register by themselves."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "ask at the registration")
        raise AssertionError("unreachable")

    async def Execute(
        self, requests: AsyncIterator[Any], _context: Any
    ) -> AsyncIterator[ExecuteResponse]:
        opening = await anext(aiter(requests))
        worker = self._workers[opening.open.boot_id]
        stream = worker.stream()
        yield ExecuteResponse(opened=Opened(worker=worker.description))
        reading = asyncio.create_task(stream.read(requests))
        try:
            async for response in stream.results():
                yield response
        finally:
            reading.cancel()


async def attend(schedulers: Sequence[str], address: str, worker: PacedWorker) -> None:
    """Register, and again whenever that is asked, with whoever leads."""
    for scheduler in itertools.cycle(schedulers):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with grpc.aio.insecure_channel(scheduler) as channel:
                await _attend(SchedulerServiceStub(channel), address, worker)
        await asyncio.sleep(REGISTER_S)


async def _attend(stub: SchedulerServiceStub, address: str, worker: PacedWorker) -> None:
    told, boot_id = worker.description, worker.description.boot_id
    await stub.Register(RegisterRequest(address=address, worker=told), timeout=5)
    is_known = True
    while is_known:
        await asyncio.sleep(HEARTBEAT_S)
        answer = await stub.Heartbeat(HeartbeatRequest(boot_id=boot_id), timeout=5)
        is_known = not answer.must_register


def summary(workers: Sequence[PacedWorker], taken_s: float) -> dict[str, float]:
    """Of all workers together."""
    each = [worker.figures for worker in workers]
    answers = sorted(answer for figures in each for answer in figures.answers_s)
    cuts = quantiles(answers, n=100) if len(answers) > 1 else [0.0] * 99
    return {
        "steps": sum(figures.steps for figures in each),
        "plans": sum(figures.plans for figures in each),
        "steps_per_s": round(sum(figures.steps for figures in each) / taken_s, 1),
        "starved": round(sum(f.starved_s for f in each) / taken_s / len(workers), 4),
        "plan_ms_p50": round(cuts[49] * 1e3, 2),
        "plan_ms_p99": round(cuts[98] * 1e3, 2),
    }


async def serve(chosen: argparse.Namespace) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    step_s, count = chosen.step_ms / 1000, chosen.workers
    workers = [
        PacedWorker(f"paced-{i}", chosen.slots, chosen.context_tokens, step_s) for i in range(count)
    ]
    server = grpc.aio.server()
    add_WorkerServiceServicer_to_server(Servicer(workers), server)
    if chosen.sockets is None:
        ports = [server.add_insecure_port("127.0.0.1:0") for _ in workers]
        addresses = [f"127.0.0.1:{port}" for port in ports]
    else:
        addresses = [f"unix:{chosen.sockets}/{worker.description.boot_id}" for worker in workers]
        for address in addresses:
            server.add_insecure_port(address)
    await server.start()
    began = [time.monotonic()]

    def begin() -> None:
        began[0] = time.monotonic()
        for worker in workers:
            worker.figures = Figures()

    loop.add_signal_handler(signal.SIGUSR1, begin)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    tasks = [
        asyncio.create_task(attend(chosen.scheduler.split(","), address, worker))
        for address, worker in zip(addresses, workers, strict=True)
    ]
    await ended.wait()
    chosen.out.write_text(json.dumps(summary(workers, time.monotonic() - began[0])))
    for task in tasks:
        task.cancel()
    await server.stop(None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scheduler", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sockets", type=Path, help="folder of their sockets; default: ports")
    asyncio.run(serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
