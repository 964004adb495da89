"""What an operator sees of a core: who runs where, who waits, and why."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from kaiten.client.live_core import LiveCore
from kaiten.v1.common_pb2 import (
    WHY_PASSED_OVER_BLOCKS,
    WHY_PASSED_OVER_NO_SLOT,
    WHY_PASSED_OVER_TENANT,
    WHY_PASSED_OVER_WORST_CASE,
    WhyPassedOver,
)
from kaiten.v1.watch_pb2 import (
    SEQUENCE_STATE_FORKING,
    SEQUENCE_STATE_RUNNING,
    SEQUENCE_STATE_WAITING,
    WatchedStep,
    WatchRequest,
    WatchResponse,
)
from scheduler_svc.core.commands import (
    Command,
    Configured,
    MakePlan,
    Submit,
    WorkerDraining,
    WorkerLate,
)
from scheduler_svc.core.outcome import Outcome, StepTokens, Why
from scheduler_svc.core.types import Request, StepResult, WorkerSpec
from scheduler_svc.live_steps import STEPS_MAX
from scheduler_svc.live_view import WAITING_SHOWN_MAX, Looks, Moment, View, look
from scheduler_svc.live_view_wire import changes_to_proto
from scheduler_svc.watching import Watching, interval_of
from scheduler_svc.wire import WHY_TO_PROTO
from tests.support.cell import Cell, spec


class StoppedClock:
    """Goes on when it is told to, and by `takes_ns` while somebody looks."""

    def __init__(self) -> None:
        self.now_ns = self.takes_ns = 0

    def monotonic_ns(self) -> int:
        self.now_ns += self.takes_ns
        return self.now_ns

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("watching waits for the leadership's end, never for the clock")


class Looked(Cell):
    """A cell that somebody watches as they do in a leader's session."""

    def __init__(self, *specs: WorkerSpec, **options: Any) -> None:
        self.clock, self.looks = StoppedClock(), 0
        self.watching = Watching(self.look, self.clock)
        super().__init__(*specs, **options)

    def apply(self, command: Command) -> Outcome:
        outcome = super().apply(command)
        if isinstance(command, MakePlan):
            self.watching.asked(self.worker(command.worker_id), outcome)
        return outcome

    def commit(self, result: StepResult) -> StepTokens:
        flight = self.watching.flight_of(self.worker(result.worker_id), result.plan_id)
        tokens = super().commit(result)
        if flight is not None:
            self.watching.stepped(flight, result, self.now_ns)
        return tokens

    def look(self, looks: Looks, before: View | None) -> View:
        self.looks += 1
        moment = Moment(epoch=7, seq=9, committed_seq=8, unix_ns=self.now_ns)
        configured = Configured(config=self.scheduler.config, policy="fcfs")
        return look(self.scheduler, moment, configured, looks, {"w1": "host:1"}, before)

    def seen(self) -> LiveCore:
        """By somebody who begins to watch now."""
        seen = LiveCore()
        self.clock.now_ns += 1_000_000_000
        seen.take(changes_to_proto(None, self.watching.newest()))
        return seen


def test_every_reason_has_its_number_on_the_wire() -> None:
    assert set(WHY_TO_PROTO.values()) == set(WhyPassedOver.values()[1:])
    assert len(WHY_TO_PROTO) == len(Why)


def test_who_runs_is_seen_with_slot_counts_and_blocks() -> None:
    cell = Looked(spec(block_size=4, slots=2))
    first = cell.submit(6, 9)
    cell.must_plan()
    seen = cell.seen()
    assert (seen.epoch, seen.seq, seen.committed_seq) == (7, 9, 8)
    assert seen.configured.lease_steps_max == 8
    (worker,) = seen.workers.values()
    assert (worker.address, worker.slots_max, worker.block_size) == ("host:1", 2, 4)
    assert [(plan.plan_id, plan.steps_answered) for plan in worker.plans] == [(1, 0)]
    one = seen.sequences[first]
    identity, place = one.identity, one.place
    assert (identity.id, identity.num_prompt_tokens, identity.tokens_max) == (f"r{first}", 6, 15)
    assert (place.state, place.worker_id, place.slot) == (SEQUENCE_STATE_RUNNING, "w1", 0)
    counts = one.counts
    assert (counts.num_tokens, counts.num_scheduled_tokens, counts.num_computed_tokens) == (7, 6, 0)
    held = worker.block_count - worker.blocks_free
    assert held == len(one.tables[0]) == len(set(one.tables[0]))
    cell.finish()


def test_who_waits_is_seen_in_order_with_the_reason() -> None:
    """Six blocks: the first takes four, the second needs three, and nobody overtakes it."""
    cell = Looked(spec(blocks=6, block_size=4), admission="guaranteed_no_evict")
    cell.submit(8, 8)
    large, behind = cell.submit(9, 3), cell.submit(2, 2)
    cell.turns(2)
    seen = cell.seen()
    assert (seen.queue, seen.waiting) == ([large, behind], 2)
    assert seen.sequences[large].place.state == SEQUENCE_STATE_WAITING
    (passed,) = seen.sequences[large].passed_over
    assert (passed.worker_id, passed.stage) == ("w1", "admit")
    assert passed.why == WHY_PASSED_OVER_WORST_CASE
    assert not seen.sequences[behind].passed_over
    cell.finish()


def test_a_worker_is_seen_with_its_layer_groups_and_what_it_is_up_to() -> None:
    cell = Looked(spec(windows=(None, 12)))
    cell.apply(WorkerDraining(worker_id="w1"))
    (worker,) = cell.seen().workers.values()
    assert [group.window_tokens for group in worker.layer_groups] == [0, 12]
    assert (worker.is_draining, worker.is_late) == (True, False)
    cell.join("w2", spec(windows=(None, 12)))
    first = cell.submit(3, 5)
    cell.must_plan("w2")
    cell.apply(WorkerLate(worker_id="w2"))
    seen = cell.seen()
    assert (seen.workers["w2"].is_draining, seen.workers["w2"].is_late) == (False, True)
    assert len(seen.sequences[first].tables) == 2


def test_a_full_worker_says_so_and_a_throttled_tenant_too() -> None:
    cell = Looked(spec(slots=2))
    cell.submit(3, 20, tenant="a", tenant_tokens=25)
    throttled = cell.submit(3, 20, tenant="a", tenant_tokens=25)
    cell.submit(3, 20, tenant="b")
    cell.turn()
    other = cell.submit(3, 20, tenant="b")
    cell.turns(3)
    seen = cell.seen()
    assert WHY_PASSED_OVER_NO_SLOT in [over.why for over in seen.workers["w1"].passed_over]
    assert not seen.sequences[other].passed_over
    (passed,) = seen.sequences[throttled].passed_over
    assert (passed.worker_id, passed.why) == ("", WHY_PASSED_OVER_TENANT)
    cell.finish()


def test_further_choices_are_seen_while_they_wait_for_the_first() -> None:
    cell = Looked(spec())
    first = cell.submit(6, 9, n=3)
    seen = cell.seen()
    states = [seen.sequences[first + choice].place.state for choice in range(3)]
    assert states == [SEQUENCE_STATE_WAITING, SEQUENCE_STATE_FORKING, SEQUENCE_STATE_FORKING]
    assert seen.queue == [first]
    cell.finish()


def test_of_a_long_queue_the_first_are_seen_and_all_are_counted() -> None:
    cell = Looked()
    for _ in range(WAITING_SHOWN_MAX + 7):
        cell.scheduler.apply(Submit(request=request_of(cell)), 0)
    seen = cell.seen()
    assert len(seen.queue) == len(seen.sequences) == WAITING_SHOWN_MAX
    assert seen.waiting == WAITING_SHOWN_MAX + 7


def request_of(cell: Cell) -> Request:
    cell.next_sequence_id += 1
    number = cell.next_sequence_id
    return Request(id=f"r{number}", sequence_id=number, prompt=(1,), max_tokens=1, arrived_ns=0)


@pytest.mark.parametrize(
    ("asked_ms", "interval_s"), [(0, 0.25), (1, 0.1), (1000, 1.0), (1 << 32, 60.0)]
)
def test_nobody_is_told_quicker_or_slower_than_is_good(asked_ms: int, interval_s: float) -> None:
    assert interval_of(asked_ms) == interval_s


def test_all_who_watch_share_a_look_while_it_is_young() -> None:
    cell = Looked(spec())
    view = cell.watching.newest()
    assert cell.watching.newest() is view
    cell.clock.now_ns += 99_000_000
    assert cell.watching.newest() is view
    cell.clock.now_ns += 1_000_000
    assert cell.watching.newest() is not view
    assert cell.looks == 2


def test_looks_that_take_long_are_taken_seldom() -> None:
    """Ten milliseconds each: the next is due after two hundred."""
    cell = Looked(spec())
    cell.clock.takes_ns = 10_000_000
    view = cell.watching.newest()
    cell.clock.takes_ns = 0
    cell.clock.now_ns += 189_000_000
    assert cell.watching.newest() is view
    cell.clock.now_ns += 1_000_000
    assert cell.watching.newest() is not view


def test_nothing_is_kept_when_nobody_watches() -> None:
    cell = Looked(spec())
    cell.watching.newest()
    cell.watching.newest()
    assert cell.looks == 2


async def test_a_watcher_is_told_until_the_leadership_is_over() -> None:
    cell, is_over, core = Looked(spec()), asyncio.Event(), LiveCore()
    first = cell.submit(3, 5)
    responses = cell.watching.changes(WatchRequest(takes_rows=True), is_over)
    core.take(await anext(responses))
    assert core.queue == [first]
    cell.turn()
    cell.clock.now_ns += 1_000_000_000
    core.take(told := await anext(responses))
    assert not told.is_snapshot
    assert core.queue == []
    is_over.set()
    assert [response async for response in responses] == []


async def test_what_two_were_told_alike_is_put_together_once() -> None:
    """And whoever comes later, or was told something else, is told the same in the end."""
    cell, is_over = Looked(spec()), asyncio.Event()
    cores = [LiveCore() for _ in range(3)]
    one, other, late = (
        cell.watching.changes(WatchRequest(takes_rows=True), is_over) for _ in cores
    )

    async def told(*responses: AsyncGenerator[WatchResponse, None]) -> list[WatchResponse]:
        return [await anext(each) for each in responses]

    begun = await told(one, other)
    assert begun[0] is begun[1]
    cell.submit(3, 5)
    cell.turn()
    cell.clock.now_ns += 1_000_000_000
    changes = await told(one, late, other)
    assert changes[0] is not changes[1]
    assert [response.is_snapshot for response in changes] == [False, True, False]
    cell.turn()
    cell.clock.now_ns += 1_000_000_000
    alike = await told(one, other, late)
    assert alike[0] is alike[1] is alike[2]
    for core, responses in zip(
        cores, ((begun[0], changes[0]), (begun[1], changes[2]), (changes[1],)), strict=True
    ):
        for response in (*responses, alike[0]):
            core.take(response)
    assert cores[0] == cores[1] == cores[2]
    for each in (one, other, late):
        await each.aclose()
    assert cell.watching._made is None


class Batch:
    """The batches of one worker, step by step, as whoever is told of steps has them."""

    def __init__(self) -> None:
        self.core = LiveCore()
        self.steps: list[tuple[dict[int, int], WatchedStep]] = []

    def take(self, told: WatchResponse) -> None:
        running = {
            one.place.slot: sequence_id
            for sequence_id, one in self.core.sequences.items()
            if one.place.state == SEQUENCE_STATE_RUNNING
        }
        self.core.take(told)
        for of_worker in told.steps:
            rows = running if of_worker.is_diff else {}
            for step in of_worker.steps:
                for slot in step.leave_slots:
                    del rows[slot]
                rows |= dict(zip(step.join_slots, step.join_sequence_ids, strict=True))
                self.steps.append((dict(rows), step))


async def test_every_step_is_told_with_its_batch() -> None:
    """Two slots: a prompt of two chunks beside one that decodes, and then another sequence."""
    cell, is_over, batch = Looked(spec(slots=2, step_tokens=8)), asyncio.Event(), Batch()
    responses = cell.watching.changes(WatchRequest(takes_rows=True), is_over)
    batch.take(await anext(responses))
    assert batch.steps == []
    first, long, last = cell.submit(2, 3), cell.submit(10, 2), cell.submit(2, 1)
    went: set[int] = set()
    while cell.scheduler.live_count:
        cell.turn()
        cell.clock.now_ns += 1_000_000_000
        told = await anext(responses)
        batch.take(told)
        went |= {one.sequence_id for one in told.passed}
    given, chunks = dict.fromkeys((first, long, last), 0), dict.fromkeys((first, long, last), 0)
    for rows, step in batch.steps:
        for slot, sequence_id in rows.items():
            given[sequence_id] += slot not in step.tokenless_slots
        for slot, count in zip(step.chunk_slots, step.chunk_tokens, strict=True):
            chunks[rows[slot]] += count
        assert len(rows) <= 2
    assert given == {first: 3, long: 2, last: 1}
    assert chunks == {first: 2, long: 10, last: 2}
    numbers = [(step.plan_id, step.step) for _, step in batch.steps]
    assert numbers == sorted(set(numbers))
    assert sum(len(step.finished_slots) for _, step in batch.steps) == 3
    is_over.set()
    assert [response async for response in responses] == []
    assert cell.watching.watchers == 0


async def test_a_batch_that_stays_is_not_told_again() -> None:
    """But to who knows of no rows, it is: all of it, with every response."""
    cell, is_over = Looked(spec(slots=4)), asyncio.Event()
    rows, plain = (
        cell.watching.changes(WatchRequest(takes_rows=takes_rows), is_over)
        for takes_rows in (True, False)
    )
    await anext(rows)
    await anext(plain)
    both = [cell.submit(2, 30), cell.submit(2, 30)]
    joined: list[tuple[list[int], list[int]]] = []
    for _ in range(3):
        for _ in range(4):
            cell.turn()
        cell.clock.now_ns += 1_000_000_000
        (of_rows,), (of_plain,) = (await anext(rows)).steps, (await anext(plain)).steps
        first, whole = of_rows.steps[0], of_plain.steps[0]
        joined.append(([*first.join_sequence_ids], [*whole.join_sequence_ids]))
        assert not of_plain.is_diff
    assert joined[1:] == [([], both)] * 2
    await rows.aclose()
    await plain.aclose()


async def test_a_step_is_told_with_what_its_plan_decided() -> None:
    """As its span and the archive's replay have it."""
    cell = Looked(spec(slots=4, step_tokens=40, mixed_tokens=24), lease=1, in_flight=1)
    responses = cell.watching.changes(WatchRequest(takes_rows=True), asyncio.Event())

    async def newest() -> WatchedStep:
        cell.clock.now_ns += 1_000_000_000
        (of_worker,) = (await anext(responses)).steps
        return of_worker.steps[-1]

    await anext(responses)
    prompt = tuple(range(1, 17))
    cell.submit(prompt, 30)
    for _ in range(20):
        cell.plan()
        cell.commit(replace(cell.compute(), step_us=2000, is_graph=True))
    step = await newest()
    assert (step.step_us, step.is_graph, step.num_tokens) == (2000, True, 1)
    assert abs(step.expected_us - 2000) < 100
    before = cell.worker().kv.counts
    # The first plan that anybody sees is told as all others are.
    await responses.aclose()
    responses = cell.watching.changes(WatchRequest(takes_rows=True), asyncio.Event())
    cell.clock.now_ns += 1_000_000_000
    await anext(responses)
    cell.submit((*prompt[:12], *range(100, 130)), 3)
    cell.turn()
    step = await newest()
    counts = cell.worker().kv.counts.since(before)
    assert counts == tuple(getattr(step, f"blocks_{name}") for name in counts._fields)
    assert (step.num_cached_tokens, step.blocks_shared) == (12, 3)
    assert (step.budget_tokens, step.lease_steps, *step.chunk_tokens) == (24, 1, 23)
    await responses.aclose()

    cell = Looked(spec(blocks=8, slots=2), lease=1)
    responses = cell.watching.changes(WatchRequest(takes_rows=True), asyncio.Event())
    await anext(responses)
    for _ in range(2):
        cell.submit(8, 20)
    cell.finish()
    cell.clock.now_ns += 1_000_000_000
    (of_worker,) = (await anext(responses)).steps
    whys = [why for step in of_worker.steps for why in step.preempted_whys]
    assert whys == [WHY_PASSED_OVER_BLOCKS] * len(whys) != []
    await responses.aclose()


async def test_who_came_and_went_between_two_looks_is_named() -> None:
    cell, is_over = Looked(spec()), asyncio.Event()
    responses = cell.watching.changes(WatchRequest(takes_rows=True), is_over)
    await anext(responses)
    first = cell.submit(2, 1)
    cell.finish()
    cell.clock.now_ns += 1_000_000_000
    told = await anext(responses)
    assert [(one.sequence_id, one.identity.id) for one in told.passed] == [(first, f"r{first}")]
    await responses.aclose()
    assert cell.watching.watchers == 0


async def test_of_more_steps_than_are_kept_the_newest_are_told_and_the_others_counted() -> None:
    cell, is_over, batch = Looked(spec(slots=2), spec(slots=2)), asyncio.Event(), Batch()
    slow, quick = (
        cell.watching.changes(WatchRequest(takes_rows=True), is_over),
        cell.watching.changes(WatchRequest(takes_rows=True), is_over),
    )
    await anext(slow)
    await anext(quick)
    for _ in range(STEPS_MAX // 4 + 40):
        for _ in range(3):
            cell.submit(1, 4)
        cell.finish()
    cell.clock.now_ns += 1_000_000_000
    told = await anext(slow)
    batch.take(told)
    answered = cell.watching._steps.count
    assert answered > STEPS_MAX
    assert [bool(of_worker.steps) for of_worker in told.steps] == [True, True]
    assert sum(len(of_worker.steps) for of_worker in told.steps) == STEPS_MAX
    assert sum(of_worker.num_skipped for of_worker in told.steps) == answered - STEPS_MAX
    await slow.aclose()
    await quick.aclose()


def test_blocks_that_can_be_found_are_seen() -> None:
    cell = Looked(spec(block_size=4, blocks=11))
    cell.submit(9, 4)
    cell.finish()
    (worker,) = cell.seen().workers.values()
    bits = int.from_bytes(worker.cached_blocks, "little")
    assert bits == sum(1 << block for block in cell.worker().kv._pool._key_of)
    assert (bits.bit_count(), len(worker.cached_blocks)) == (3, 2)
