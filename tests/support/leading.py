"""A leadership in this process, on a real store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from kaiten.v1.common_pb2 import Capabilities, WorkerDescription
from ledger import Candidate, Ledger
from scheduler_svc.leader_session import LeaderSession
from scheduler_svc.meters import Meters
from scheduler_svc.settings import SchedulerSettings
from service_kit.clock import SystemClock
from service_kit.metrics import Metrics
from tests.support.answers import until

TTL_S = 1.0
# Nobody listens there.
NOWHERE = "127.0.0.1:9"


class JumpingClock(SystemClock):
    """The machine's, and what a test adds."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.ahead_ns


@asynccontextmanager
async def leading(
    ledger: Ledger, clock: SystemClock | None = None, **changed: object
) -> AsyncIterator[tuple[LeaderSession, "asyncio.Task[None]"]]:
    """A leadership that leads, and the task that runs it."""
    clock = clock or SystemClock()
    settings = SchedulerSettings(lease_ttl_s=TTL_S, **changed)  # type: ignore[arg-type]
    leader = await Candidate(ledger, clock, TTL_S).campaign()
    meters = Meters(Metrics("scheduler", is_scraped=False).meter)
    session = LeaderSession(
        ledger=ledger, leader=leader, settings=settings, clock=clock, meters=meters
    )
    await session.recover()
    running = asyncio.create_task(session.run())
    await until(lambda: session.roster._tasks is not None, "the leadership runs")
    try:
        yield session, running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await running


def worker(boot_id: str, **told: Any) -> WorkerDescription:
    return WorkerDescription(
        boot_id=boot_id,
        block_size=16,
        block_count=4,
        slots_max=4,
        step_tokens_max=8,
        capabilities=Capabilities(plan_version=1, **told),
    )
