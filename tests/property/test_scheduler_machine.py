"""The scheduler and its model workers under any sequence of commands."""

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_svc.core.commands import Configured, StoreBehind, WorkerChanged, WorkerLate
from scheduler_svc.core.types import Config, Feature, Reason, WorkerSpec
from tests.support.cell import Cell, spec
from tests.support.combinations import allowed, merged, split

MOST_WORKERS = 3
MISFIT_WAIT_NS = 20
PLACES = 32


class SchedulerMachine(RuleBasedStateMachine):
    """`check()` runs after every command (in `Cell`), the verdict on all outputs at the end."""

    cell: Cell

    @initialize(
        policy=st.sampled_from(["fair", "fcfs", "priority", "static"]),
        knobs=st.deferred(lambda: st.sampled_from([{}, *map(merged, allowed())])),
        lease=st.sampled_from([1, 2, 8]),
        in_flight=st.integers(1, 3),
        block_size=st.sampled_from([1, 2, 4]),
        slots=st.integers(1, 4),
        room=st.sampled_from([1, 5, 40]),
        mixed_room=st.sampled_from([None, 1, 5]),
        tenant_tokens=st.sampled_from([None, None, 1, 30]),
        slot_tokens=st.sampled_from([1, 1, 2, 5]),
        windows=st.sampled_from([(None,), (None,), (5,), (None, 6)]),
        host_blocks=st.sampled_from([0, 3, 50]),
    )
    def start(
        self,
        policy: str,
        knobs: dict[str, Any],
        lease: int,
        in_flight: int,
        block_size: int,
        slots: int,
        room: int,
        mixed_room: int | None,
        tenant_tokens: int | None,
        slot_tokens: int,
        windows: tuple[int | None, ...],
        host_blocks: int,
    ) -> None:
        self.cell = Cell(
            policy=policy,
            lease=lease,
            in_flight=in_flight,
            prefill_tokens=4,
            tenant_tokens=tenant_tokens,
            misfit_wait_ns=MISFIT_WAIT_NS,
            **knobs,
        )
        rows = slots * slot_tokens
        self.spec = spec(
            block_size=block_size,
            blocks=PLACES // block_size,
            slots=slots,
            step_tokens=rows + room,
            mixed_tokens=None if mixed_room is None else rows + min(room, mixed_room),
            slot_tokens=slot_tokens,
            vocab_size=50,
            windows=windows,
            host_blocks=host_blocks,
        )
        defaults = {name: getattr(Config(), name) for name in split(knobs)[1]}
        self.config = replace(self.cell.configured.config, **defaults)
        self.born = 0
        self.unjudged: list[str] = []
        self.join()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12).map(tuple),
        max_tokens=st.integers(1, 24),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        tenant=st.sampled_from(["a", "b"]),
        patience_ns=st.sampled_from([None, None, None, 5, 50]),
        is_bad=st.sampled_from([False, False, False, True]),
        prompt_logprobs_from=st.sampled_from([None, None, 1]),
        needs=st.sampled_from([(), (), (Feature.LOGPROBS,)]),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        n: int,
        tenant: str,
        patience_ns: int | None,
        is_bad: bool,
        prompt_logprobs_from: int | None,
        needs: tuple[Feature, ...],
    ) -> None:
        deadline_ns = None if patience_ns is None else self.cell.now_ns + patience_ns
        sequence_id = self.cell.submit(
            prompt,
            max_tokens,
            n=n,
            tenant=tenant,
            deadline_ns=deadline_ns,
            prompt_logprobs_from=prompt_logprobs_from,
            needs=needs,
        )
        if is_bad:
            self.cell.bad_sequence_ids.add(sequence_id)

    @precondition(lambda self: self.cell.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.cell.requests.values())))
        choice = data.draw(st.one_of(st.none(), st.integers(0, request.n - 1)))
        self.cell.cancel(request.sequence_id, choice)

    @precondition(lambda self: any(self.cell.outputs.values()))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """A stop string in what somebody who goes on has said so far."""
        said = [
            (request.sequence_id, choice, len(self.cell.outputs[request.sequence_id + choice]))
            for request in self.cell.requests.values()
            for choice in range(request.n)
            if request.sequence_id + choice not in self.cell.endings
        ]
        if said := [each for each in said if each[2]]:
            sequence_id, choice, count = data.draw(st.sampled_from(said))
            self.cell.stop(sequence_id, choice, data.draw(st.integers(1, count)))

    @rule(knobs=st.deferred(lambda: st.sampled_from([{}, *map(merged, allowed())])))
    def configure(self, knobs: dict[str, Any]) -> None:
        rules, values = split(knobs)
        config = replace(self.config, **values)
        self.cell.configured = Configured(config=config, policy="fcfs", rules=rules)
        self.cell.apply(self.cell.configured)

    @rule(is_told=st.booleans())
    def lead_anew(self, is_told: bool) -> None:
        self.cell.lead_anew(is_told=is_told)
        self.unjudged.clear()

    @rule(is_behind=st.booleans())
    def store(self, is_behind: bool) -> None:
        self.cell.apply(StoreBehind(is_behind=is_behind))

    @precondition(lambda self: self.cell.workers)
    @rule(data=st.data(), is_late=st.booleans())
    def late_or_draining(self, data: st.DataObject, is_late: bool) -> None:
        worker_id = data.draw(st.sampled_from(list(self.cell.workers)))
        if is_late:
            self.cell.apply(WorkerLate(worker_id=worker_id))
        else:
            self.cell.drain(worker_id)

    @rule(passed_ns=st.integers(0, 30))
    def expire(self, passed_ns: int) -> None:
        self.cell.now_ns += passed_ns
        self.cell.expire()

    @precondition(lambda self: self.cell.workers)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        self.cell.plan(data.draw(st.sampled_from(list(self.cell.workers))))

    @precondition(lambda self: self.cell.workers)
    @rule(data=st.data(), is_late=st.booleans())
    def step(self, data: st.DataObject, is_late: bool) -> None:
        worker = self.cell.workers[data.draw(st.sampled_from(list(self.cell.workers)))]
        if (result := worker.step(sees_newer_plan=not is_late)) is not None:
            self.cell.commit(result)

    @rule(count=st.integers(1, 6))
    def turns(self, count: int) -> None:
        self.cell.turns(count)

    @precondition(lambda self: self.cell.workers)
    @rule(data=st.data(), is_crash=st.sampled_from([True, False, None]))
    def kill(self, data: st.DataObject, is_crash: bool | None) -> None:
        worker_id = data.draw(st.sampled_from(list(self.cell.workers)))
        self.cell.kill(worker_id, is_crash=is_crash)
        if is_crash is None:
            self.unjudged.append(worker_id)

    @precondition(lambda self: self.unjudged)
    @rule(is_crash=st.booleans())
    def judge(self, is_crash: bool) -> None:
        self.cell.verdict(self.unjudged.pop(), is_crash=is_crash)

    @precondition(lambda self: self.unjudged and len(self.cell.workers) < MOST_WORKERS)
    @rule()
    def reconnect(self) -> None:
        self.cell.join(self.unjudged.pop(), self.spec)

    @precondition(lambda self: self.cell.workers)
    @rule(data=st.data(), features=st.sampled_from([(), tuple(Feature)]))
    def change(self, data: st.DataObject, features: tuple[Feature, ...]) -> None:
        """Within what the worker was born with, if it can use more: it has blocks for that."""
        worker_id = data.draw(st.sampled_from(list(self.cell.workers)))
        least = self.spec.slots_max * self.spec.slot_tokens_max + 1
        more = 0 if None in self.spec.windows else 9
        step_tokens = data.draw(st.integers(least, self.spec.step_tokens_max + more))
        mixed = self.spec.mixed_tokens_max
        if mixed is not None:
            mixed = data.draw(st.integers(least, min(mixed, step_tokens)))
        self.change_to(
            worker_id,
            replace(
                self.spec,
                step_tokens_max=step_tokens,
                mixed_tokens_max=mixed,
                features=frozenset(features),
            ),
        )

    def change_to(self, worker_id: str, spec: WorkerSpec) -> None:
        self.cell.apply(WorkerChanged(worker_id=worker_id, spec=spec))

    @precondition(lambda self: len(self.cell.workers) < MOST_WORKERS)
    @rule()
    def join(self) -> None:
        self.born += 1
        self.cell.join(f"w{self.born}", self.spec)

    def teardown(self) -> None:
        if not hasattr(self, "cell"):
            return
        self.store(is_behind=False)
        for worker_id in [one for one in self.cell.workers if self.cell.worker(one).is_draining]:
            self.cell.kill(worker_id, is_crash=False)
        if not self.cell.workers:
            self.join()
        while self.unjudged:
            self.judge(is_crash=False)
        for worker_id in self.cell.workers:
            self.change_to(worker_id, self.spec)
        # Whom no worker can hold that has come since waits for one that can.
        self.expire(passed_ns=MISFIT_WAIT_NS)
        self.cell.finish()
        assert len(self.cell.overs) == len(self.cell.requests)
        for sequence_id, ending in self.cell.endings.items():
            if ending.reason is Reason.ERROR and "not finite" in ending.error:
                is_shared = any(
                    r.prompt_logprobs_from is not None
                    and r.sequence_id <= sequence_id < r.sequence_id + r.n
                    for r in self.cell.requests.values()
                    if r.sequence_id in self.cell.bad_sequence_ids
                )
                assert sequence_id in self.cell.bad_sequence_ids or is_shared


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_the_last_one_leaves_behind_all_plans_in_flight() -> None:
    """Seen: three in flight when it was cancelled, and the verdict came a turn too soon."""
    cell = Cell(spec(slots=1, blocks=8, block_size=1, step_tokens=2), lease=1, in_flight=3)
    cell.submit((1,), max_tokens=1)
    last = cell.submit((1,), max_tokens=3)
    cell.turn()
    cell.plan()
    cell.cancel(last)
    cell.finish()
