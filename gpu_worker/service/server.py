"""WorkerService: describes the worker, and lets one leader at a time drive the batch.

Fencing: a lower epoch, or an equal epoch with another nonce, is refused. A newer stream takes over:
the older one ends and the batch starts empty. Any plan that does not fit ends its stream with
FAILED_PRECONDITION; the leader's next stream is a full resync.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import structlog
import torch

from gpu_worker.batch.plans import Description, InvalidPlan, Leader, Plan, StepResult
from gpu_worker.runner.engine import Engine
from gpu_worker.service import wire
from gpu_worker.service.gathering import Gathering
from gpu_worker.service.metrics import Meters
from gpu_worker.service.step_profile import CPU, STEPS_MAX, Profiling
from gpu_worker.service.tracing import StepTracing
from kaiten.v1 import worker_service_pb2, worker_service_pb2_grpc
from service_kit.errors import InvalidRequest, OutOfOrder, Overloaded, StaleLeader
from service_kit.telemetry import Spans

log = structlog.get_logger()

# A leader that does not read its results is cut off rather than remembered for.
REPORTS_PENDING_MAX: Final = 4096

SERVICE_NAME: Final = "kaiten.v1.WorkerService"


class _Opened:
    """The engine gave the batch to this stream."""


_Report = list[StepResult]
_Item = _Opened | _Report | Exception | None


class Stream:
    """One Execute call: plans go to the engine, what comes back is queued for the event loop."""

    def __init__(
        self, leader: Leader, engine: Engine, tracing: StepTracing, gathering: Gathering
    ) -> None:
        self.leader = leader
        self.tracing = tracing
        self._engine = engine
        self._gathering = gathering
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._plan_id = 0
        self._is_over = False

    def submit(self, plan: Plan) -> None:
        """OutOfOrder for a plan of another leader or out of sequence; a repeat is ignored."""
        if plan.leader != self.leader:
            raise OutOfOrder("the plan is of another leader than the stream's")
        if plan.plan_id == self._plan_id and self._plan_id > 0:
            return
        if plan.plan_id != self._plan_id + 1:
            raise OutOfOrder(
                f"plan {plan.plan_id} is out of order: expected plan {self._plan_id + 1}"
            )
        self._plan_id = plan.plan_id
        self._engine.submit(self, plan)

    def end(self, error: Exception | None) -> None:
        """No more items after those already queued: the stream ends, by `error` if there is one."""
        if not self._is_over:
            self._is_over = True
            self._items.put_nowait(error)

    async def items(self) -> AsyncIterator[_Opened | _Report]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    # On the compute thread:

    def on_opened(self) -> None:
        self._loop.call_soon_threadsafe(self._put, _Opened())

    def on_result(self, result: StepResult) -> None:
        if report := self._gathering.add(result, time.monotonic()):
            self._loop.call_soon_threadsafe(self._put, report)

    def on_refused(self, error: InvalidPlan) -> None:
        self._loop.call_soon_threadsafe(self.end, error)

    def _put(self, item: _Opened | _Report) -> None:
        if self._items.qsize() >= REPORTS_PENDING_MAX:
            self.end(Overloaded("results are not read", 1.0, REPORTS_PENDING_MAX))
        if not self._is_over:
            self._items.put_nowait(item)


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    def __init__(
        self,
        engine: Engine,
        description: Description,
        meters: Meters,
        spans: Spans | None = None,
        *,
        gather_s: float = 0.0,
        device: torch.device = CPU,
    ) -> None:
        """`spans` None: nobody listens. `gather_s`: see `Gathering`. `device`: of profiles."""
        # Called when a leader's stream has ended and no newer one has taken over.
        self.on_stream_end: Callable[[], None] | None = None
        self._engine = engine
        self._meters = meters
        self._spans = spans
        self._description = description
        self._gather_s = gather_s
        self._profiling = Profiling(engine, device)
        self._leader: Leader | None = None
        # Of the leader, as it says.
        self._cell = ""
        self._stream: Stream | None = None

    async def Describe(self, _request: Any, _context: Any) -> worker_service_pb2.DescribeResponse:
        worker = wire.description_to_proto(self._description)
        return worker_service_pb2.DescribeResponse(worker=worker)

    async def Execute(
        self, requests: AsyncIterator[worker_service_pb2.ExecuteRequest], _context: Any
    ) -> AsyncIterator[worker_service_pb2.ExecuteResponse]:
        stream = self._open(await _first(requests))
        reader = asyncio.create_task(_read(requests, stream))
        try:
            async for item in stream.items():
                yield self._response(stream, item)
        finally:
            # First what may not be missed, whatever the reader ends with.
            self._engine.close(stream)
            if stream is self._stream:
                self._stream = None
                if self.on_stream_end is not None:
                    self.on_stream_end()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def Profile(
        self, request: worker_service_pb2.ProfileRequest, _context: Any
    ) -> AsyncIterator[worker_service_pb2.ProfileResponse]:
        if not 1 <= request.steps <= STEPS_MAX:
            raise InvalidRequest("steps", f"must be 1 to {STEPS_MAX}, got {request.steps}")
        async for piece in self._profiling.pieces(request.steps):
            yield worker_service_pb2.ProfileResponse(piece=piece)

    def end_stream(self) -> None:
        """End the leader's stream, if there is one: the worker goes away."""
        if self._stream is not None:
            self._stream.end(None)

    def _open(self, request: worker_service_pb2.ExecuteRequest) -> Stream:
        """Fence, end the older stream, and ask the engine for the batch."""
        if request.WhichOneof("message") != "open":
            raise OutOfOrder("the first message of a stream is Open")
        leader = wire.leader_from_proto(request.open.leader)
        if request.open.boot_id != self._description.boot_id:
            raise OutOfOrder(
                f"boot_id {request.open.boot_id!r} is not this worker's; it was restarted"
            )
        self._check_fence(leader, request.open.cell)
        self._leader, self._cell = leader, request.open.cell
        if self._stream is not None:
            self._stream.end(OutOfOrder("a newer stream took over"))
        tracing, gathering = StepTracing(self._spans), Gathering(self._gather_s)
        self._stream = Stream(leader, self._engine, tracing, gathering)
        self._engine.open(self._stream)
        log.info("stream.opened", epoch=leader.epoch)
        return self._stream

    def _check_fence(self, leader: Leader, cell: str) -> None:
        known = self._leader
        if cell and self._cell and cell != self._cell:
            if self._stream is None:
                return
            raise OutOfOrder(
                f"this worker computes for cell {self._cell}, and cannot for cell {cell} too: give "
                f"it the schedulers of one cell (--scheduler), or end those of the other"
            )
        if known is None or leader.epoch > known.epoch or leader == known:
            return
        raise StaleLeader(
            f"stale leader: epoch {leader.epoch} where epoch {known.epoch} of "
            f"{'another' if leader.nonce != known.nonce else 'the same'} leader was seen",
            known.epoch,
        )

    def _response(
        self, stream: Stream, item: _Opened | _Report
    ) -> worker_service_pb2.ExecuteResponse:
        if isinstance(item, _Opened):
            worker = wire.description_to_proto(self._description)
            return worker_service_pb2.ExecuteResponse(
                opened=worker_service_pb2.Opened(worker=worker)
            )
        for result in item:
            self._meters.stepped(result)
            stream.tracing.stepped(result)
        steps = [wire.result_to_proto(each, boot_id=self._description.boot_id) for each in item]
        return worker_service_pb2.ExecuteResponse(
            results=worker_service_pb2.StepResults(steps=steps)
        )


async def _first(
    requests: AsyncIterator[worker_service_pb2.ExecuteRequest],
) -> worker_service_pb2.ExecuteRequest:
    async for request in requests:
        return request
    raise OutOfOrder("the first message of a stream is Open")


async def _read(requests: AsyncIterator[worker_service_pb2.ExecuteRequest], stream: Stream) -> None:
    """Feed plans to the stream until its client is done or does something wrong."""
    try:
        async for request in requests:
            if request.WhichOneof("message") != "plan":
                raise OutOfOrder("after Open a stream carries plans only")
            plan = request.plan
            stream.tracing.planned(plan.plan_id, plan.traceparent, plan.expected_step_us)
            stream.submit(wire.plan_from_proto(plan))
    except Exception as error:
        # Also what nobody expects: a stream that nobody reads would hear of no plan, and hang.
        stream.end(error)
    else:
        stream.end(None)
