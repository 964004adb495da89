"""What a test brings about is what the request that suffers from it says, with its share."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import pytest

from ledger import Leader
from scheduler_svc import timeline_track
from scheduler_svc.core.commands import Expire, StoreBehind, WorkerLate
from scheduler_svc.core.outcome import Outcome, Why
from scheduler_svc.core.requests import Tenant
from scheduler_svc.core.types import FLEX_PRIORITY
from scheduler_svc.journal import Journal
from scheduler_svc.request_book import RequestBook
from scheduler_svc.timeline_track import Phase
from tests.support.cell import spec
from tests.support.told_cell import MS, Told, check

# The cause holds for three quarters of the time; all else that takes any is decoding.
HELD_NS: Final = 75 * MS
DECODED_NS: Final = 25 * MS


def slots() -> tuple[Told, int]:
    cell = Told(spec(slots=1))
    cell.submit(3, 20)
    cell.turns(2)
    return cell, cell.submit(3, 9)


def blocks() -> tuple[Told, int]:
    cell = Told(spec(blocks=12))
    cell.submit(30, 10)
    cell.turns(2)
    return cell, cell.submit(20, 9)


def budget() -> tuple[Told, int]:
    cell = Told(spec(slots=8, step_tokens=40, mixed_tokens=24), lease=1, prefill_tokens=8)
    cell.submit(2, 90)
    cell.turns(2)
    for _ in range(3):
        cell.submit(300, 2)
    cell.turn()
    return cell, cell.submit(30, 9)


def tenant() -> tuple[Told, int]:
    cell = Told(spec(), tenant_tokens=10)
    cell.submit(3, 5, tenant="a")
    cell.submit(3, 5, tenant="b")
    cell.turns(1)
    return cell, cell.submit(3, 5, tenant="b")


def long_prefill() -> tuple[Told, int]:
    knobs = {"long_prefill_tokens": 20, "long_prefills_max": 1}
    cell = Told(spec(step_tokens=64), lease=1, **knobs)
    cell.submit(200, 2)
    cell.turn()
    return cell, cell.submit(50, 9)


def policy() -> tuple[Told, int]:
    cell = Told(spec(), cadence="interval", schedule_interval_steps=9, lease=1)
    cell.submit(3, 30)
    cell.turns(2)
    return cell, cell.submit(3, 9)


def static() -> tuple[Told, int]:
    cell = Told(spec(), policy="static")
    cell.submit(3, 30)
    cell.turns(2)
    return cell, cell.submit(3, 9)


def flex() -> tuple[Told, int]:
    cell = Told(spec(slots=1))
    one = cell.submit(3, 30, priority=FLEX_PRIORITY)
    cell.turns(2)
    cell.submit(3, 9)
    return cell, one


def tenant_behind() -> tuple[Told, int]:
    """No look names it: of a throttled tenant nobody is looked at."""
    cell, _ = tenant()
    return cell, cell.submit(3, 5, tenant="b")


def store() -> tuple[Told, int]:
    """While it decodes, and another waits."""
    cell = Told(spec(slots=1), lease=1)
    one = cell.submit(3, 30)
    cell.turns(3)
    behind(cell, HELD_NS)
    return cell, one


def store_and_queue() -> tuple[Told, int]:
    cell, _ = store()
    one = cell.submit(3, 9)
    behind(cell, HELD_NS)
    return cell, one


def behind(cell: Told, for_ns: int) -> None:
    cell.apply(StoreBehind(is_behind=True))
    cell.now_ns += for_ns
    assert cell.plan() is None
    cell.apply(StoreBehind(is_behind=False))


def late() -> tuple[Told, int]:
    """Its only worker does not answer."""
    cell = Told(spec(slots=2))
    cell.submit(3, 30)
    cell.turns(2)
    cell.apply(WorkerLate(worker_id="w1"))
    one = cell.submit(3, 9)
    cell.now_ns += HELD_NS
    return cell, one


def none_here() -> tuple[Told, int]:
    cell = Told()
    one = cell.submit(3, 9)
    cell.now_ns += HELD_NS
    cell.join("w1", spec())
    return cell, one


def worker() -> tuple[Told, int]:
    cell = Told(spec(slots=2), spec(slots=2))
    one = cell.submit(3, 30)
    cell.turns(3)
    cell.kill(next(w for w in cell.workers if one in cell.running(w)))
    cell.now_ns += HELD_NS
    return cell, one


def leader() -> tuple[Told, int]:
    """The next one knows what this one did, as a replay of both does."""
    cell = Told(spec(slots=2), lease=1)
    one = cell.submit(3, 30)
    cell.turns(5)
    cell.lead_anew()
    cell.now_ns += HELD_NS
    return cell, one


def preempted() -> tuple[Told, int]:
    cell = Told(spec(blocks=8, slots=2), lease=1)
    cell.submit(8, 20)
    one = cell.submit(8, 20)
    return cell, one


# What is brought about, and what the request that suffers from it says.
CAUSES: Final[Mapping[str, tuple[Callable[[], tuple[Told, int]], str]]] = {
    "slots": (slots, Why.NO_SLOT.value),
    "blocks": (blocks, Why.BLOCKS.value),
    "budget": (budget, Why.NO_BUDGET.value),
    "tenant": (tenant, Why.TENANT.value),
    "another's long prefill": (long_prefill, Why.LONG_PREFILL.value),
    "cadence": (policy, Why.CADENCE.value),
    "a batch that runs out": (static, Why.BATCH.value),
    "flex": (flex, f"{timeline_track.PREEMPTED}: {Why.PLACE_NEEDED.value}"),
    "a worker lost": (worker, timeline_track.WORKER_LOST),
    "a leader lost": (leader, timeline_track.LEADER_LOST),
    "a tenant that is throttled": (tenant_behind, Why.TENANT.value),
    "a store that is behind": (store_and_queue, Why.STORE_BEHIND.value),
    "a worker that is late": (late, Why.LATE.value),
    "no worker": (none_here, timeline_track.NO_WORKER),
    "preempted": (preempted, f"{timeline_track.PREEMPTED}: {Why.BLOCKS.value}"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named_with_its_share(cause: str) -> None:
    stage, why = CAUSES[cause]
    cell, one = stage()

    def until(is_so: Callable[[], bool]) -> None:
        for _ in range(200):
            if is_so():
                return
            cell.turn()
        pytest.fail(f"it never came to that: {cell.timeline(one)}")

    until(lambda: why in cell.whys(one))
    cell.now_ns += max(0, HELD_NS - waited_ns(cell, one, why))
    until(lambda: cell.timeline(one).intervals[-1].phase is Phase.DECODE)
    cell.now_ns += DECODED_NS
    cell.finish()
    told = cell.timeline(one)
    check(told, cell.requests[one].arrived_ns)
    took_ns = told.intervals[-1].end_ns - told.intervals[0].start_ns
    assert waited_ns(cell, one, why) / took_ns == pytest.approx(0.75, abs=0.02)
    others_ns = sum(waited_ns(cell, one, other) for other in cell.whys(one) if other != why)
    assert others_ns / took_ns < 0.02


def waited_ns(cell: Told, sequence_id: int, why: str) -> int:
    intervals = cell.timeline(sequence_id).intervals
    waits = [each for each in intervals if (each.phase, each.why) == (Phase.QUEUE, why)]
    return sum(each.end_ns - each.start_ns for each in waits)


def test_a_store_that_is_behind_stalls_who_has_begun() -> None:
    cell, one = store()
    cell.finish()
    check(cell.timeline(one), 0)
    assert [(stall.why, stall.end_ns - stall.start_ns) for stall in cell.stalls(one)] == [
        (Why.STORE_BEHIND.value, HELD_NS)
    ]


def test_who_is_throttled_is_looked_at_when_that_has_changed() -> None:
    """Of thousands of tenants that takes long, with every command."""
    looks: list[Iterator[Tenant]] = []

    class Throttled(dict[Tenant, None]):
        def __iter__(self) -> Iterator[Tenant]:
            looks.append(super().__iter__())
            return looks[-1]

    cell = Told(spec(), tenant_tokens=10)
    journal = Journal(RequestBook(), Leader(epoch=1, nonce=1, journal_seq=0, after_seq=0))
    waiting = cell.scheduler.waiting
    waiting.throttled = Throttled()
    for _ in range(2):
        cell.submit(3, 5, tenant="a")
        journal.write(Expire(), Outcome(), cell.now_ns, waiting=waiting)
    assert not looks
    cell.turn()
    journal.write(Expire(), Outcome(), cell.now_ns, waiting=waiting)
    assert list(waiting.throttled) == [waiting.tenants["a"]]
    looks.clear()
    for _ in range(2):
        cell.expire()
        cell.submit(3, 5, tenant="a")
        cell.submit(3, 5, tenant="b")
        journal.write(Expire(), Outcome(), cell.now_ns, waiting=waiting)
    assert not looks
    record = journal.opened(cell.now_ns).record
    assert [list(item.throttled.begun) for item in record.inputs] == [[], [], ["a"], [], []]
