"""What the leader does not know of a request, as the archives of the cell's schedulers tell it.

A scheduler replays them (`SchedulerService.ReplayTimeline`): that takes seconds of a processor, and
up to a minute. So few are asked for at once, of one tenant one, and what never changes is kept: of
what is over, and of the time before a leader.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar

import grpc
import structlog

from gateway.cell.leader import LeaderClient
from kaiten.v1.scheduler_service_pb2 import ReplayTimelineRequest, ReplayTimelineResponse
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase
from service_kit.clock import Clock
from service_kit.errors import NotFound, Overloaded, Unavailable
from service_kit.grpc_health import AtMost

log = structlog.get_logger()
K = TypeVar("K")
V = TypeVar("V")

AT_ONCE: Final = 2
# Schedulers give up before, by their --replay-s.
REPLAY_S_MAX: Final = 630.0
# Of a request that the leader tells of but for its beginning.
FILL_S_MAX: Final = 30.0
# Requests of which it is kept; what an archive had not then, it may have later.
KEPT_MAX: Final = 64
AGAIN_S: Final = 30.0
# A request is archived within a moment of its arrival.
ARCHIVED_NS_MAX: Final = 60_000_000_000
MATES_TOLD_MAX: Final = 32
RETRY_S: Final = 5.0
UNKNOWN: Final = TimelinePhase.TIMELINE_PHASE_UNKNOWN
NO_ARCHIVE: Final = "and this cell's scheduler replays no archive (--archive-dir, --replay-s)"
NOT_ALL: Final = "not all of them could be replayed"
NOWHERE: Final = "nor do the archives tell of it"


class Caller(NamedTuple):
    """Who asks."""

    tenant: str
    is_operator: bool


class _Kept(NamedTuple):
    choices: Sequence[ChoiceTimeline]
    is_whole: bool
    at_ns: int


class Replays:
    """One per gateway."""

    def __init__(self, leader: LeaderClient, clock: Clock) -> None:
        self._leader, self._clock = leader, clock
        self._at_once = AtMost(AT_ONCE, "replays of archives")
        self._tenants: set[str] = set()
        # Of requests by id and where what is unknown of them ends.
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()
        # Of those that are over, by the ids that they were asked for by.
        self._found: OrderedDict[tuple[str, ...], ReplayTimelineResponse] = OrderedDict()

    async def find(self, ledger_ids: Sequence[str], caller: Caller) -> ReplayTimelineResponse:
        """All that is told of the first of these that there is. NotFound says why there is nothing;
        Overloaded: so many look already.
        """
        key = tuple(ledger_ids)
        if (told := self._found.get(key)) is None:
            request = ReplayTimelineRequest(ids=ledger_ids)
            told = await self._replay(request, caller, REPLAY_S_MAX)
            if told.choices and all(choice.ended for choice in told.choices):
                _keep(self._found, key, told)
        if not told.choices:
            # Where schedulers are, and which leaderships there were, is no tenant's business.
            skipped = told.skipped if caller.is_operator else [NOT_ALL] * bool(told.skipped)
            raise not_found(ledger_ids, "; ".join((NOWHERE, *skipped)))
        # It is changed by whoever is told.
        return ReplayTimelineResponse.FromString(told.SerializeToString())

    async def fill(self, ledger_id: str, choices: Sequence[ChoiceTimeline], caller: Caller) -> None:
        """Put what is known in place of what is unknown of these, as far as it can be found out."""
        unknown = [each for choice in choices for each in choice.intervals if each.phase == UNKNOWN]
        if not unknown:
            return
        key = ledger_id, max(each.end_unix_ns for each in unknown)
        kept, now_ns = self._kept.get(key), self._clock.monotonic_ns()
        if kept is None or not (kept.is_whole or now_ns - kept.at_ns < AGAIN_S * 1e9):
            arrived_ns = min(each.start_unix_ns for each in unknown)
            since_ns = max(0, arrived_ns - ARCHIVED_NS_MAX)
            request = ReplayTimelineRequest(ids=[ledger_id], since_unix_ns=since_ns)
            told = ReplayTimelineResponse()
            try:
                told = await self._replay(request, caller, FILL_S_MAX)
            except Overloaded:
                return
            except (NotFound, Unavailable) as error:
                log.info("explain.unfilled", reason=str(error))
            kept = self._keep(key, told.choices, choices)
        _fill(choices, kept.choices)

    def _keep(
        self,
        key: tuple[str, int],
        told: Sequence[ChoiceTimeline],
        choices: Sequence[ChoiceTimeline],
    ) -> _Kept:
        tried = [ChoiceTimeline.FromString(choice.SerializeToString()) for choice in choices]
        _fill(tried, told)
        is_whole = all(each.phase != UNKNOWN for choice in tried for each in choice.intervals)
        for choice in told:
            known = [each for each in choice.intervals if each.start_unix_ns < key[1]]
            del choice.intervals[:]
            choice.intervals.extend(known)
        kept = _Kept(told, is_whole, self._clock.monotonic_ns())
        _keep(self._kept, key, kept)
        return kept

    async def _replay(
        self, request: ReplayTimelineRequest, caller: Caller, call_s: float
    ) -> ReplayTimelineResponse:
        with self._place(caller):
            try:
                told: ReplayTimelineResponse = await self._leader.ask(
                    lambda scheduler: scheduler.ReplayTimeline, request, call_s
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    reason = "the leader has as many archives replayed as it can"
                    raise Overloaded(reason, RETRY_S) from None
                # Or an older leader.
                raise not_found(request.ids, NO_ARCHIVE) from None
        return told

    @contextmanager
    def _place(self, caller: Caller) -> Iterator[None]:
        """A tenant that asks for what there is not keeps nobody else waiting."""
        if caller.tenant in self._tenants and not caller.is_operator:
            reason, whose = "an archive is being replayed for it", caller.tenant
            raise Overloaded(reason, RETRY_S, 1, subject="tenant", tenant=whose)
        with self._at_once:
            self._tenants.add(caller.tenant)
            try:
                yield
            finally:
                self._tenants.discard(caller.tenant)


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    """As the newest of the last so many."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT_MAX:
        kept.popitem(last=False)


def not_found(ledger_ids: Sequence[str], why: str) -> NotFound:
    name = ledger_ids[0].partition(":")[2]
    return NotFound(f"request {name!r}", f"it does not live and did not end of late, {why}")


def _fill(choices: Sequence[ChoiceTimeline], archived: Sequence[ChoiceTimeline]) -> None:
    """With what the archive says of each of these, which it knows from the beginning."""
    by_choice = {choice.choice: choice for choice in archived}
    for choice in choices:
        if (told := by_choice.get(choice.choice)) is None:
            continue
        intervals = [
            piece
            for interval in choice.intervals
            for piece in ([interval] if interval.phase != UNKNOWN else clipped(told, interval))
        ]
        del choice.intervals[:]
        choice.intervals.extend(intervals)
        choice.num_preemptions = max(choice.num_preemptions, told.num_preemptions)
        mates = dict.fromkeys([*told.batch_mate_ids, *choice.batch_mate_ids])
        most = max(choice.num_batch_mates, told.num_batch_mates, len(mates))
        choice.num_batch_mates = most
        choice.batch_mate_ids[:] = [*mates][:MATES_TOLD_MAX]


def clipped(archived: ChoiceTimeline, hole: TimelineInterval) -> Iterator[TimelineInterval]:
    """All of the hole's time, by what the archive says of it; what it does not say is unknown."""
    at_ns = hole.start_unix_ns
    for interval in archived.intervals:
        end_ns = min(interval.end_unix_ns, hole.end_unix_ns)
        start_ns = max(interval.start_unix_ns, at_ns)
        if start_ns >= end_ns:
            continue
        if at_ns < start_ns:
            yield _unknown(hole, at_ns, start_ns)
        piece = TimelineInterval()
        piece.CopyFrom(interval)
        piece.start_unix_ns, piece.end_unix_ns = start_ns, end_ns
        yield piece
        at_ns = end_ns
    if at_ns < hole.end_unix_ns:
        yield _unknown(hole, at_ns, hole.end_unix_ns)


def _unknown(hole: TimelineInterval, start_ns: int, end_ns: int) -> TimelineInterval:
    return TimelineInterval(phase=UNKNOWN, why=hole.why, start_unix_ns=start_ns, end_unix_ns=end_ns)
