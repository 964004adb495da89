"""A step that does not end, from the device to the client, with every process real.

The device waits for a lock that this test has. Health says so, the supervisor starts the worker
again, and the streams go on where they were.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from kaiten.client import AsyncClient
from kaiten.client.results import Completion
from kaiten.local import services
from kaiten.local.child import ChildSpec
from kaiten.local.health import LIVE, state_of
from kaiten.local.model_source import resolve
from kaiten.local.part_options import WorkerOptions
from kaiten.local.stack import ServeOptions, Stack, planned_stack
from kaiten.local.supervisor import Supervisor
from tests.support.answers import until
from tests.support.held_steps import held
from tests.support.served import WAIT_S

HELD_FROM, TOKENS, STREAMS = 20, 40, 4
HUNG_S = 3.0


class Told:
    """What the person at the terminal is told, as it comes."""

    def __init__(self) -> None:
        self.died_why: list[tuple[str, str]] = []
        self.were_ready: list[str] = []

    def starting(self, name: str) -> None: ...
    def progress(self, name: str, log: str) -> None: ...
    def stopping(self, name: str) -> None: ...
    def stopped(self, name: str, *, by_itself: bool) -> None: ...

    def ready(self, name: str, seconds: float) -> None:
        self.were_ready.append(name)

    def died(self, name: str, why: str, restart_s: float) -> None:
        self.died_why.append((name, why))


def with_held_worker(stack: Stack, lock: Path) -> Stack:
    """The same, whose worker may be held, and nobody stands by: no scheduler dies here."""
    ours, theirs = services.command("gpu_worker"), services.command("tests.fakes.held_worker")
    flags = ("--lock", str(lock), "--hung-s", str(HUNG_S))

    def told(spec: ChildSpec) -> ChildSpec:
        if spec.name != "worker-0":
            return spec
        return replace(spec, command=(*theirs, *spec.command[len(ours) :], *flags))

    return replace(
        stack,
        stages=tuple(
            tuple(told(spec) for spec in stage if spec.name != "standby") for stage in stack.stages
        ),
    )


async def streams(address: str) -> list[Completion]:
    async with AsyncClient(address, resume_s=WAIT_S) as client:
        return await asyncio.gather(
            *(
                client.complete(
                    "Once upon a time",
                    seed=seed,
                    temperature=1.0,
                    max_tokens=TOKENS,
                    ignore_eos=True,
                )
                for seed in range(STREAMS)
            )
        )


async def test_a_step_that_hangs_is_told_ended_and_not_seen_by_clients(tmp_path: Path) -> None:
    lock, told, is_ready = tmp_path / "lock", Told(), asyncio.Event()
    small = WorkerOptions(dtype="fp32", threads=1, step_tokens=512)
    options = ServeOptions(
        model=resolve(None), data_dir=tmp_path, grpc_port=0, http_port=0, worker=small
    )

    async def on_ready(_took_s: object) -> None:
        is_ready.set()

    with planned_stack(options) as planned:
        stack = with_held_worker(planned, lock)
        supervisor = Supervisor(stack, told)
        running = asyncio.create_task(supervisor.run(on_ready))
        try:
            await until(lambda: is_ready.is_set() or running.done(), "a stack")
            undisturbed = await asyncio.wait_for(streams(stack.grpc_address), WAIT_S)
            with held(lock, HELD_FROM):
                disturbed = asyncio.create_task(streams(stack.grpc_address))

                async def says_so() -> bool:
                    said = await state_of(stack.worker_addresses[0], LIVE)
                    return said.startswith("not serving: a step has not ended for ")

                await until(says_so, "a worker that says that it hangs")
                await until(lambda: told.died_why, "its end")
            results = await asyncio.wait_for(disturbed, WAIT_S)
            # It serves before the supervisor has looked.
            await until(
                lambda: told.were_ready.count("worker-0") > len(told.died_why), "its readiness"
            )
        finally:
            supervisor.stop()
            await running
    assert [result.choices for result in results] == [each.choices for each in undisturbed]
    # On a machine that is busy a step that nobody holds may take as long, too.
    for name, why in told.died_why:
        assert (name, why.startswith("hung: no answer for ")) == ("worker-0", True), why
