"""A scheduler core and its model workers, small enough to read a test by."""

import pickle

from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import (
    Committed,
    Config,
    Event,
    Finished,
    Plan,
    Reason,
    Request,
    RequestOver,
    StepResult,
    WorkerSpec,
)
from scheduler_svc.core.worker import Worker
from tests.fakes.model_worker import ModelWorker, expected_output

TURNS_MAX = 10_000


def spec(
    *,
    blocks: int = 1000,
    block_size: int = 4,
    slots: int = 8,
    step_tokens: int | None = None,
    mixed_tokens: int | None = None,
    vocab_size: int = 1000,
    fingerprint: str = "model",
    context: int | None = None,
) -> WorkerSpec:
    """A worker with plenty of everything but what the test says."""
    return WorkerSpec(
        fingerprint=fingerprint,
        block_size=block_size,
        block_count=blocks,
        slots_max=slots,
        step_tokens_max=slots + 64 if step_tokens is None else step_tokens,
        mixed_tokens_max=mixed_tokens,
        vocab_size=vocab_size,
        context_tokens_max=context,
    )


class Cell:
    """Drives a core by hand, keeps what it said, and knows what the outputs must be."""

    def __init__(
        self,
        *specs: WorkerSpec,
        policy: str = "fcfs",
        lease: int = 8,
        in_flight: int = 2,
        prefill_tokens: int = 16,
        tenant_tokens: int | None = None,
    ) -> None:
        config = Config(
            lease_steps_max=lease,
            plans_in_flight_max=in_flight,
            prefill_tokens_min=prefill_tokens,
            tenant_tokens_max=tenant_tokens,
        )
        self.scheduler = Scheduler(config, POLICIES[policy])
        self.now_ns = 0
        self.workers: dict[str, ModelWorker] = {}
        self.requests: dict[int, Request] = {}
        self.max_tokens_of: dict[int, int] = {}
        self.bad_serials: set[int] = set()
        self.outputs: dict[int, list[int]] = {}
        # Prompt positions, by the request's serial.
        self.explained: dict[int, list[int]] = {}
        self.endings: dict[int, Finished] = {}
        self.overs: dict[int, RequestOver] = {}
        self.serial_next = 1
        for number, worker_spec in enumerate(specs, start=1):
            self.join(f"w{number}", worker_spec)

    # Commands

    def join(self, worker_id: str, worker_spec: WorkerSpec) -> None:
        """A worker with an empty batch."""
        self.workers[worker_id] = ModelWorker(
            worker_id,
            worker_spec,
            self.max_tokens_of,
            stop_every=0,
            bad_serials=self.bad_serials,
        )
        self.hear(self.scheduler.worker_joined(worker_id, worker_spec, now_ns=self.now_ns))

    def kill(self, worker_id: str, *, is_crash: bool = True) -> None:
        """The worker is gone, with everything in flight."""
        del self.workers[worker_id]
        self.hear(
            self.scheduler.worker_lost(
                worker_id, now_ns=self.now_ns, is_crash=is_crash, reason="killed"
            )
        )

    def submit(
        self,
        prompt: int | tuple[int, ...] = 3,
        max_tokens: int = 5,
        *,
        n: int = 1,
        tenant: str = "",
        tenant_tokens: int | None = None,
        priority: int = 0,
        deadline_ns: int | None = None,
        outputs: tuple[tuple[int, ...] | None, ...] = (),
        explain_from: int | None = None,
    ) -> int:
        """A request with that prompt, or with a prompt of its own of that length; its serial."""
        serial = self.serial_next
        self.serial_next += n
        if isinstance(prompt, int):
            prompt = tuple(1 + (serial * 101 + i) % 997 for i in range(prompt))
        request = Request(
            id=f"r{serial}",
            serial=serial,
            n=n,
            prompt=prompt,
            max_tokens=max_tokens,
            arrived_ns=self.now_ns,
            deadline_ns=deadline_ns,
            tenant=tenant,
            tenant_tokens_max=tenant_tokens,
            priority=priority,
            outputs=outputs,
            explain_from=explain_from,
        )
        self.requests[serial] = request
        for choice in range(n):
            self.max_tokens_of[serial + choice] = max_tokens
            known = outputs[choice] if outputs else ()
            self.outputs[serial + choice] = list(known or ())
        self.hear(self.scheduler.submit(request, now_ns=self.now_ns))
        return serial

    def cancel(self, serial: int, choice: int | None = None) -> list[Event]:
        """Cancel, and say what the core said."""
        events = self.scheduler.cancel(serial, choice=choice, now_ns=self.now_ns)
        self.hear(events)
        return events

    def expire(self) -> list[Event]:
        """Expire, and say what the core said."""
        events = self.scheduler.expire(now_ns=self.now_ns)
        self.hear(events)
        return events

    def plan(self, worker_id: str = "w1") -> Plan | None:
        """One plan, sent to the worker."""
        plan = self.scheduler.plan(worker_id, now_ns=self.now_ns)
        if plan is not None:
            self.workers[worker_id].send(plan)
        self.scheduler.check()
        return plan

    def must_plan(self, worker_id: str = "w1") -> Plan:
        """One plan where one is due."""
        plan = self.plan(worker_id)
        assert plan is not None
        return plan

    def compute(self, worker_id: str = "w1") -> StepResult:
        """One step of the worker, not yet committed."""
        result = self.workers[worker_id].step()
        assert result is not None
        return result

    def commit(self, result: StepResult) -> Committed:
        """Commit a result and write down what it means."""
        committed = self.scheduler.commit(result, now_ns=self.now_ns)
        self.scheduler.check()
        rows = zip(committed.serials, committed.positions, committed.tokens, strict=True)
        for serial, position, token in rows:
            assert position == len(self.outputs[serial]), "positions are contiguous"
            assert serial not in self.endings, "nothing comes after the end"
            self.outputs[serial].append(token)
        for slot, serial in committed.explained.items():
            self.explained.setdefault(serial, []).extend(result.explained[slot])
        self.hear(committed.events)
        return committed

    def step(self, worker_id: str = "w1") -> Committed:
        """One step of the worker, committed."""
        return self.commit(self.compute(worker_id))

    def turn(self) -> list[Plan]:
        """Every worker gets all plans that are due and runs a step."""
        self.now_ns += 1
        plans = []
        for worker_id in self.workers:
            while (plan := self.plan(worker_id)) is not None:
                plans.append(plan)
        for worker in self.workers.values():
            if (result := worker.step()) is not None:
                self.commit(result)
        return plans

    def turns(self, count: int) -> list[Plan]:
        """Several turns; their plans."""
        return [plan for _ in range(count) for plan in self.turn()]

    def finish(self) -> list[Plan]:
        """Turns until nothing lives, then the verdict on every output; the plans."""
        plans: list[Plan] = []
        for _ in range(TURNS_MAX):
            if not self.scheduler.live_count:
                break
            plans += self.turn()
        assert self.scheduler.live_count == 0, f"stuck: {self.scheduler}"
        plans += self.turns(3)  # the leaves
        self.judge()
        return plans

    def hear(self, events: list[Event]) -> None:
        """Exactly one terminal event per choice and per request."""
        self.scheduler.check()
        for event in events:
            if isinstance(event, RequestOver):
                assert event.serial not in self.overs
                self.overs[event.serial] = event
            else:
                assert event.serial not in self.endings
                self.endings[event.serial] = event

    def judge(self) -> None:
        """What ended by itself is exactly what it would be alone in the world; nothing leaks."""
        for request in self.requests.values():
            for serial in range(request.serial, request.serial + request.n):
                if serial in self.endings:
                    self._judge_choice(request, serial)
            self._judge_prompt(request)
        for worker in self.workers.values():
            assert not worker.rows
        for mirror in self.scheduler.workers.values():
            assert mirror.pool.free_count == mirror.pool.block_count

    def _judge_choice(self, request: Request, serial: int) -> None:
        vocab_size = next(iter(self.workers.values())).spec.vocab_size
        right, reason = expected_output(request.prompt, serial, request.max_tokens, vocab_size, 0)
        output, ending = tuple(self.outputs[serial]), self.endings[serial]
        assert output == right[: len(output)]
        if ending.reason in (Reason.LENGTH, Reason.STOP):
            assert (output, ending.reason) == (right, reason)
            assert ending.output_tokens == len(output)

    def _judge_prompt(self, request: Request) -> None:
        """No position twice, none missing before a token."""
        explained, end = self.explained.get(request.serial, []), len(request.prompt)
        right = list(range(request.explain_from or end, end))
        assert explained == right[: len(explained)]
        if any(self.outputs[request.serial + choice] for choice in range(request.n)):
            assert explained == right

    # Questions

    def worker(self, worker_id: str = "w1") -> Worker:
        """The core's picture of a worker."""
        return self.scheduler.workers[worker_id]

    def sequence(self, serial: int, worker_id: str = "w1") -> Sequence:
        """A sequence in that worker's batch."""
        return next(s for s in self.worker(worker_id).running.values() if s.serial == serial)

    def running(self, worker_id: str = "w1") -> list[int]:
        """Serials in the batch."""
        return sorted(s.serial for s in self.worker(worker_id).running.values())

    def waiting(self) -> list[int]:
        """Serials in the queue, in its order."""
        return [s.serial for s in self.scheduler.waiting]

    def reason(self, serial: int) -> Reason:
        """How a choice ended."""
        return self.endings[serial].reason

    def snapshot(self) -> bytes:
        """Everything the core knows, for equality."""
        return pickle.dumps(self.scheduler)
