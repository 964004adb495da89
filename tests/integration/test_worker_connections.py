"""The connection to a worker breaks, again and again, and the worker lives: nobody is to blame."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kaiten.ports import HeldPort
from protos.kaiten.v1.common_pb2 import FINISH_REASON_LENGTH
from tests.support.answers import Answer, until
from tests.support.cluster import Cluster, Flags
from tests.support.relay import Relay

# More than convict a request, were they deaths.
RESETS = 6


@asynccontextmanager
async def relayed(tmp_path: Path, flags: Flags) -> AsyncIterator[tuple[Cluster, Relay]]:
    """A worker that its scheduler reaches through a relay."""
    with HeldPort() as held:
        async with Relay(held.address) as relay, Cluster(tmp_path, workers=0) as cluster:
            here = {"grpc_port": held.number, "advertise_address": relay.address}
            cluster.add_worker({**flags, **here}).start()
            await cluster.ready(workers=1)
            yield cluster, relay


async def reset(cluster: Cluster, relay: Relay) -> None:
    """Break it once it is there, and wait until the scheduler has noticed."""
    (scheduler,) = cluster.schedulers
    before = len(cluster.events(scheduler, "worker.lost"))
    await until(
        lambda: len(cluster.events(scheduler, "worker.joined")) > before, "the worker is back"
    )
    relay.reset()
    await until(
        lambda: len(cluster.events(scheduler, "worker.lost")) > before, "the break is noticed"
    )


def assert_nobody_is_blamed(cluster: Cluster, answers: list[Answer]) -> None:
    """Complete; that the tokens are right is checked by the cluster."""
    (scheduler,) = cluster.schedulers
    assert {reason for answer in answers for reason in answer.reasons} == {FINISH_REASON_LENGTH}
    assert not cluster.events(scheduler, "worker.forgotten")
    lost = cluster.events(scheduler, "worker.lost")
    assert [entry["is_crash"] for entry in lost] == [None] * RESETS


async def test_in_the_middle_of_a_long_prompt(tmp_path: Path) -> None:
    flags = {"step_tokens": 24, "slots": 4, "step_ms": 60}
    async with relayed(tmp_path, flags) as (cluster, relay):
        answer = await cluster.submit(prompt_tokens=700, max_tokens=10)

        async def is_prefilling() -> bool:
            state = await cluster.state()
            return state is not None and state.running == 1

        for _ in range(RESETS):
            await until(is_prefilling, "the prompt in a batch")
            assert not answer.token_count
            await reset(cluster, relay)
        await cluster.all_done()
        assert_nobody_is_blamed(cluster, [answer])


async def test_in_the_middle_of_decode(tmp_path: Path) -> None:
    async with relayed(tmp_path, {"step_ms": 5}) as (cluster, relay):
        answers = await cluster.submit_many(12, max_tokens=150)
        for number in range(RESETS):
            for answer in answers:
                await answer.has_tokens(1 + 10 * number)
            await reset(cluster, relay)
        await cluster.all_done()
        assert_nobody_is_blamed(cluster, answers)
