"""A worker's engine behind gRPC, and its leader in a process of its own (`leader`)."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from benchmarks.gpu.crowd import Job
from benchmarks.gpu.in_process import CrowdDevice
from gpu_worker.batch import plans
from gpu_worker.batch.rows import Rows
from gpu_worker.runner.engine import Engine
from gpu_worker.service.wire import plan_from_proto, result_to_proto
from kaiten.v1 import worker_service_pb2, worker_service_pb2_grpc

LEADER_S_MAX = 100


class _Stream:
    """The engine's results, for the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.said: asyncio.Queue[plans.StepResult | Exception | None] = asyncio.Queue()

    def _put(self, said: plans.StepResult | Exception | None) -> None:
        self._loop.call_soon_threadsafe(self.said.put_nowait, said)

    on_result = on_refused = _put

    def on_opened(self) -> None:
        self._put(None)


class _Servicer(worker_service_pb2_grpc.WorkerServiceServicer):
    def __init__(self, device: CrowdDevice) -> None:
        self.engine = Engine(Rows(device.limits), device, on_crash=self._crashed)
        self._stream: _Stream | None = None

    def _crashed(self, error: Exception) -> None:
        if self._stream is not None:
            self._stream.on_refused(error)

    async def Execute(self, requests: Any, _context: Any) -> AsyncIterator[Any]:
        stream = self._stream = _Stream()
        self.engine.open(stream)

        async def read() -> None:
            try:
                async for request in requests:
                    if request.WhichOneof("message") == "plan":
                        self.engine.submit(stream, plan_from_proto(request.plan))
            except Exception as error:  # or the leader would wait for ever
                stream.on_refused(error)

        reader = asyncio.create_task(read())
        while True:
            said = await stream.said.get()
            if isinstance(said, Exception):
                reader.cancel()
                raise said
            if said is None:
                yield worker_service_pb2.ExecuteResponse(opened=worker_service_pb2.Opened())
            else:
                steps = [result_to_proto(said, boot_id="b")]
                results = worker_service_pb2.StepResults(steps=steps)
                yield worker_service_pb2.ExecuteResponse(results=results)


async def served(
    device: CrowdDevice,
    jobs: Sequence[Job],
    delay_ms: int,
    first: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """What the leader's process says of its crowd: {tokens, seconds, tokens_per_s}.

    `first` runs on the thread that computes, before it.
    """
    servicer = _Servicer(device)
    await asyncio.wrap_future(servicer.engine.start(first))
    server = grpc.aio.server()
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    given = {
        "port": port,
        "delay_ms": delay_ms,
        "limits": {name: getattr(device.limits, name) for name in device.limits.__slots__},
        "jobs": [[list(job.prompt), job.output] for job in jobs],
    }
    leader = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.gpu.leader",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(
            leader.communicate(json.dumps(given).encode()), LEADER_S_MAX
        )
    finally:
        if leader.returncode is None:
            leader.kill()
        await server.stop(0.1)
        await asyncio.to_thread(servicer.engine.stop)
    assert leader.returncode == 0, "the leader's process failed; its words are in the log"
    answer: dict[str, float] = json.loads(said)
    return answer
