"""A request's time at its gateway, before and behind what the scheduler tells of it."""

import itertools
import random
from collections import deque
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from gateway.requests import delivery as module
from gateway.requests.delivery import Deliveries, Delivery
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase
from scheduler_svc.core.commands import Command, Expire, Submit
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import timelines_of
from scheduler_svc.timeline_wire import timeline_to_proto
from tests.sim.test_scheduler_sim import World

MS = 1_000_000
# The store's ids of entries count milliseconds, and a request arrives in one of them.
RESOLUTION_NS = MS
P = TimelinePhase


def choice(start_ms: int, end_ms: int, index: int = 0) -> ChoiceTimeline:
    """Ended, and all of it decoding."""
    interval = TimelineInterval(
        phase=P.TIMELINE_PHASE_DECODE, start_unix_ns=start_ms * MS, end_unix_ns=end_ms * MS
    )
    return ChoiceTimeline(choice=index, ended="length", intervals=[interval])


def delivery(
    arrived: int,
    submitted: int,
    accepted: int,
    ended: int,
    waits: list[tuple[int, int]] = [],  # noqa: B006
) -> Delivery:
    """On this gateway's clock, in milliseconds."""
    made = Delivery(arrived * MS)
    made.submitted_ns, made.accepted_ns, made.ended_ns = submitted * MS, accepted * MS, ended * MS
    made._waits = deque((start * MS, end * MS) for start, end in waits)
    return made


def told(made: Delivery, *choices: ChoiceTimeline) -> list[list[tuple[str, int, int]]]:
    """Phases with their beginnings and lengths, in milliseconds."""
    kept = Deliveries()
    kept.opened("a:r", made)
    kept.add_to("a:r", choices)
    return [
        [
            (
                P.Name(i.phase).removeprefix("TIMELINE_PHASE_").lower(),
                i.start_unix_ns // MS,
                (i.end_unix_ns - i.start_unix_ns) // MS,
            )
            for i in each.intervals
        ]
        for each in choices
    ]


def test_what_happened_here_stands_before_and_behind() -> None:
    one = choice(1000, 1100)
    phases = told(delivery(10, 14, 16, 130), one)
    assert phases == [[("accept", 995, 5), ("decode", 1000, 100), ("deliver", 1100, 15)]]
    assert one.latency_ns == 120 * MS
    assert sum(ms for _, _, ms in phases[0]) == 120


def test_a_client_that_does_not_read_is_told_apart() -> None:
    """But not what it did not read while more was being computed."""
    made = delivery(10, 14, 16, 200, [(20, 30), (110, 125), (140, 190)])
    assert told(made, choice(1000, 1100)) == [
        [
            ("accept", 995, 5),
            ("decode", 1000, 100),
            ("reader", 1100, 10),
            ("deliver", 1110, 15),
            ("reader", 1125, 50),
            ("deliver", 1175, 10),
        ]
    ]


def test_a_choice_that_ended_first_waits_for_the_others() -> None:
    first, second = told(delivery(10, 14, 16, 130), choice(1000, 1040), choice(1000, 1100, 1))
    assert first[1:] == [("decode", 1000, 40), ("deliver", 1040, 60), ("deliver", 1100, 15)]
    assert second[1:] == [("decode", 1000, 100), ("deliver", 1100, 15)]


def test_nothing_is_delivered_before_it_is_committed() -> None:
    """The arrival is somewhere in the submit's round trip: then it was at its beginning."""
    assert told(delivery(10, 14, 24, 115), choice(1000, 1100)) == [
        [("accept", 995, 5), ("decode", 1000, 100)]
    ]


def test_a_gateway_may_have_it_before_its_leader_knows_that_it_is_committed() -> None:
    one = choice(1000, 1100)
    one.intervals.add(phase=P.TIMELINE_PHASE_COMMIT, start_unix_ns=1100 * MS, end_unix_ns=1140 * MS)
    phases = told(delivery(10, 14, 16, 130), one)
    assert phases == [[("accept", 995, 5), ("decode", 1000, 100), ("commit", 1100, 15)]]


def test_of_one_that_goes_on_the_end_is_not_told() -> None:
    one = choice(1000, 1100)
    one.ended = ""
    assert told(delivery(10, 14, 16, 0), one) == [[("accept", 995, 5), ("decode", 1000, 100)]]
    assert not one.latency_ns


def test_of_another_gateways_request_nothing_is_known_here() -> None:
    one = choice(1000, 1100)
    Deliveries().add_to("a:r", [one])
    assert one == choice(1000, 1100)


def test_as_many_as_are_kept_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_MAX", 2)
    kept = Deliveries()
    for name in "abc":
        made = delivery(10, 14, 16, 0)
        kept.opened(name, made)
        assert not made.ended_ns
        kept.closed(name, made, is_done=name != "b")
        assert bool(made.ended_ns) == (name != "b")
    kept.closed("a", None, is_done=True)
    found = []
    for name in "abc":
        one = choice(1000, 1100)
        kept.add_to(name, [one])
        found.append(len(one.intervals) > 1)
    assert found == [False, True, True]


def test_only_long_waits_are_kept_and_the_newest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1]
    monkeypatch.setattr(module, "perf_counter_ns", lambda: now[0])
    made = Delivery()
    for count in range(module.WAITS_MAX + 5):
        made.taken()
        made.hand()
        now[0] += module.WAIT_NS_MIN - (count % 2)
    made.close()
    assert len(made.waits) == -(-(module.WAITS_MAX + 5) // 2)
    assert all(end - start == module.WAIT_NS_MIN for start, end in made.waits)


class Served(World):
    """A cell whose requests came through gateways, each with a clock of its own. A nanosecond of
    the simulation is a millisecond here.
    """

    def begin(self) -> None:
        self.timelines, self.chance = Timelines(), random.Random(self.seed)
        # It leads since long before the first of them.
        self.timelines.take(Expire(), Outcome(), MS)
        self.deliveries = Deliveries()
        # Of a gateway's clock, which has nothing to do with the store's.
        self.offset_ns = self.chance.randrange(-(10**12), 10**12)
        self.committed_ns = self.at_ns
        self.measured_ns: dict[str, int] = {}
        self.opened: dict[str, Delivery] = {}

    @property
    def at_ns(self) -> int:
        """The store's clock."""
        return (10**6 + self.now_ns) * MS

    def apply(self, command: Command) -> Outcome:
        outcome = super().apply(command)
        if "timelines" not in self.__dict__:
            self.begin()
        at_ns, shown = self.at_ns, command
        if isinstance(command, Submit):
            shown = self.came(command, at_ns)
        self.timelines.take(shown, outcome, at_ns, self.scheduler.waiting)
        return outcome

    def came(self, command: Submit, at_ns: int) -> Submit:
        """Through a gateway, by its own clock."""
        chance, request = self.chance, command.request
        accepting_ns, trip_ns = chance.randint(1, 9 * MS), chance.randint(1, 4 * MS)
        arrived_ns = at_ns - chance.randint(0, MS)
        made = Delivery(arrived_ns - trip_ns // 2 - accepting_ns - self.offset_ns)
        made.submitted_ns = arrived_ns - chance.randint(0, trip_ns) - self.offset_ns
        made.accepted_ns = made.submitted_ns + trip_ns
        self.deliveries.opened(request.id, made)
        self.opened[request.id] = made
        entered_ns = arrived_ns // RESOLUTION_NS * RESOLUTION_NS
        return replace(command, request=replace(request, arrived_ns=entered_ns))

    def turn(self) -> None:
        """Commits are as slow as they are, and so are clients."""
        super().turn()
        if self.chance.random() < 0.7:
            now_ns = self.at_ns + self.chance.randint(0, MS // 2)
            self.timelines.committed(self.committed_ns, self.at_ns, now_ns)
            self.committed_ns = self.at_ns
            for id in [r.id for r in self.requests if r.sequence_id in self.overs]:
                if (made := self.opened.pop(id, None)) is not None:
                    self.left(id, made, now_ns)

    def left(self, id: str, made: Delivery, now_ns: int) -> None:
        taken_ns = self.chance.choice([1, MS, 40 * MS])
        made.close()
        made.ended_ns = now_ns + self.chance.randint(1, MS) + taken_ns - self.offset_ns
        if taken_ns > MS:
            made._waits = deque([(made.ended_ns - taken_ns, made.ended_ns)])
        self.measured_ns[id] = made.ended_ns - made.arrived_ns

    def judge_times(self) -> int:
        """Intervals are without holes, and all that the client measured; how many requests."""
        for id, measured_ns in self.measured_ns.items():
            choices = [timeline_to_proto(t) for t in timelines_of(self.timelines.snapshot(id))]
            self.deliveries.add_to(id, choices)
            assert choices
            for each in choices:
                self.judge_one(each, measured_ns, self.deliveries._live[id])
        return len(self.measured_ns)

    def judge_one(self, told: ChoiceTimeline, measured_ns: int, made: Delivery) -> None:
        intervals: Any = told.intervals
        for one, other in itertools.pairwise(intervals):
            assert one.end_unix_ns == other.start_unix_ns
        spans = [(i.phase, i.end_unix_ns - i.start_unix_ns) for i in intervals]
        assert all(ns > 0 for _, ns in spans)
        assert told.latency_ns == measured_ns
        # What both clocks cannot know: where in its round trip the submit arrived, and in its ms.
        floor_ns = RESOLUTION_NS + made.accepted_ns - made.submitted_ns
        error_ns = abs(sum(ns for _, ns in spans) - measured_ns)
        assert error_ns <= max(measured_ns // 50, floor_ns)
        unknown_ns = sum(ns for phase, ns in spans if phase == P.TIMELINE_PHASE_UNKNOWN)
        assert unknown_ns * 50 <= measured_ns


def test_of_500_requests_all_that_their_clients_measured_is_told() -> None:
    """Whatever the rules, under preemption, cancels, deadlines and the deaths of workers."""
    count, seed, preempted = 0, 0, 0
    while count < 500:
        world = Served(seed)
        # Too few blocks for all who have a slot. That books balance, other tests prove.
        world.places, world.crash_percent = 80, max(1, world.crash_percent)
        with mock.patch.object(world.scheduler, "check"):
            world.run(turns=60, requests=25)
            world.drain()
        count += world.judge_times()
        preempted += sum(over.num_preemptions for over in world.overs.values())
        seed += 1
    assert preempted > 20
