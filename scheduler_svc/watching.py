"""Whoever watches a leader's core: views of it at their pace, and what it costs kept small.

A look is taken on the event loop, and a step may wait for it; so all who watch share one, and looks
take a twentieth of the loop's time at most, however large the cell is. What is told of it is put
together in a thread where that takes long. Nothing is queued for anybody: who reads slowly is told
of the newest view next, against the one that they were told last.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary, ref

from kaiten.v1.watch_pb2 import WatchRequest, WatchResponse
from scheduler_svc.core.outcome import Outcome, PassedOver
from scheduler_svc.core.types import StepResult
from scheduler_svc.core.workers import Flight, Worker
from scheduler_svc.live_steps import LiveSteps, flight_of
from scheduler_svc.live_view import Looks, View
from scheduler_svc.live_view_wire import changes_to_proto
from service_kit.clock import Clock

INTERVAL_MS: Final = 250
INTERVAL_MS_MIN, INTERVAL_MS_MAX = 100, 60_000
# Of the loop's time, looks take one part in so many.
LOOKS_SHARE: Final = 20
# Sequences: of half as many it took 0.7 ms to say what has changed.
SHORT_MAX: Final = 512


def interval_of(asked_ms: int) -> float:
    """Seconds between two responses; 0 asks for none in particular."""
    return min(max(asked_ms or INTERVAL_MS, INTERVAL_MS_MIN), INTERVAL_MS_MAX) / 1000


class _Between(NamedTuple):
    """What somebody was told, and what is to be told now."""

    told: View | None
    view: View
    steps_told: int
    seen: int
    takes_rows: bool

    def is_same(self, other: "_Between") -> bool:
        """Views are large: one is the same only if it is the very one."""
        return self.told is other.told and self.view is other.view and self[2:] == other[2:]


class Watching:
    """Of one leadership."""

    def __init__(self, look: Callable[[Looks, View | None], View], clock: Clock) -> None:
        self._look, self._clock = look, clock
        # Kept while nobody watches, too: who begins to wants to know why somebody waits.
        self._looks: WeakKeyDictionary[Worker, tuple[PassedOver, ...]] = WeakKeyDictionary()
        # Whoever was told it last keeps it.
        self._newest: Callable[[], View | None] = lambda: None
        self._due_ns = 0
        self.watchers = 0
        self._steps = LiveSteps()
        # As of the newest view: steps that were answered, and sequences that are seen.
        self._steps_seen = self._newest_size = 0
        # The newest difference, and between what.
        self._made: tuple[_Between, asyncio.Future[WatchResponse]] | None = None

    def asked(self, worker: Worker, outcome: Outcome) -> None:
        """A plan was asked for. Where the queue was not looked at, the look before still counts."""
        passed_over = outcome.passed_over
        if not passed_over or passed_over[0].stage != "plan":
            self._looks[worker] = passed_over
        if (plan := outcome.plan) is not None:
            self._steps.planned(worker, plan, passed_over, is_seen=bool(self.watchers))

    def flight_of(self, worker: Worker, plan_id: int) -> Flight | None:
        """Of a step that is about to be told to the core. None: nobody watches."""
        return flight_of(worker, plan_id) if self.watchers else None

    def stepped(self, flight: Flight, result: StepResult, now_ns: int) -> None:
        """The core believed it."""
        self._steps.stepped(flight, result, now_ns)

    async def changes(
        self, request: WatchRequest, is_over: asyncio.Event
    ) -> AsyncGenerator[WatchResponse, None]:
        """A snapshot, then what has changed, until the leadership is over."""
        interval_s = interval_of(request.interval_ms)
        told: View | None = None
        with self._watched():
            steps_told = self._steps.count
            while not is_over.is_set():
                view, seen = self.newest(), self._steps_seen
                if view is not told:
                    between = _Between(told, view, steps_told, seen, request.takes_rows)
                    yield await self._difference(between)
                    told, steps_told = view, max(steps_told, seen)
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await is_over.wait()

    async def _difference(self, between: _Between) -> WatchResponse:
        """Made once for all who were told the same before. Nobody changes it."""
        if self._made is None or not self._made[0].is_same(between):
            told, view, steps_told, seen, takes_rows = between
            steps = self._steps.between(steps_told, seen)
            skipped = max(0, seen - steps_told - len(steps))
            make = partial(changes_to_proto, told, view, steps, skipped, takes_rows=takes_rows)
            self._made = between, self._making(make, is_short=told is not None and takes_rows)
        # Whoever began it may leave while others wait for it.
        return await asyncio.shield(self._made[1])

    def _making(
        self, make: Callable[[], WatchResponse], *, is_short: bool
    ) -> asyncio.Future[WatchResponse]:
        """What is short holds the interpreter no longer here than in a thread, which costs as much
        again to wake, and wakes the loop.
        """
        if is_short and self._newest_size <= SHORT_MAX:
            made = asyncio.get_running_loop().create_future()
            made.set_result(make())
            return made
        return asyncio.ensure_future(asyncio.to_thread(make))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Steps are kept while somebody watches, and next to nothing while nobody does."""
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._steps.forget()
                self._made = None

    def newest(self) -> View:
        """The view of now, or one so young that another look would cost too much."""
        began_ns, view = self._clock.monotonic_ns(), self._newest()
        if view is None or began_ns >= self._due_ns:
            view = self._look(self._looks, view)
            took_ns = self._clock.monotonic_ns() - began_ns
            self._due_ns = began_ns + max(INTERVAL_MS_MIN * 1_000_000, took_ns * LOOKS_SHARE)
            self._newest, self._steps_seen = ref(view), self._steps.count
            self._newest_size = len(view.waiting) + sum(len(r.seen) for r in view.rows.values())
        return view
