"""The scheduler's side of `serving`, in its own process: a crowd over one Execute stream.

Reads {port, delay_ms, limits, jobs} as JSON from stdin and prints {tokens, seconds, tokens_per_s}.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc

from benchmarks.gpu.crowd import Crowd, Job
from benchmarks.gpu.stand_ins import stand_in
from benchmarks.serving.one_process import WORKER
from gpu_worker.batch.plan_validation import RowLimits
from kaiten.v1 import common_pb2, worker_service_pb2, worker_service_pb2_grpc
from scheduler_svc.core.outcome import Plan

stand_in()
# The scheduler's wire comes with the ledger, and that with the store's client.
from scheduler_svc.wire import plan_to_proto, step_from_proto  # noqa: E402

LEADER = common_pb2.Leader(epoch=1, nonce=7)


class Delayed:
    """Every message arrives so much later; many may be on their way at once."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._on_way: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

    def put(self, message: Any) -> None:
        self._on_way.put_nowait((time.perf_counter() + self._delay_s, message))

    async def get(self) -> Any:
        due_s, message = await self._on_way.get()
        if (rest_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(rest_s)
        return message


async def lead(given: dict[str, Any]) -> dict[str, float]:
    crowd = Crowd(
        RowLimits(**given["limits"]),
        [Job(prompt=tuple(prompt), output=output) for prompt, output in given["jobs"]],
    )
    plans, results = Delayed(given["delay_ms"] / 1e3), Delayed(given["delay_ms"] / 1e3)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{given['port']}") as channel:
        call = worker_service_pb2_grpc.WorkerServiceStub(channel).Execute()
        opening = worker_service_pb2.Open(leader=LEADER, boot_id="b")
        await call.write(worker_service_pb2.ExecuteRequest(open=opening))
        await call.read()
        tasks = [
            asyncio.create_task(_send(call, plans)),
            asyncio.create_task(_receive(call, results.put)),
        ]
        started_s = time.perf_counter()
        while not crowd.is_done:
            while (plan := crowd.next_plan()) is not None:
                plans.put(worker_service_pb2.ExecuteRequest(plan=_message(plan, crowd)))
            message = await results.get()
            if isinstance(message, Exception):
                raise message
            crowd.take(step_from_proto(WORKER, message))
        seconds = time.perf_counter() - started_s
        for task in tasks:
            task.cancel()
        call.cancel()
    return {"tokens": crowd.tokens, "seconds": seconds, "tokens_per_s": crowd.tokens / seconds}


def _message(plan: Plan, crowd: Crowd) -> worker_service_pb2.Plan:
    samplings = (
        worker_service_pb2.RowSampling(
            top_p=1.0,
            max_tokens=crowd.output_of(join.sequence_id),
            logprobs=-1,
            repetition_penalty=1.0,
        )
        for join in plan.joins
    )
    return plan_to_proto(plan, LEADER, samplings)


async def _send(call: Any, plans: Delayed) -> None:
    while True:
        await call.write(await plans.get())


async def _receive(call: Any, put: Callable[[Any], None]) -> None:
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            for step in message.results.steps:
                put(step)
        raise EOFError("the worker ended the stream")
    except Exception as error:
        # Whatever it is: the crowd waits for what comes here, and must not wait for ever.
        put(error)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(lead(json.load(sys.stdin)))))
