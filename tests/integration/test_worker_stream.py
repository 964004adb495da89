"""WorkerService over a local port with a device that waits to be told: leases, fencing, faults."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import numpy as np
import pytest

from gpu_worker.batch.plans import BlockTable, Join, Leader, Plan
from gpu_worker.batch.step_types import StepInputs, StepSamples
from kaiten.v1 import common_pb2, worker_service_pb2
from service_kit.grpc_errors import metadata_of
from tests.fakes.mock_worker import MockDevice, token_function
from tests.support.answers import until
from tests.support.mini_scheduler import LEADER, checksum, plan, sampling
from tests.support.worker_server import (
    LIMITS,
    WAIT_S,
    LeaderStream,
    Served,
    open_request,
    serving,
    with_leader,
)

FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


class GatedDevice(MockDevice):
    """Each step waits for a permit; rows whose first token is `poison` make the step fail."""

    def __init__(self) -> None:
        super().__init__(token_function(np.arange(3, LIMITS.vocab_size)))
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.poison: frozenset[int] = frozenset()
        self.is_broken = False
        self.steps: list[StepInputs] = []

    def execute(self, step: StepInputs) -> StepSamples:
        self.entered.release()
        assert self.permits.acquire(timeout=WAIT_S)
        if self.is_broken or self.poison & set(step.sequence_ids.tolist()):
            raise RuntimeError("the device failed")
        self.steps.append(step)
        return super().execute(step)

    def allow(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.permits.release()

    async def wait_entered(self) -> None:
        """Until one more step has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=WAIT_S)


@pytest.fixture
def device() -> GatedDevice:
    return GatedDevice()


@pytest.fixture
async def served(device: GatedDevice) -> AsyncIterator[Served]:
    async with serving(device) as served:
        yield served
        # Whatever a failed test left waiting.
        device.allow(1000)


def join(slot: int, sequence_id: int, *, max_tokens: int = 30, prompt: int = 3) -> Join:
    return Join(
        slot=slot,
        sequence_id=sequence_id,
        token_ids=tuple(range(3, 3 + prompt)),
        prompt_tokens=prompt,
        num_computed_tokens=0,
        block_tables=(BlockTable(tuple(range(slot * 16, slot * 16 + 16))),),
        sampling=sampling(max_tokens=max_tokens),
    )


def first_plan(*joins: Join, lease_steps: int = 1) -> Plan:
    return plan(
        1,
        lease_steps=lease_steps,
        joins=joins,
        chunks=tuple((item.slot, len(item.token_ids)) for item in joins),
        membership_checksum=checksum([(item.slot, item.sequence_id) for item in joins]),
    )


async def test_a_lease_runs_by_itself_and_says_when_it_ends(
    served: Served, device: GatedDevice
) -> None:
    stream = await LeaderStream.open(served)
    device.allow(4)
    await stream.send(first_plan(join(0, 9), lease_steps=4))
    steps = [await stream.step() for _ in range(4)]
    assert [(step.plan_id, step.step, step.is_last) for step in steps] == [
        (1, 0, False),
        (1, 1, False),
        (1, 2, False),
        (1, 3, True),
    ]
    assert all(list(step.slots) == [0] and step.boot_id == "boot" for step in steps)
    assert [step.timings.tokens_computed for step in steps] == [3, 1, 1, 1]


async def test_plain_results_of_a_lease_are_gathered_into_one_message(device: GatedDevice) -> None:
    async with serving(device, gather_s=60.0) as served:
        stream = await LeaderStream.open(served)
        device.allow(6)
        joins = (join(0, 9, max_tokens=4), join(1, 10))
        await stream.send(first_plan(*joins, lease_steps=6))
        messages = [await stream.read() for _ in range(3)]
    steps = [[step.step for step in message.results.steps] for message in messages]
    # The prompts' step, the step in which row 0 ends, the last of the lease.
    assert steps == [[0], [1, 2, 3], [4, 5]]
    assert messages[-1].results.steps[-1].is_last


async def test_a_lease_ends_early_when_every_row_has_finished(
    served: Served, device: GatedDevice
) -> None:
    stream = await LeaderStream.open(served)
    device.allow(2)
    await stream.send(
        first_plan(join(0, 9, max_tokens=2), join(1, 10, max_tokens=1), lease_steps=9)
    )
    first, second = await stream.step(), await stream.step()
    assert [(item.slot, item.reason) for item in first.finished] == [
        (1, common_pb2.FINISH_REASON_LENGTH)
    ]
    assert list(second.slots) == [0]
    assert second.is_last


async def test_a_newer_plan_waits_for_the_first_step_and_then_ends_the_lease(
    served: Served, device: GatedDevice
) -> None:
    stream = await LeaderStream.open(served)
    members = checksum([(0, 9)])
    await stream.send(first_plan(join(0, 9), lease_steps=20))
    await stream.send(plan(2, lease_steps=20, membership_checksum=members))
    await stream.send(plan(3, lease_steps=2, membership_checksum=members))
    await device.wait_entered()
    await served.wait_waiting(2)
    device.allow(100)
    seen = [await stream.step() for _ in range(4)]
    assert [(step.plan_id, step.step, step.is_last) for step in seen] == [
        (1, 0, True),
        (2, 0, True),
        (3, 0, False),
        (3, 1, True),
    ]


async def test_a_plan_in_mid_lease_is_taken_at_the_next_boundary(
    served: Served, device: GatedDevice
) -> None:
    stream = await LeaderStream.open(served)
    device.allow(2)
    await stream.send(first_plan(join(0, 9), lease_steps=20))
    assert not (await stream.step()).is_last
    assert not (await stream.step()).is_last
    await stream.send(
        plan(
            2,
            joins=(join(1, 10),),
            chunks=((1, 2),),
            membership_checksum=checksum([(0, 9), (1, 10)]),
        )
    )
    await served.wait_waiting(1)
    device.allow(2)
    third = await stream.step()
    assert (third.plan_id, third.step, third.is_last) == (1, 2, True)
    fourth = await stream.step()
    # The chunk of slot 1 does not close its gap, so only slot 0 samples.
    assert (fourth.plan_id, list(fourth.slots), fourth.is_last) == (2, [0], True)
    assert fourth.timings.tokens_computed == 3


async def test_a_plan_with_nothing_to_run_is_answered(served: Served) -> None:
    stream = await LeaderStream.open(served)
    await stream.send(plan(1, lease_steps=5))
    step = await stream.step()
    assert (step.plan_id, step.step, step.is_last, list(step.slots)) == (1, 0, True, [])


async def test_a_repeated_plan_is_ignored(served: Served, device: GatedDevice) -> None:
    stream = await LeaderStream.open(served)
    device.allow(2)
    await stream.send(first_plan(join(0, 9)))
    await stream.send(first_plan(join(0, 9)))
    await stream.send(plan(2, membership_checksum=checksum([(0, 9)])))
    assert [(await stream.step()).plan_id for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (plan(2), "expected plan 1"),
        (plan(1, membership_checksum=5), "membership checksum"),
        (plan(1, leaves=(0,)), "nobody is in it"),
        (plan(1, copies=((0, 64),)), "block 64 is not below 64"),
        (plan(1, swaps=((0, 64),)), "this worker has no host blocks"),
        (with_leader(plan(1), Leader(epoch=2, nonce=7)), "another leader"),
    ],
)
async def test_a_wrong_plan_ends_the_stream_and_a_new_one_starts_empty(
    served: Served, device: GatedDevice, wrong: Plan, said: str
) -> None:
    stream = await LeaderStream.open(served)
    await stream.send(wrong)
    code, text = await stream.failure()
    assert code is FAILED_PRECONDITION
    assert said in text
    again = await LeaderStream.open(served)
    device.allow()
    await again.send(first_plan(join(0, 9)))
    assert list((await again.step()).slots) == [0]


async def test_columns_that_are_not_parallel_are_refused(served: Served) -> None:
    stream = await LeaderStream.open(served)
    broken = worker_service_pb2.Plan(
        leader=common_pb2.Leader(epoch=1, nonce=7), plan_id=1, lease_steps=1, append_slots=[1]
    )
    await stream.call.write(worker_service_pb2.ExecuteRequest(plan=broken))
    assert await stream.failure() == (
        FAILED_PRECONDITION,
        "append_slots, append_blocks must be parallel, but have 1 and 0 items",
    )


@pytest.mark.parametrize(
    ("leader", "boot_id", "said"),
    [
        (Leader(epoch=4, nonce=7), "boot", "stale leader: epoch 4"),
        (Leader(epoch=5, nonce=8), "boot", "another leader"),
        (Leader(epoch=9, nonce=9), "other", "restarted"),
    ],
)
async def test_a_stale_leader_is_refused_and_the_current_one_goes_on(
    served: Served, device: GatedDevice, leader: Leader, boot_id: str, said: str
) -> None:
    current = Leader(epoch=5, nonce=7)
    stream = await LeaderStream.open(served, current)
    stale = LeaderStream(served.stub.Execute())
    await stale.call.write(open_request(leader, boot_id))
    code, text = await stale.failure()
    assert code is FAILED_PRECONDITION
    assert said in text
    device.allow()
    await stream.send(with_leader(first_plan(join(0, 9)), current))
    assert list((await stream.step()).slots) == [0]


async def test_a_worker_computes_for_one_cell_at_a_time(served: Served) -> None:
    """The other's epochs say nothing: neither that its leader is newer, nor that ours is old."""
    ours, other = Leader(epoch=9, nonce=7), Leader(epoch=99, nonce=8)
    stream = await LeaderStream.open(served, ours, cell="a in store 1")
    refused = LeaderStream(served.stub.Execute())
    await refused.call.write(open_request(other, cell="b in store 2"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await refused.read()
    assert raised.value.code() is FAILED_PRECONDITION
    said = raised.value.details() or ""
    assert "computes for cell a in store 1, and cannot for cell b in store 2 too" in said
    assert "epoch" not in metadata_of(raised.value)
    await stream.close()

    async def is_free() -> bool:
        try:
            await LeaderStream.open(served, Leader(epoch=3, nonce=1), cell="b in store 2")
        except grpc.aio.AioRpcError:
            return False
        return True

    # Its leader is gone: whichever comes next may have it, and the fence begins anew.
    await until(is_free, "the end of its leader's stream")


@pytest.mark.parametrize("newer", [LEADER, Leader(epoch=2, nonce=1)])
async def test_a_newer_stream_takes_over_with_an_empty_batch(
    served: Served, device: GatedDevice, newer: Leader
) -> None:
    old = await LeaderStream.open(served)
    await old.send(first_plan(join(0, 9), lease_steps=50))
    await device.wait_entered()
    opening = asyncio.create_task(LeaderStream.open(served, newer))
    assert await old.failure() == (FAILED_PRECONDITION, "a newer stream took over")
    # The batch is handed over at the step boundary, not before.
    assert not opening.done()
    device.allow(2)
    stream = await opening
    # Slot 0 is free again.
    await stream.send(with_leader(first_plan(join(0, 11)), newer))
    assert (await stream.step()).slots == [0]
    assert [step.sequence_ids.tolist() for step in device.steps] == [[9], [11]]


async def test_a_leader_that_goes_away_leaves_an_idle_worker(
    served: Served, device: GatedDevice
) -> None:
    stream = await LeaderStream.open(served)
    device.allow(2)
    await stream.send(first_plan(join(0, 9), lease_steps=50))
    await stream.step()
    await stream.step()
    for _ in range(3):
        await device.wait_entered()
    await stream.close()
    await served.wait_waiting(1)
    device.allow(1)
    # The third step was running; no fourth follows, and the batch is empty.
    await served.wait_waiting(0)
    await LeaderStream.open(served)
    assert served.rows.members == ()
    assert len(device.steps) == 3


async def test_plans_before_open_and_a_second_open_are_refused(served: Served) -> None:
    early = LeaderStream(served.stub.Execute())
    await early.send(plan(1))
    assert await early.failure() == (FAILED_PRECONDITION, "the first message of a stream is Open")
    nothing = LeaderStream(served.stub.Execute())
    await nothing.call.done_writing()
    assert await nothing.failure() == (FAILED_PRECONDITION, "the first message of a stream is Open")
    twice = await LeaderStream.open(served)
    await twice.call.write(open_request())
    assert await twice.failure() == (FAILED_PRECONDITION, "after Open a stream carries plans only")


async def test_what_is_no_message_ends_its_stream_and_the_next_one_goes_on(served: Served) -> None:
    """At once, and the batch is free: no plan that comes after it would be heard."""
    call = served.channel.stream_stream("/kaiten.v1.WorkerService/Execute")()
    await call.write(open_request(cell="0").SerializeToString())
    assert await asyncio.wait_for(call.read(), WAIT_S) is not grpc.aio.EOF
    await call.write(b"\xff")
    broken = LeaderStream(call)
    assert await broken.failure() == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the request's bytes are not a message of this method",
    )
    # Of another cell: it would be refused while the worker still computed for the first.
    await LeaderStream.open(served, cell="1")


async def test_describe_answers_while_a_step_runs(served: Served, device: GatedDevice) -> None:
    stream = await LeaderStream.open(served)
    await stream.send(first_plan(join(0, 9)))
    await device.wait_entered()
    answer = await served.stub.Describe(worker_service_pb2.DescribeRequest(), timeout=WAIT_S)
    assert (answer.worker.boot_id, answer.worker.slots_max) == ("boot", 4)
    assert device.steps == []
    device.allow()
    assert (await stream.step()).is_last


async def test_a_row_that_cannot_be_computed_fails_alone(
    served: Served, device: GatedDevice
) -> None:
    device.poison = frozenset({10})
    stream = await LeaderStream.open(served)
    # The step of three, then each row alone.
    device.allow(4)
    await stream.send(first_plan(join(0, 9), join(1, 10), join(2, 11)))
    step = await stream.step()
    assert list(step.slots) == [0, 2]
    assert [(error.slot, error.message) for error in step.errors] == [
        (1, "the step failed for this row: RuntimeError")
    ]
    device.allow(1)
    await stream.send(plan(2, membership_checksum=checksum([(0, 9), (1, 10), (2, 11)])))
    assert list((await stream.step()).slots) == [0, 2]
    assert served.crashes == []


async def test_a_device_that_fails_every_row_ends_the_worker(
    served: Served, device: GatedDevice
) -> None:
    device.is_broken = True
    stream = await LeaderStream.open(served)
    device.allow(3)
    await stream.send(first_plan(join(0, 9), join(1, 10)))
    async with asyncio.timeout(WAIT_S):
        while not served.crashes:
            await asyncio.to_thread(device.entered.acquire, timeout=0.01)
    assert str(served.crashes[0]) == "the device failed"


async def test_copies_come_before_the_first_step(served: Served, device: GatedDevice) -> None:
    stream = await LeaderStream.open(served)
    await stream.send(plan(1, copies=((3, 5), (4, 6))))
    await stream.step()
    assert device.copied == [(3, 5), (4, 6)]


async def test_swaps_come_before_the_first_step_in_their_order(device: GatedDevice) -> None:
    async with serving(device, replace(LIMITS, host_block_count=2)) as served:
        stream = await LeaderStream.open(served)
        swaps = ((5, 64), (65, 5), (3, 64), (64, 7))
        await stream.send(plan(1, swaps=swaps))
        await stream.step()
    assert device.swapped == [*swaps]
