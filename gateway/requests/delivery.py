"""A request's time at its gateway: until it was in the ledger, and after its end was.

What the scheduler tells of a request lies between the two, on the ledger's clock; a gateway has its
own. Where the clocks meet is the request's arrival in the ledger, which this gateway saw to within
the round trip of its submit.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Iterator, Sequence
from time import perf_counter_ns
from typing import Final

from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase
from service_kit.errors import DeadlineExceeded

# Requests that are over.
KEPT_MAX: Final = 4096
# Of one request: times in which its client did not take what was there, and how long is long.
WAITS_MAX: Final = 64
WAIT_NS_MIN: Final = 5_000_000

ACCEPTING: Final = "checked, tokenized and written into the ledger"
OTHERS: Final = "other choices of its request went on"
DELIVERING: Final = "from the ledger through the gateway to its client"
NOT_READ: Final = "its client, or the way to it, did not take what was sent"
Spans = Sequence[tuple[int, int]]


class Delivery:
    """Of one request that was submitted here, on the clock of `perf_counter_ns`."""

    __slots__ = ("_handed_ns", "_waits", "accepted_ns", "arrived_ns", "ended_ns", "submitted_ns")

    def __init__(self, arrived_ns: int = 0) -> None:
        self.arrived_ns = arrived_ns or perf_counter_ns()
        self.submitted_ns = self.accepted_ns = self.ended_ns = self._handed_ns = 0
        self._waits: deque[tuple[int, int]] | None = None

    async def in_time(self, made: Awaitable[SubmitRecord], timeout_s: float | None) -> SubmitRecord:
        """With what is left of the time since its arrival. DeadlineExceeded: nothing is; others'
        chat templates and grammars may have been before its own."""
        if timeout_s is None:
            return await made
        until_s = self.arrived_ns / 1e9 + timeout_s
        try:
            async with asyncio.timeout(until_s - perf_counter_ns() / 1e9):
                record = await made
        except TimeoutError:
            raise DeadlineExceeded("queue", "it could not be accepted in time") from None
        left_s = until_s - perf_counter_ns() / 1e9
        record.timeout_ms = min(record.timeout_ms, max(1, math.ceil(left_s * 1000)))
        return record

    def submitting(self) -> None:
        self.submitted_ns = perf_counter_ns()

    def accepted(self) -> None:
        self.accepted_ns = perf_counter_ns()

    def hand(self) -> None:
        """Whoever writes to the client has something to write."""
        self._handed_ns = perf_counter_ns()

    def taken(self) -> None:
        """All of it was written."""
        now_ns = perf_counter_ns()
        if self._handed_ns and now_ns - self._handed_ns >= WAIT_NS_MIN:
            if self._waits is None:
                self._waits = deque(maxlen=WAITS_MAX)
            self._waits.append((self._handed_ns, now_ns))
        self._handed_ns = 0

    def close(self) -> None:
        """The client has the last of it."""
        self.taken()
        self.ended_ns = perf_counter_ns()

    @property
    def waits(self) -> Spans:
        """When the client kept us waiting, one after the other."""
        return tuple(self._waits or ())


class Deliveries:
    """Of one gateway: those going on, and the newest that are over, by their ids in the ledger."""

    def __init__(self) -> None:
        self._live: dict[str, Delivery] = {}
        self._over: OrderedDict[str, Delivery] = OrderedDict()

    def opened(self, id: str, delivery: Delivery) -> Delivery:
        """It goes on."""
        self._live[id] = delivery
        return delivery

    def closed(self, id: str, delivery: Delivery | None, *, is_done: bool) -> None:
        """None: it was not submitted here. Not done: its client has gone before the end, which is
        to be measured elsewhere, if at all.
        """
        if delivery is not None and self._live.pop(id, None) is not None:
            if is_done:
                delivery.close()
            self._over[id] = delivery
            if len(self._over) > KEPT_MAX:
                self._over.popitem(last=False)

    def add_to(self, id: str, choices: Sequence[ChoiceTimeline]) -> None:
        """What happened here, put before and behind what the scheduler knows of each choice."""
        delivery = self._live.get(id) or self._over.get(id)
        if delivery is None:
            return
        told = [choice for choice in choices if choice.intervals and delivery.accepted_ns]
        ends_ns = [_decided_ns(choice) for choice in told]
        for choice in told:
            _put_around(choice, delivery, max(ends_ns))


def _decided_ns(choice: ChoiceTimeline) -> int:
    """When the scheduler decided that it ended, or what is known last."""
    last = choice.intervals[-1]
    is_commit = last.phase == TimelinePhase.TIMELINE_PHASE_COMMIT
    return last.start_unix_ns if is_commit else last.end_unix_ns


def _put_around(choice: ChoiceTimeline, delivery: Delivery, all_decided_ns: int) -> None:
    arrived_ns = choice.intervals[0].start_unix_ns
    # The submit's round trip has the arrival in it somewhere.
    met_ns = (delivery.submitted_ns + delivery.accepted_ns) // 2
    if delivery.ended_ns:
        # Nothing is delivered before it is decided: then it arrived earlier than in the middle.
        known_ns = all_decided_ns - arrived_ns
        met_ns = max(delivery.submitted_ns, min(met_ns, delivery.ended_ns - known_ns))
        choice.latency_ns = delivery.ended_ns - delivery.arrived_ns
    ahead_ns = arrived_ns - met_ns
    told = [*choice.intervals]
    if choice.ended and delivery.ended_ns:
        waits = [(start_ns + ahead_ns, end_ns + ahead_ns) for start_ns, end_ns in delivery.waits]
        _deliver(told, delivery.ended_ns + ahead_ns, all_decided_ns, waits)
    if met_ns > delivery.arrived_ns:
        came_ns = max(0, delivery.arrived_ns + ahead_ns)
        phase = TimelinePhase.TIMELINE_PHASE_ACCEPT
        told.insert(0, _interval(came_ns, arrived_ns, phase, ACCEPTING))
    del choice.intervals[:]
    choice.intervals.extend(told)


def _deliver(
    told: list[TimelineInterval], ended_ns: int, all_decided_ns: int, waits: Spans
) -> None:
    """Put what came after its end behind it. Gateways may have read a record before its leader has
    heard that it is committed.
    """
    if told[-1].phase == TimelinePhase.TIMELINE_PHASE_COMMIT:
        told[-1].end_unix_ns = min(told[-1].end_unix_ns, ended_ns)
        if told[-1].end_unix_ns <= told[-1].start_unix_ns:
            told.pop()
    since_ns, others_ns = told[-1].end_unix_ns, min(all_decided_ns, ended_ns)
    if others_ns > since_ns:
        phase = TimelinePhase.TIMELINE_PHASE_DELIVER
        told.append(_interval(since_ns, others_ns, phase, OTHERS))
    told += _delivering(max(since_ns, others_ns), ended_ns, waits)


def _delivering(start_ns: int, end_ns: int, waits: Spans) -> Iterator[TimelineInterval]:
    for wait_ns, until_ns in waits:
        wait_ns, until_ns = max(wait_ns, start_ns), min(until_ns, end_ns)
        if wait_ns >= until_ns:
            continue
        if wait_ns > start_ns:
            yield _delivered(start_ns, wait_ns)
        yield _interval(wait_ns, until_ns, TimelinePhase.TIMELINE_PHASE_READER, NOT_READ)
        start_ns = until_ns
    if end_ns > start_ns:
        yield _delivered(start_ns, end_ns)


def _delivered(start_ns: int, end_ns: int) -> TimelineInterval:
    return _interval(start_ns, end_ns, TimelinePhase.TIMELINE_PHASE_DELIVER, DELIVERING)


def _interval(start_ns: int, end_ns: int, phase: TimelinePhase, why: str) -> TimelineInterval:
    return TimelineInterval(phase=phase, start_unix_ns=start_ns, end_unix_ns=end_ns, why=why)
