"""The load of a cell, and how long whoever comes now would wait: forecasts beside what happened."""

import heapq
import random
from collections.abc import Iterator
from statistics import median

import pytest

from scheduler_svc import load
from scheduler_svc.core.commands import Configured, MakePlan, StepDone, Submit, WorkerJoined
from scheduler_svc.core.outcome import Finished
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import FLEX_PRIORITY, Config, Reason, Request, StepResult, WorkerSpec
from scheduler_svc.load import Load, queue_time_s
from scheduler_svc.meters import OUTPUT_WEIGHT
from tests.support.cell import spec

ROW_US, STEP_US, PROMPT_US = 50, 2000, 30


class Timed:
    """A core whose workers take their time, on a clock of its own."""

    def __init__(self, *specs: WorkerSpec) -> None:
        self.core, self.now_ns = Scheduler(), 0
        self.core.apply(Configured(config=Config(lease_steps_max=1), policy="fcfs"), 0)
        self.submitted: dict[int, tuple[int, float]] = {}
        self.waits: list[tuple[float, float]] = []
        self.output_tokens = 0.0
        # Of each worker the plan that it has, and of each slot what is left to compute and sample.
        self._ends: list[tuple[int, int, str]] = []
        self._chunks: dict[str, dict[int, int]] = {}
        self._rows: dict[str, dict[int, list[int]]] = {}
        self._max_tokens: dict[int, int] = {}
        for number, one in enumerate(specs):
            self.join(f"w{number}", one)

    def join(self, worker_id: str, one: WorkerSpec) -> None:
        self._rows[worker_id] = {}
        self.core.apply(WorkerJoined(worker_id=worker_id, spec=one), self.now_ns)

    def submit(
        self, sequence_id: int, prompt: int, output: int, *, said: int, priority: int = 0
    ) -> None:
        """A request for `said` tokens that will stop after `output`."""
        expected_s = self.forecast_s
        self.submitted[sequence_id] = (self.now_ns, expected_s)
        self._max_tokens[sequence_id] = output
        request = Request(
            id=f"t:{sequence_id}",
            sequence_id=sequence_id,
            prompt=tuple(random.Random(sequence_id).choices(range(9), k=prompt)),
            max_tokens=said,
            arrived_ns=self.now_ns,
            tenant="t",
            priority=priority,
        )
        self.core.apply(Submit(request=request), self.now_ns)

    @property
    def forecast_s(self) -> float:
        return queue_time_s(self.core, output_tokens=self.output_tokens, now_ns=self.now_ns)

    def run(self, until_ns: int) -> None:
        while True:
            self._plan()
            if not self._ends or self._ends[0][0] > until_ns:
                self.now_ns = until_ns
                return
            self.now_ns, plan_id, worker_id = heapq.heappop(self._ends)
            self._answer(worker_id, plan_id)

    def _plan(self) -> None:
        busy = {worker_id for _, _, worker_id in self._ends}
        for worker_id in [each for each in self.core.workers if each not in busy]:
            plan = self.core.apply(MakePlan(worker_id=worker_id), self.now_ns).plan
            if plan is None:
                continue
            rows = self._rows[worker_id]
            for slot in plan.leaves:
                del rows[slot]
            for join in plan.joins:
                since_ns, expected_s = self.submitted[join.sequence_id]
                self.waits.append((expected_s, (self.now_ns - since_ns) / 1e9))
                gap = len(join.tokens) - join.num_computed_tokens
                done = len(join.tokens) - join.num_prompt_tokens
                rows[join.slot] = [gap, self._max_tokens[join.sequence_id] - done]
            self._chunks[worker_id] = dict(plan.chunks)
            took_us = STEP_US + ROW_US * len(rows) + PROMPT_US * plan.chunk_tokens
            heapq.heappush(self._ends, (self.now_ns + took_us * 1000, plan.plan_id, worker_id))

    def _answer(self, worker_id: str, plan_id: int) -> None:
        slots, finished, rows = [], {}, self._rows[worker_id]
        chunks = self._chunks[worker_id]
        for slot, row in rows.items():
            row[0] -= chunks.get(slot, 1 if row[0] == 1 else 0)
            if row[0] > 0:
                continue
            row[0] = 1
            row[1] -= 1
            slots.append(slot)
            if row[1] == 0:
                finished[slot] = Reason.STOP
        result = StepResult(
            worker_id=worker_id,
            plan_id=plan_id,
            step=0,
            slots=tuple(slots),
            tokens=(1,) * len(slots),
            finished=finished,
            step_us=STEP_US + ROW_US * len(rows) + PROMPT_US * sum(chunks.values()),
            is_last=True,
        )
        for event in self.core.apply(StepDone(result=result), self.now_ns).events:
            if isinstance(event, Finished):
                weight = OUTPUT_WEIGHT if self.output_tokens else 1
                self.output_tokens += (event.num_output_tokens - self.output_tokens) * weight


def arrivals(seed: int, per_s: float, count: int) -> Iterator[tuple[int, int, int]]:
    """When, and how long prompt and output are: ragged, as people's are."""
    draw, now = random.Random(seed), 0.0
    for _ in range(count):
        now += draw.expovariate(per_s)
        yield int(now * 1e9), draw.randint(8, 96), min(200, 1 + int(draw.expovariate(1 / 20)))


@pytest.mark.parametrize("slots", [8, 16])
def test_forecasts_are_what_waits_become(slots: int) -> None:
    """Overloaded by a half, the queue grows to many times the slots."""
    some = Timed(spec(slots=slots, step_tokens=slots + 128, blocks=4000))
    step_us = STEP_US + ROW_US * slots
    per_s = 1.5 * 1e6 / (step_us * 20 / slots + PROMPT_US * 52)
    for number, (when_ns, prompt, output) in enumerate(arrivals(slots, per_s, 250)):
        some.run(when_ns)
        some.submit(number + 1, prompt, output, said=400)
    some.run(10**12)
    late = [(said, was) for said, was in some.waits[80:] if was > 0.1]
    assert len(late) > 120
    ratios = [said / was for said, was in late]
    assert 0.67 < median(ratios) < 1.5
    assert sum(0.5 < ratio < 2 for ratio in ratios) > 0.9 * len(ratios)


def test_blocks_that_are_short_count_as_slots_that_are() -> None:
    """Room for four sequences of eight slots: half as fast as the slots say."""
    some = Timed(spec(slots=8, step_tokens=8 + 128, blocks=4 * 23, block_size=4))
    for number in range(40):
        some.submit(number + 1, 40, 40, said=52)
    some.run(3 * 10**8)
    assert some.core.waiting
    assert len(some.core.workers["w0"].running) < 6
    some.submit(100, 40, 40, said=52)
    expected_s = some.submitted[100][1]
    some.run(10**11)
    was_s = some.waits[-1][1]
    assert 0.6 * was_s < expected_s < 1.6 * was_s


def test_nobody_waits_where_a_slot_is_free() -> None:
    some = Timed(spec(slots=2))
    assert some.forecast_s == 0
    some.submit(1, 5, 50, said=50)
    some.run(10**7)
    assert some.forecast_s == 0


def test_a_full_worker_makes_the_next_one_wait_for_an_end() -> None:
    some = Timed(spec(slots=2))
    for number in (1, 2):
        some.submit(number, 5, 50, said=50)
    some.output_tokens = 50
    some.run(5 * 10**7)
    step_s = (STEP_US + 2 * ROW_US) / 1e6
    assert 0.5 * 25 * step_s < some.forecast_s < 1.6 * 25 * step_s


def test_nobody_waits_for_those_who_give_way() -> None:
    """A worker full of lines of batches takes the next one who is not at once."""
    some = Timed(spec(slots=2))
    for number in range(1, 6):
        some.submit(number, 5, 50, said=50, priority=FLEX_PRIORITY)
    some.output_tokens = 50
    some.run(5 * 10**7)
    assert not some.core.workers["w0"].slots_free
    assert some.forecast_s == 0
    some.submit(6, 5, 50, said=50)
    some.run(6 * 10**7)
    assert some.waits[-1][1] < 0.01
    some.submit(7, 5, 50, said=50)
    some.run(7 * 10**7)
    assert not some.core.workers["w0"].flex
    assert some.forecast_s > 0


def test_without_workers_it_is_how_long_the_longest_has_waited() -> None:
    """So that a cell that was scaled to nothing says so at once."""
    some = Timed()
    some.submit(1, 5, 5, said=5)
    some.now_ns = 2 * 10**9
    some.submit(2, 5, 5, said=5)
    assert some.forecast_s == 2.0


def test_before_anything_has_ended_it_is_how_long_the_longest_has_waited() -> None:
    """As of a leader that took over a queue: how long outputs are it does not know."""
    some = Timed(spec(slots=2))
    for number in range(1, 10):
        some.submit(number, 8, 100, said=400)
    some.run(50_000_000)
    assert some.core.running_count == 2
    assert some.output_tokens == 0
    assert some.forecast_s == pytest.approx(0.05)


def test_more_workers_make_it_shorter() -> None:
    def forecast(workers: int) -> float:
        some = Timed(*[spec(slots=4, step_tokens=132) for _ in range(workers)])
        for number in range(60):
            some.submit(number + 1, 30, 40, said=40)
        some.run(4 * 10**8)
        assert some.core.waiting
        return some.forecast_s * (len(some.core.waiting) + 1) ** -1

    assert 0.4 < forecast(2) / forecast(1) < 0.62


def test_a_tenant_over_its_bound_holds_up_nobody_else() -> None:
    some = Timed(spec(slots=2))
    request = Request(
        id="full:1",
        sequence_id=1,
        prompt=(1, 2),
        max_tokens=30,
        arrived_ns=0,
        tenant="full",
        tenant_tokens_max=32,
    )
    for number in (1, 2, 3):
        some.submitted[number], some._max_tokens[number] = (0, 0.0), 30
        one = Request(
            id=f"full:{number}",
            sequence_id=number,
            prompt=request.prompt,
            max_tokens=30,
            arrived_ns=0,
            tenant="full",
            tenant_tokens_max=32,
        )
        some.core.apply(Submit(request=one), 0)
    some.run(10**7)
    assert len(some.core.waiting) == 2
    assert some.forecast_s == 0


def looked(some: Timed) -> Load:
    silent_ns = {"w0": ("host:1", 250_000_000)}
    return load.look(
        some.core, silent_ns=silent_ns, output_tokens=8, journal_lag_ns=10**6, now_ns=some.now_ns
    )


def test_what_is_told_of_workers_and_tenants() -> None:
    some = Timed(spec(slots=2, blocks=30, block_size=4, host_blocks=7))
    for number in (1, 2, 3):
        some.submit(number, 10, 20, said=20)
    some.run(10**7)
    told = looked(some)
    assert told.queued_tokens == 10
    assert told.tenant_queued_tokens == {"t": 10}
    assert told.tenant_running_tokens == {"t": 60}
    assert told.journal_lag_s == 0.001
    (address, worker) = next(iter(told.workers.items()))
    assert address == "host:1"
    assert (worker.slots, worker.slots_used, worker.kv_places) == (2, 2, 120)
    assert (worker.host_kv_blocks, worker.host_kv_blocks_used) == (7, 0)
    assert worker.heartbeat_age_s == 0.25
    assert 20 <= worker.kv_tokens <= worker.kv_places_held <= 120


def test_as_many_tenants_are_told_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest; the sum has all."""
    monkeypatch.setattr(load, "TENANTS_TOLD_MAX", 2)
    some = Timed()
    for number in (1, 2, 3):
        one = Request(
            id=f"{number}:1",
            sequence_id=number,
            prompt=(1,) * number,
            max_tokens=1,
            arrived_ns=0,
            tenant=str(number),
        )
        some.core.apply(Submit(request=one), 0)
    told = looked(some)
    assert told.tenant_queued_tokens == {"3": 3, "2": 2}
    assert told.queued_tokens == 6
