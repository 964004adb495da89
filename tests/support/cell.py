"""A scheduler core and its model workers, small enough to read a test by."""

import pickle
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from scheduler_svc.core.blocks import BlockKey, block_keys, root_hash
from scheduler_svc.core.commands import (
    Cancel,
    Command,
    Configured,
    Expire,
    HandedOver,
    MakePlan,
    StepDone,
    Submit,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from scheduler_svc.core.outcome import Event, Finished, Outcome, Plan, RequestOver, StepTokens
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Config, Feature, Reason, Request, Rules, StepResult, WorkerSpec
from scheduler_svc.core.workers import Worker
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
    slot_tokens: int = 1,
    features: Iterable[Feature] = Feature,
    windows: tuple[int | None, ...] = (None,),
    host_blocks: int = 0,
) -> WorkerSpec:
    """A worker with plenty of everything but what the test says."""
    return WorkerSpec(
        fingerprint=fingerprint,
        block_size=block_size,
        block_count=blocks,
        slots_max=slots,
        step_tokens_max=slots * slot_tokens + 64 if step_tokens is None else step_tokens,
        mixed_tokens_max=mixed_tokens,
        vocab_size=vocab_size,
        context_tokens_max=context,
        slot_tokens_max=slot_tokens,
        features=frozenset(features),
        windows=windows,
        host_block_count=host_blocks,
    )


def keys(tokens: tuple[int, ...], size: int) -> list[BlockKey]:
    """Of the full blocks of `tokens`, as the cell's own model and no tenant have them."""
    return block_keys(root_hash("model", ""), tokens, size)


def check_all(scheduler: Scheduler) -> None:
    """Every invariant: of each worker, and of all else."""
    for worker_id in [*scheduler.workers, None]:
        scheduler.check(worker_id)


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
        **knobs: Any,
    ) -> None:
        """`knobs`: rules by kind, and other values of the config."""
        kinds = {field.name for field in fields(Rules)}
        rules = Rules(**{name: value for name, value in knobs.items() if name in kinds})
        config = Config(
            lease_steps_max=lease,
            plans_in_flight_max=in_flight,
            prefill_tokens_min=prefill_tokens,
            tenant_tokens_max=tenant_tokens,
            **{name: value for name, value in knobs.items() if name not in kinds},
        )
        self.scheduler = Scheduler()
        self.now_ns = 0
        self.workers: dict[str, ModelWorker] = {}
        self.requests: dict[int, Request] = {}
        self.max_tokens_of: dict[int, int] = {}
        self.bad_sequence_ids: set[int] = set()
        self.outputs: dict[int, list[int]] = {}
        # Prompt positions, by the request's first id.
        self.prompt_logprobs: dict[int, list[int]] = {}
        self.endings: dict[int, Finished] = {}
        self.overs: dict[int, RequestOver] = {}
        # Choices that a stop string ended, each after so many tokens.
        self.stopped: dict[int, int] = {}
        self.next_sequence_id = 1
        # Workers that may need a plan.
        self.concerned: set[str] = set()
        self.configured = Configured(config=config, policy=policy, rules=rules)
        self.apply(self.configured)
        for number, worker_spec in enumerate(specs, start=1):
            self.join(f"w{number}", worker_spec)

    # Commands

    def lead_anew(self, *, is_told: bool = True) -> None:
        """Another core takes over the requests that live, told what this one had learned, and all
        workers join it with empty batches.
        """
        handover, self.scheduler = self.scheduler.handover(), Scheduler()
        self.concerned.clear()
        self.apply(self.configured)
        for request in self.requests.values():
            choices = range(request.sequence_id, request.sequence_id + request.n)
            outputs = [None if s in self.endings else tuple(self.outputs[s]) for s in choices]
            if any(output is not None for output in outputs):
                self.apply(Submit(request=self.resumed(request, tuple(outputs))))
        if is_told:
            self.apply(HandedOver(handover=handover))
        for worker_id, worker in list(self.workers.items()):
            self.join(worker_id, worker.spec)

    def resumed(self, request: Request, outputs: tuple[tuple[int, ...] | None, ...]) -> Request:
        """As the ledger has it for the next leader."""
        first = request.prompt_logprobs_from
        if first is not None:
            told = self.prompt_logprobs.get(request.sequence_id, ())
            first = min(first + len(told), len(request.prompt))
        return replace(request, outputs=outputs, prompt_logprobs_from=first)

    def apply(self, command: Command) -> Outcome:
        """Through the one door; what it says is written down, and every invariant checked."""
        outcome = self.scheduler.apply(command, self.now_ns)
        self.hear(outcome.events)
        self.see(command, outcome)
        return outcome

    def see(self, command: Command, outcome: Outcome) -> None:
        """A plan comes only to a worker that was named since it last got none."""
        if isinstance(command, MakePlan):
            assert outcome.plan is None or command.worker_id in self.concerned
            self.concerned.discard(command.worker_id)
            if outcome.again_ns is not None:
                self.concerned.add(command.worker_id)
            if outcome.plan is not None:
                self.see_joins(outcome.plan)
        self.concerned |= set(outcome.workers)

    def see_joins(self, plan: Plan) -> None:
        """Nobody joins a worker that lacks what the request needs."""
        worker = self.worker(plan.worker_id)
        for join in plan.joins:
            assert worker.running[join.slot].live.request.needs <= worker.spec.features

    def join(self, worker_id: str, worker_spec: WorkerSpec) -> None:
        """A worker with an empty batch."""
        self.workers[worker_id] = ModelWorker(
            worker_id,
            worker_spec,
            self.max_tokens_of,
            stop_every=0,
            bad_sequence_ids=self.bad_sequence_ids,
        )
        self.apply(WorkerJoined(worker_id=worker_id, spec=worker_spec))

    def kill(self, worker_id: str, *, is_crash: bool | None = True) -> None:
        """The worker is gone, with everything in flight. None: its connection, for all we know."""
        del self.workers[worker_id]
        self.verdict(worker_id, is_crash=is_crash)

    def verdict(self, worker_id: str, *, is_crash: bool | None) -> None:
        """What became of the process of a lost worker."""
        self.apply(WorkerLost(worker_id=worker_id, is_crash=is_crash, reason="killed"))

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
        prompt_logprobs_from: int | None = None,
        needs: Iterable[Feature] = (),
        worker_wait_ns: int | None = None,
    ) -> int:
        """A request with that prompt, or with a prompt of its own of that length; its id."""
        sequence_id = self.next_sequence_id
        self.next_sequence_id += n
        if isinstance(prompt, int):
            prompt = tuple(1 + (sequence_id * 101 + i) % 997 for i in range(prompt))
        request = Request(
            id=f"r{sequence_id}",
            sequence_id=sequence_id,
            n=n,
            prompt=prompt,
            max_tokens=max_tokens,
            arrived_ns=self.now_ns,
            deadline_ns=deadline_ns,
            tenant=tenant,
            tenant_tokens_max=tenant_tokens,
            priority=priority,
            outputs=outputs,
            prompt_logprobs_from=prompt_logprobs_from,
            needs=frozenset(needs),
            worker_wait_ns=worker_wait_ns,
        )
        self.requests[sequence_id] = request
        for choice in range(n):
            self.max_tokens_of[sequence_id + choice] = max_tokens
            known = outputs[choice] if outputs else ()
            self.outputs[sequence_id + choice] = list(known or ())
        self.apply(Submit(request=request))
        return sequence_id

    def cancel(self, sequence_id: int, choice: int | None = None) -> tuple[Event, ...]:
        """Cancel, and say what the core said."""
        return self.apply(Cancel(sequence_id=sequence_id, choice=choice)).events

    def stop(self, sequence_id: int, choice: int, num_output_tokens: int) -> None:
        """A stop string was found in the output of a choice that goes on."""
        self.stopped[sequence_id + choice] = num_output_tokens
        self.apply(
            Cancel(
                sequence_id=sequence_id,
                choice=choice,
                reason=Reason.STOP,
                num_output_tokens=num_output_tokens,
            )
        )

    def expire(self) -> tuple[Event, ...]:
        """Expire, and say what the core said."""
        return self.apply(Expire()).events

    def drain(self, worker_id: str) -> bool:
        """Give it nothing new; whether nothing of it is left."""
        self.apply(WorkerDraining(worker_id=worker_id))
        return not self.worker(worker_id).members

    def plan(self, worker_id: str = "w1") -> Plan | None:
        """One plan, sent to the worker."""
        plan = self.apply(MakePlan(worker_id=worker_id)).plan
        if plan is not None:
            self.workers[worker_id].send(plan)
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

    def commit(self, result: StepResult) -> StepTokens:
        """Commit a result and write down what it means."""
        command = StepDone(result=result)
        outcome = self.scheduler.apply(command, self.now_ns)
        self.see(command, outcome)
        step = outcome.tokens
        assert step is not None
        for sequence_id, position, token in zip(
            step.sequence_ids, step.positions, step.tokens, strict=True
        ):
            assert position == len(self.outputs[sequence_id]), "positions are contiguous"
            assert sequence_id not in self.endings, "nothing comes after the end"
            self.outputs[sequence_id].append(token)
        for slot, sequence_id in step.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(sequence_id, []).extend(result.prompt_logprobs[slot])
        self.hear(outcome.events)
        return step

    def step(self, worker_id: str = "w1") -> StepTokens:
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
        # The plan that tells the last ones to leave comes after those in flight.
        plans += self.turns(1 + self.configured.config.plans_in_flight_max)
        self.judge()
        return plans

    def hear(self, events: tuple[Event, ...]) -> None:
        """Of a command, when it is done: the books balance, and there is exactly one terminal event
        per choice and per request.
        """
        check_all(self.scheduler)
        for event in events:
            if isinstance(event, RequestOver):
                assert event.sequence_id not in self.overs
                self.overs[event.sequence_id] = event
            else:
                assert event.sequence_id not in self.endings
                self.endings[event.sequence_id] = event

    def judge(self) -> None:
        """What ended by itself is exactly what it would be alone in the world; nothing leaks."""
        for request in self.requests.values():
            for sequence_id in range(request.sequence_id, request.sequence_id + request.n):
                if sequence_id in self.endings:
                    self._judge_choice(request, sequence_id)
            self._judge_prompt(request)
        for worker in self.workers.values():
            assert not worker.rows
        for mirror in self.scheduler.workers.values():
            assert mirror.kv.free_count == mirror.kv.block_count

    def _judge_choice(self, request: Request, sequence_id: int) -> None:
        vocab_size = next(iter(self.workers.values())).spec.vocab_size
        right, reason = expected_output(
            request.prompt, sequence_id, request.max_tokens, vocab_size, 0
        )
        output, ending = tuple(self.outputs[sequence_id]), self.endings[sequence_id]
        assert output == right[: len(output)]
        if (stopped := self.stopped.get(sequence_id)) is not None:
            assert (ending.reason, ending.num_output_tokens) == (Reason.STOP, stopped)
        elif ending.reason in (Reason.LENGTH, Reason.STOP):
            assert (output, ending.reason) == (right, reason)
            assert ending.num_output_tokens == len(output)

    def _judge_prompt(self, request: Request) -> None:
        """No position twice, none missing before a token."""
        prompt_logprobs, end = (
            self.prompt_logprobs.get(request.sequence_id, []),
            len(request.prompt),
        )
        right = list(range(request.prompt_logprobs_from or end, end))
        assert prompt_logprobs == right[: len(prompt_logprobs)]
        if any(self.outputs[request.sequence_id + choice] for choice in range(request.n)):
            assert prompt_logprobs == right

    # Questions

    def worker(self, worker_id: str = "w1") -> Worker:
        """The core's picture of a worker."""
        return self.scheduler.workers[worker_id]

    def sequence(self, sequence_id: int, worker_id: str = "w1") -> Sequence:
        """A sequence in that worker's batch."""
        return next(
            s for s in self.worker(worker_id).running.values() if s.sequence_id == sequence_id
        )

    def running(self, worker_id: str = "w1") -> list[int]:
        """Sequence ids in the batch."""
        return sorted(s.sequence_id for s in self.worker(worker_id).running.values())

    def waiting(self) -> list[int]:
        """Sequence ids in the queue, in its order."""
        return [s.sequence_id for s in self.scheduler.waiting]

    def reason(self, sequence_id: int) -> Reason:
        """How a choice ended."""
        return self.endings[sequence_id].reason

    def snapshot(self) -> bytes:
        """Everything the core knows, for equality."""
        return pickle.dumps(self.scheduler)
