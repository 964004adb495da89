"""A WorkerService on a local port in this process, and a leader's end of its stream."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, repeat
from typing import Any

import grpc

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import (
    Description,
    FinishReason,
    LayerGroup,
    Leader,
    Plan,
    RowLogprobs,
    RowPromptLogprobs,
    RowSampling,
    StepOutcome,
)
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import AheadRunner, ModelRunner
from gpu_worker.runner.engine import Engine
from gpu_worker.service.metrics import Meters
from gpu_worker.service.server import WorkerServicer
from kaiten.v1 import common_pb2, worker_service_pb2, worker_service_pb2_grpc
from service_kit.grpc_server import bind, create_server
from service_kit.metrics import NO_METER
from tests.support.mini_scheduler import LEADER, MiniScheduler

WAIT_S = 60.0

LIMITS = RowLimits(
    slots=4, context_tokens=64, step_tokens=32, block_size=4, block_count=64, vocab_size=97
)

_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def description(limits: RowLimits, boot_id: str = "boot") -> Description:
    return Description(
        boot_id=boot_id,
        model="tiny",
        fingerprint="f",
        weights_digest="w",
        tokenizer_digest="t",
        architecture="LlamaForCausalLM",
        dtype="fp32",
        kv_dtype="fp32",
        device="cpu",
        vocab_size=limits.vocab_size,
        context_tokens_max=limits.context_tokens,
        layer_groups=tuple(
            LayerGroup(window_tokens=window, layer_count=2, blocks_max=limits.blocks_per_row)
            for window in limits.windows
        ),
        block_size=limits.block_size,
        block_count=limits.block_count,
        slots_max=limits.slots,
        step_tokens_max=limits.step_tokens,
        mixed_tokens_max=limits.step_tokens,
        host_block_count=limits.host_block_count,
    )


@dataclass
class Served:
    """What a test needs of a running server."""

    stub: Any
    channel: grpc.aio.Channel
    rows: Rows
    engine: Engine
    crashes: list[Exception]

    async def wait_waiting(self, count: int) -> None:
        """Until this many commands wait behind the running step."""
        async with asyncio.timeout(WAIT_S):
            # The queue belongs to a thread, which has no event to give.
            while self.engine.waiting_count != count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    device: ModelRunner | AheadRunner, limits: RowLimits = LIMITS, *, gather_s: float = 0.0
) -> AsyncIterator[Served]:
    crashes: list[Exception] = []
    rows = Rows(limits)
    engine = Engine(rows, device, on_crash=crashes.append)
    engine.start()
    server = create_server()
    meters = Meters(NO_METER)
    servicer = WorkerServicer(engine, description(limits), meters, gather_s=gather_s)
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
            yield Served(stub=stub, channel=channel, rows=rows, engine=engine, crashes=crashes)
    finally:
        await server.stop(0.1)
        await asyncio.to_thread(engine.stop)


@dataclass
class LeaderStream:
    """The leader's end of Execute."""

    call: Any
    # Of the newest message, what has not been taken yet.
    steps: list[Any] = field(default_factory=list)

    @classmethod
    async def open(
        cls, served: Served, leader: Leader = LEADER, boot_id: str = "boot", cell: str = ""
    ) -> "LeaderStream":
        """Open, and wait for Opened."""
        stream = cls(served.stub.Execute())
        await stream.call.write(open_request(leader, boot_id, cell))
        answer = await stream.read()
        assert answer.WhichOneof("message") == "opened"
        return stream

    async def send(self, plan: Plan) -> None:
        await self.call.write(worker_service_pb2.ExecuteRequest(plan=plan_to_proto(plan)))

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        return await asyncio.wait_for(self.call.read(), WAIT_S)

    async def step(self) -> Any:
        """The next StepResult."""
        if not self.steps:
            message = await self.read()
            assert message is not grpc.aio.EOF, await self.call.details()
            self.steps = list(message.results.steps)
        return self.steps.pop(0)

    async def failure(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end, which must be an error."""
        try:
            while await self.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return await self.call.code(), await self.call.details()

    async def close(self) -> None:
        self.call.cancel()


def open_request(leader: Leader = LEADER, boot_id: str = "boot", cell: str = "") -> Any:
    message = worker_service_pb2.Open(
        leader=common_pb2.Leader(epoch=leader.epoch, nonce=leader.nonce), boot_id=boot_id, cell=cell
    )
    return worker_service_pb2.ExecuteRequest(open=message)


async def run_to_end(stream: LeaderStream, scheduler: MiniScheduler) -> None:
    """Drive the mini scheduler's requests over a stream until all have finished."""
    while (plan := scheduler.next_plan()) is not None:
        await stream.send(plan)
        is_last = False
        while not is_last:
            step = await stream.step()
            assert step.plan_id == plan.plan_id
            scheduler.on_outcome(plan, step.step, outcome_from_proto(step))
            is_last = step.is_last


def plan_to_proto(plan: Plan) -> Any:
    return worker_service_pb2.Plan(
        leader=common_pb2.Leader(epoch=plan.leader.epoch, nonce=plan.leader.nonce),
        plan_id=plan.plan_id,
        lease_steps=plan.lease_steps,
        leaves=plan.leaves,
        joins=[
            worker_service_pb2.Join(
                slot=join.slot,
                sequence_id=join.sequence_id,
                token_ids=join.token_ids,
                prompt_tokens=join.prompt_tokens,
                num_computed_tokens=join.num_computed_tokens,
                block_tables=[
                    worker_service_pb2.BlockTable(
                        blocks=table.blocks, num_skipped_blocks=table.num_skipped_blocks
                    )
                    for table in join.block_tables
                ],
                sampling=_sampling_to_proto(join.sampling),
                prompt_logprobs_from=join.prompt_logprobs_from,
            )
            for join in plan.joins
        ],
        append_slots=[slot for slot, _, _ in plan.appends],
        append_blocks=[block for _, block, _ in plan.appends],
        append_groups=[group for _, _, group in plan.appends],
        replace_slots=[slot for slot, _, _, _ in plan.replacements],
        replace_indices=[index for _, index, _, _ in plan.replacements],
        replace_blocks=[block for _, _, block, _ in plan.replacements],
        replace_groups=[group for _, _, _, group in plan.replacements],
        swap_sources=_left(plan.swaps),
        swap_targets=_right(plan.swaps),
        copy_sources=_left(plan.copies),
        copy_targets=_right(plan.copies),
        chunk_slots=_left(plan.chunks),
        chunk_tokens=_right(plan.chunks),
        slot_tokens_most=plan.slot_tokens_most,
        membership_checksum=plan.membership_checksum,
    )


def _sampling_to_proto(sampling: RowSampling) -> Any:
    plain = asdict(sampling)
    biases, words = plain.pop("logit_bias"), plain.pop("bad_words")
    return worker_service_pb2.RowSampling(
        logit_bias=[
            common_pb2.TokenBias(token_id=token_id, bias=bias) for token_id, bias in biases
        ],
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in words],
        **plain,
    )


def outcome_from_proto(step: Any) -> StepOutcome:
    counts = step.token_counts or [1] * len(step.slots)
    return StepOutcome(
        slots=tuple(chain.from_iterable(map(repeat, step.slots, counts))),
        token_ids=tuple(step.token_ids),
        logprobs=tuple(
            RowLogprobs(
                slot=row.slot,
                logprob=row.logprobs.logprob,
                top_token_ids=tuple(row.logprobs.top_token_ids),
                top_logprobs=tuple(row.logprobs.top_logprobs),
            )
            for row in step.logprobs
        ),
        finished=tuple((item.slot, _REASONS[item.reason]) for item in step.finished),
        errors=tuple((item.slot, item.message) for item in step.errors),
        unsatisfiable=tuple(item.slot for item in step.errors if item.is_unsatisfiable),
        prompt_logprobs=tuple(
            RowPromptLogprobs(
                slot=row.slot,
                position=row.logprobs.position,
                logprobs=tuple(row.logprobs.logprobs),
                top_token_ids=tuple(row.logprobs.top_token_ids),
                top_logprobs=tuple(row.logprobs.top_logprobs),
            )
            for row in step.prompt_logprobs
        ),
    )


def with_leader(plan: Plan, leader: Leader) -> Plan:
    return replace(plan, leader=leader)


def _left(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return [left for left, _ in pairs]


def _right(pairs: Iterable[tuple[int, int]]) -> list[int]:
    return [right for _, right in pairs]
