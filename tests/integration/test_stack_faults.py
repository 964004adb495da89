"""Processes die under live streams, as a client of the gateway sees it: nothing at all.

The shipped model over real processes, text compared with an undisturbed run.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from kaiten.client import AsyncClient
from kaiten.client.results import Completion
from kaiten.local.log_reading import cause_of
from kaiten.mini import CHECKPOINT
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.answers import until
from tests.support.cluster import Cluster, Flags, is_answering
from tests.support.processes import AHEAD_WORKER, GATEWAY, WORKER, ServiceProcess

STREAMS = 4
MAX_TOKENS = 24
# In no text: the token that says who speaks.
REFUSED_TOKEN = 3
PROMPTS = [f"The chef looks at seat {number} and" for number in range(STREAMS)]

Outputs = list[tuple[str, tuple[int, ...]]]


@dataclass
class Stack:
    cluster: Cluster
    addresses: list[str] = field(default_factory=list)
    gateways: list[ServiceProcess] = field(default_factory=list)

    @property
    def target(self) -> str:
        """All gateways behind one gRPC name."""
        return f"ipv4:{','.join(self.addresses)}"


@asynccontextmanager
async def serving(
    tmp_path: Path,
    *,
    gateways: int = 1,
    workers: int = 1,
    first: Flags | None = None,
    ahead: Flags | None = None,
) -> AsyncIterator[Stack]:
    """`first`: further flags of the first worker; `ahead`: the flags of one more, before it, whose
    device is a step ahead."""
    async with Cluster(tmp_path, workers=0) as cluster:
        stack = Stack(cluster)
        flags: dict[str, object] = {"model": CHECKPOINT, "slots": STREAMS, "threads": 1}
        flags |= {"kv_blocks": 512, "step_tokens": 512}
        if ahead is not None:
            workers += 1
            # The compiled kernels have no padding rows, which recorded steps need. In fp32 the
            # others compute a row's tokens whatever the batch. They make the largest step before
            # they are ready: room for all prompts.
            flags |= {"native": "off", "dtype": "fp32", "step_tokens": 128}
            cluster.add_worker({**flags, **ahead}, AHEAD_WORKER).start()
        while len(cluster.workers) < workers:
            is_first = not cluster.workers
            cluster.add_worker({**flags, **(first or {})} if is_first else flags, WORKER).start()
        for index in range(gateways):
            port = cluster.hold_port()
            stack.addresses.append(port.address)
            flags = {
                "redis_url": cluster.store.url,
                "model": CHECKPOINT,
                "grpc_port": port.number,
                "http_port": 0,
            }
            stack.gateways.append(cluster.add(f"gateway-{index}", GATEWAY, flags))
            stack.gateways[-1].start()
        await cluster.ready(workers=workers)
        for address in stack.addresses:
            await until(partial(is_answering, address), "ready gateways")
        yield stack


class Crowd:
    """Streams at once, seeded, each read to its end."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._ask()

    def _ask(self) -> None:
        self.tokens = 0
        self.tasks = [asyncio.create_task(self._one(index)) for index in range(STREAMS)]

    async def _one(self, index: int) -> Completion:
        async with self._client.generate(
            PROMPTS[index],
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            temperature=0.8,
            seed=index,
            return_token_ids=True,
        ) as generation:
            async for delta in generation:
                self.tokens += delta.token_count
            return await generation.result()

    def _is_over(self) -> bool:
        return any(task.done() for task in self.tasks)

    async def is_under_way(self, tokens_each: int = 6) -> None:
        """Everybody has some of the answer and nobody all of it.

        Asked once more if this process was put aside until it was told everything at once.
        """
        while True:
            await until(
                lambda: self._is_over() or self.tokens >= tokens_each * STREAMS,
                "streams under way",
            )
            if not self._is_over():
                return
            await self.completions()
            self._ask()

    async def completions(self) -> list[Completion]:
        return await asyncio.gather(*self.tasks)


def outputs(completions: list[Completion]) -> Outputs:
    return [(each.choices[0].text, each.choices[0].token_ids) for each in completions]


_undisturbed: dict[str, Outputs] = {}


async def undisturbed(client: AsyncClient, dtype: str = "auto") -> Outputs:
    """What workers of this dtype say, asked once: they compute the same whoever else runs there."""
    if dtype not in _undisturbed:
        _undisturbed[dtype] = outputs(await Crowd(client).completions())
    expected = _undisturbed[dtype]
    assert all(len(tokens) == MAX_TOKENS for _, tokens in expected)
    return expected


async def test_a_worker_that_drafts_tokens_is_killed_and_one_that_does_not_goes_on(
    tmp_path: Path,
) -> None:
    drafts = {"num_speculative_tokens": 4}
    async with (
        serving(tmp_path, workers=2, first=drafts) as stack,
        AsyncClient(stack.target) as client,
    ):
        drafting, plain = stack.cluster.workers
        drafting.kill()
        expected = await undisturbed(client)
        plain.kill()
        drafting.start()
        crowd = Crowd(client)
        await crowd.is_under_way()
        plain.start()
        drafting.kill()
        assert outputs(await crowd.completions()) == expected


async def test_a_killed_worker_is_not_noticed_when_another_is_there(tmp_path: Path) -> None:
    async with serving(tmp_path, workers=2) as stack, AsyncClient(stack.target) as client:
        expected = await undisturbed(client)
        crowd = Crowd(client)
        await crowd.is_under_way()
        stack.cluster.workers[0].kill()
        assert outputs(await crowd.completions()) == expected


async def test_who_is_there_once_is_killed_and_restarted_and_gateways_end(tmp_path: Path) -> None:
    """One after the other, each under streams; who followed at a gateway goes on at another."""
    async with serving(tmp_path, gateways=3) as stack, AsyncClient(stack.target) as client:
        (worker,), (scheduler,) = stack.cluster.workers, stack.cluster.schedulers
        kills: dict[str, Callable[[], None]] = {
            "the only worker": partial(restarted, worker),
            "the only scheduler": partial(restarted, scheduler),
            "a gateway, killed": partial(stack.gateways[0].send, signal.SIGKILL),
            "a gateway, told to end": partial(stack.gateways[1].send, signal.SIGTERM),
        }
        expected = await undisturbed(client)
        for who, kill in kills.items():
            crowd = Crowd(client)
            await crowd.is_under_way()
            kill()
            assert outputs(await crowd.completions()) == expected, who
            await stack.cluster.ready(workers=1)


def restarted(process: ServiceProcess) -> None:
    process.kill()
    process.start()


LOST = "the GPU failed while it computed (CUDA error: an illegal memory access was encountered)"


FULL = "the GPU's memory is full in a step of one row"


async def test_a_full_gpu_is_not_noticed_when_another_worker_is_there(tmp_path: Path) -> None:
    """It ends by itself, its last lines say why, and what it computed goes on elsewhere."""
    fails_if = tmp_path / "fails"
    async with (
        serving(tmp_path, ahead={"full_if": fails_if}) as stack,
        AsyncClient(stack.target) as client,
    ):
        first = stack.cluster.workers[0]
        stack.cluster.may_crash.append(first)
        expected = await undisturbed(client, "fp32")
        crowd = Crowd(client)
        await crowd.is_under_way()
        fails_if.touch()
        assert outputs(await crowd.completions()) == expected
        # It has no step any more if this process was put aside while the streams went on.
        while first.is_alive:
            assert outputs(await Crowd(client).completions()) == expected
        assert first.exit_code == 1
        assert FULL in cause_of(first.log())


async def test_the_only_gpu_lost_again_and_again_is_not_noticed(tmp_path: Path) -> None:
    lost_if = tmp_path / "lost"
    async with (
        serving(tmp_path, workers=0, ahead={"lost_if": lost_if}) as stack,
        AsyncClient(stack.target) as client,
    ):
        (worker,) = stack.cluster.workers
        stack.cluster.may_crash.append(worker)
        expected = await undisturbed(client, "fp32")
        crowd = Crowd(client)
        for tokens_each in (6, 12):
            await crowd.is_under_way(tokens_each)
            lost_if.touch()
            # It may have no step any more: this process was put aside while the streams went on.
            another = asyncio.create_task(client.complete("Tea", max_tokens=1))
            assert await asyncio.to_thread(worker.join) == 1
            assert LOST in cause_of(worker.log())
            lost_if.unlink()
            worker.start()
            await another
        assert outputs(await crowd.completions()) == expected
        assert worker.log().count(LOST) >= 2


async def test_a_launch_refused_for_one_request_fails_no_other(tmp_path: Path) -> None:
    ahead = {"refused_token": REFUSED_TOKEN, "slots": STREAMS + 2}
    async with (
        serving(tmp_path, workers=0, ahead=ahead) as stack,
        AsyncClient(stack.target, resume_s=0) as client,
    ):
        expected = await undisturbed(client, "fp32")
        is_beside = False
        # Once more if this process was put aside until the others were done.
        while not is_beside:
            crowd = Crowd(client)
            await crowd.is_under_way()
            for _ in range(3):
                refused = await client.complete(token_ids=[7, REFUSED_TOKEN, 9], max_tokens=5)
                (choice,) = refused.choices
                assert choice.finish_reason == "error"
                assert choice.error == "the step failed for this row: RuntimeError"
            is_beside = not any(task.done() for task in crowd.tasks)
            assert outputs(await crowd.completions()) == expected
        (worker,) = stack.cluster.workers
        assert worker.is_alive
        assert worker.log().count('"step.failed"') >= 3


async def test_clients_that_read_one_token_and_leave_cost_nothing(tmp_path: Path) -> None:
    """More at once than there are slots, again and again."""
    async with serving(tmp_path) as stack:
        request = pb.GenerateRequest(text="The chef")
        request.sampling.max_tokens = 1000
        request.sampling.ignore_eos = True
        async with grpc.aio.insecure_channel(stack.addresses[0]) as channel:
            stub = InferenceServiceStub(channel)

            async def read_one_and_leave() -> None:
                call = stub.Generate(request)
                async for answer in call:
                    if answer.event.HasField("delta"):
                        break
                call.cancel()

            for _ in range(3):
                await asyncio.gather(*(read_one_and_leave() for _ in range(4 * STREAMS)))
        # Leaving `serving` checks that every block is free and nothing is live in the ledger.


async def test_every_process_drains_on_sigterm(tmp_path: Path) -> None:
    async with serving(tmp_path, workers=2) as stack, AsyncClient(stack.target) as client:
        expected = await undisturbed(client)
        crowd = Crowd(client)
        await crowd.is_under_way()
        stack.cluster.workers[0].send(signal.SIGTERM)
        stack.gateways[0].send(signal.SIGTERM)
        assert outputs(await crowd.completions()) == expected
        scheduler = stack.cluster.schedulers[0]
        scheduler.send(signal.SIGTERM)
        ended = (stack.cluster.workers[0], stack.gateways[0], scheduler)
        await until(lambda: not any(process.is_alive for process in ended), "drained processes")
        assert [process.exit_code for process in ended] == [0, 0, 0]
        scheduler.start()
        await stack.cluster.ready(workers=1)
