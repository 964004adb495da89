"""The connection to a worker breaks, again and again, and the worker lives: nobody is to blame."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kaiten.local.ports import HeldPort
from kaiten.v1.common_pb2 import FINISH_REASON_LENGTH
from tests.support.answers import Answer, until
from tests.support.cluster import Cluster, Flags
from tests.support.relay import Relay

# More than convict a request, were they deaths.
RESETS = 6
# Of the long prompt; the worker stops at one after the other.
POSITIONS = range(100, 100 * RESETS + 1, 100)


@asynccontextmanager
async def relayed(tmp_path: Path, flags: Flags) -> AsyncIterator[tuple[Cluster, Relay]]:
    """A worker that its scheduler reaches through a relay."""
    with HeldPort() as held:
        async with Relay(held.address) as relay, Cluster(tmp_path, workers=0) as cluster:
            here = {"grpc_port": held.number, "advertise_address": relay.address}
            cluster.add_worker({**flags, **here, "gates": cluster.gates()}).start()
            await cluster.ready(workers=1)
            yield cluster, relay


async def reset(cluster: Cluster, relay: Relay) -> None:
    """Break it once it is there, and wait until the scheduler has noticed."""
    (scheduler,) = cluster.schedulers

    def lost() -> int:
        return len(cluster.events(scheduler, "worker.lost"))

    await until(
        lambda: len(cluster.events(scheduler, "worker.joined")) > lost(), "the worker is back"
    )
    before = lost()
    relay.reset()
    await until(lambda: lost() > before, "the break is noticed")


def assert_nobody_is_blamed(cluster: Cluster, answers: list[Answer]) -> None:
    """Complete; that the tokens are right is checked by the cluster."""
    (scheduler,) = cluster.schedulers
    assert {reason for answer in answers for reason in answer.reasons} == {FINISH_REASON_LENGTH}
    assert not cluster.events(scheduler, "worker.forgotten")
    lost = cluster.events(scheduler, "worker.lost")
    # More, if a peer was put aside for so long that gRPC took it for gone.
    assert len(lost) >= RESETS
    assert {entry["is_crash"] for entry in lost} == {None}


async def test_in_the_middle_of_a_long_prompt(tmp_path: Path) -> None:
    async with relayed(tmp_path, {"step_tokens": 24, "slots": 4}) as (cluster, relay):
        gates = cluster.gates(*POSITIONS)
        answer = await cluster.submit(prompt_tokens=700, max_tokens=10)

        async def is_prefilling() -> bool:
            state = await cluster.state()
            return state is not None and state.running == 1

        for position in POSITIONS:
            await until(is_prefilling, "the prompt in a batch")
            await reset(cluster, relay)
            assert not answer.token_count
            # The batch is given up between two steps; the next stream gets as far as the next gate.
            (gates / str(position)).unlink()
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
