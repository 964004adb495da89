"""The scheduler core: one door. It decides everything and performs nothing.

    outcome = scheduler.apply(command, now_ns)

Every change passes `apply`; what the world must hear of it is in the outcome. Same commands in,
same outcomes out, whatever the process: nothing here looks at a clock, a hash order or a socket.
So the journal, which holds the commands, holds every decision.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.commands import (
    Cancel,
    Command,
    Configured,
    Expire,
    HandedOver,
    MakePlan,
    StepDone,
    StoreBehind,
    Submit,
    WorkerChanged,
    WorkerDraining,
    WorkerJoined,
    WorkerLate,
    WorkerLost,
)
from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.handover import handover_of, take_over
from scheduler_svc.core.kv import BlockTable
from scheduler_svc.core.outcome import Event, Outcome
from scheduler_svc.core.planner.plan import held_until_ns, make_plan
from scheduler_svc.core.prospects import why_hopeless, why_misfit, why_workerless
from scheduler_svc.core.requests import LiveRequest, Sequence, State
from scheduler_svc.core.results import book_result, check_result
from scheduler_svc.core.types import Config, Handover, Reason, Request
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.workers import Worker

# Requests whose time may be over, of one Expire; all others are with the next.
EXPIRED_MAX: Final = 64


class Scheduler:
    """One cell's decisions."""

    def __init__(self) -> None:
        self._cell = CellState()
        self._deadlines = Deadlines(self._cell)

    def __repr__(self) -> str:
        waiting, running = len(self.waiting), self.running_count
        return f"<Scheduler {waiting} waiting, {running} running, {self.live_count} live>"

    def apply(self, command: Command, now_ns: int) -> Outcome:
        """The one way in. ResultRejected, with nothing changed, for a StepDone not to be believed.

        `now_ns`: the ledger's clock.
        """
        return _HANDLERS[type(command)](self, command, now_ns)

    # Questions

    @property
    def config(self) -> Config:
        """What it decides by."""
        return self._cell.config

    @property
    def waiting(self) -> WaitingQueue:
        """Who waits. To be looked at only."""
        return self._cell.waiting

    @property
    def workers(self) -> dict[str, Worker]:
        """Who runs where. To be looked at only."""
        return self._cell.workers

    @property
    def is_store_behind(self) -> bool:
        """Nothing is planned until the store has acknowledged more."""
        return self._cell.is_store_behind

    @property
    def live_count(self) -> int:
        """Requests submitted and not over."""
        return len(self._cell.live)

    @property
    def running_count(self) -> int:
        """Sequences in all batches."""
        return sum(len(worker.running) for worker in self.workers.values())

    def next_deadline_ns(self) -> int | None:
        """When `Expire` next has something to do, at the earliest."""
        return self._deadlines.next_ns()

    def handover(self) -> Handover:
        """For the core after this one: `HandedOver`."""
        return handover_of(self._cell)

    def check(self, worker_id: str | None = None) -> None:
        """Raise AssertionError when an invariant is broken.

        Of one worker, a look at every block of it; of a worker that is no more, nothing. None: of
        all else.
        """
        if worker_id is None:
            self._cell.check()
        elif worker_id in self.workers:
            self.workers[worker_id].check()

    # Requests

    def _submit(self, command: Submit, now_ns: int) -> Outcome:
        cell, request = self._cell, command.request
        if request.sequence_id in cell.live:
            return Outcome()
        live = LiveRequest(
            request=request,
            tenant=cell.waiting.add_request(request),
            deaths_max=cell.config.deaths_max,
            prompt_logprobs_done=request.prompt_logprobs_from or len(request.prompt),
        )
        live.sequences = [_sequence(live, choice) for choice in range(request.n)]
        cell.live[request.sequence_id] = live
        self._deadlines.submitted(live, now_ns)
        for sequence in live.sequences:
            if request.outputs and request.outputs[sequence.choice] is None:
                # Before this core existed; its ending is known elsewhere.
                sequence.move(State.FINISHED)
            elif sequence.choice > 0 and not sequence.num_output_tokens and live.is_led:
                live.siblings.append(sequence)
            else:
                cell.waiting.add(sequence)
        events: list[Event] = []
        if now_ns < cell.grace_until_ns:
            self._deadlines.await_fit([live], now_ns)
        elif (misfit := why_misfit(self.workers.values(), live)) is not None:
            cell.end(live, Reason.UNSERVED, now_ns, events, misfit)
        return self._outcome(events)

    def _cancel(self, command: Cancel, now_ns: int) -> Outcome:
        live, choice = self._cell.live.get(command.sequence_id), command.choice
        if live is None or (choice is not None and choice >= len(live.sequences)):
            return Outcome()
        events: list[Event] = []
        for sequence in live.sequences if choice is None else [live.sequences[choice]]:
            if sequence.state is not State.FINISHED:
                if command.num_output_tokens is not None:
                    del sequence.tokens[sequence.num_prompt_tokens + command.num_output_tokens :]
                self._cell.finish(sequence, command.reason, now_ns, events, command.error)
        return self._outcome(events)

    def _handed_over(self, command: HandedOver, now_ns: int) -> Outcome:
        take_over(self._cell, command.handover)
        self._cell.grace_until_ns = now_ns + self.config.misfit_wait_ns
        return self._outcome()

    def _expire(self, command: Expire, now_ns: int) -> Outcome:
        events: list[Event] = []
        cell, workers = self._cell, self.workers.values()
        for live in islice(self._deadlines.due(now_ns), EXPIRED_MAX):
            one, deadline_ns = live.request.sequence_id, live.request.deadline_ns
            if deadline_ns is not None and deadline_ns <= now_ns:
                cell.end(live, Reason.DEADLINE_EXCEEDED, now_ns, events, "")
            elif (hopeless := why_hopeless(workers, live, now_ns)) is not None:
                cell.end(live, Reason.DEADLINE_EXCEEDED, now_ns, events, hopeless)
            elif cell.misfits.get(one, now_ns + 1) <= now_ns:
                del cell.misfits[one]
                if (misfit := why_misfit(workers, live)) is not None:
                    error = f"{misfit}, and none that can came in time"
                    cell.end(live, Reason.UNSERVED, now_ns, events, error)
            elif cell.workerless.get(one, now_ns + 1) <= now_ns:
                cell.end(live, Reason.UNSERVED, now_ns, events, why_workerless(live))
        return self._outcome(events)

    # Workers

    def _worker_joined(self, command: WorkerJoined, now_ns: int) -> Outcome:
        assert command.worker_id not in self.workers
        # It lives, whatever became of its connection.
        self._judge(WorkerLost(worker_id=command.worker_id, is_crash=False, reason=""), now_ns)
        self.workers[command.worker_id] = Worker(command.worker_id, command.spec)
        self._deadlines.worker_came(now_ns)
        return self._outcome()

    def _worker_changed(self, command: WorkerChanged, now_ns: int) -> Outcome:
        worker = self.workers[command.worker_id]
        worker.change(command.spec)
        for sequence in worker.members:
            if not worker.can_hold(sequence):
                self._cell.preempt(worker, sequence)
        self._deadlines.end_fit_waits()
        self._deadlines.await_fit(self._cell.live.values(), now_ns)
        return self._outcome()

    def _worker_draining(self, command: WorkerDraining, now_ns: int) -> Outcome:
        self.workers[command.worker_id].is_draining = True
        return self._outcome()

    def _worker_late(self, command: WorkerLate, now_ns: int) -> Outcome:
        worker = self.workers[command.worker_id]
        worker.is_late = bool(worker.flights)
        return self._outcome()

    def _worker_lost(self, command: WorkerLost, now_ns: int) -> Outcome:
        """A sequence that has lost `deaths_max` workers without getting any further is tried alone
        from then on (`planner.place`), and one more death under it alone convicts its request: all
        choices share the prompt, so all are failed, not replayed.
        """
        if (worker := self.workers.pop(command.worker_id, None)) is not None:
            for sequence in worker.members:
                sequence.unjudged.add(worker.id)
                self._cell.preempt(worker, sequence)
            self._deadlines.worker_left(worker, now_ns)
        return self._outcome(self._judge(command, now_ns))

    def _judge(self, command: WorkerLost, now_ns: int) -> list[Event]:
        """What became of a worker is known: its death counts from now on, or never happened."""
        events: list[Event] = []
        named = self._cell.preempted.values() if command.is_crash is not None else ()
        lives = {s.live for s in named if command.worker_id in s.unjudged or s.is_convicted}
        for live in sorted(lives, key=lambda live: live.request.sequence_id):
            for sequence in live.sequences:
                if command.worker_id in sequence.unjudged:
                    sequence.unjudged.remove(command.worker_id)
                    sequence.deaths += command.is_crash is True
            if any(sequence.is_convicted for sequence in live.sequences):
                deaths, last = live.deaths_max + 1, command.reason
                error = f"{deaths} workers were lost computing this request, the last: {last}"
                self._cell.end(live, Reason.ERROR, now_ns, events, error)
        return events

    # Plans and steps

    def _make_plan(self, command: MakePlan, now_ns: int) -> Outcome:
        worker = self.workers[command.worker_id]
        plan, passed_over = make_plan(self._cell, worker, now_ns)
        if plan is None:
            again_ns = held_until_ns(self._cell, worker, now_ns)
            return Outcome(passed_over=passed_over, again_ns=again_ns)
        self._cell.touch(worker.id)
        return Outcome(plan=plan, passed_over=passed_over, workers=self._cell.concerned())

    def _step_done(self, command: StepDone, now_ns: int) -> Outcome:
        worker = self.workers[command.result.worker_id]
        flight = check_result(worker, command.result)
        worker.is_late = False
        self._cell.touch(worker.id)
        tokens, events = book_result(self._cell, worker, flight, command.result, now_ns)
        return self._outcome(events, tokens=tokens)

    def _configured(self, command: Configured, now_ns: int) -> Outcome:
        self._cell.configure(command.config, command.policy, command.rules)
        return self._outcome()

    def _store_behind(self, command: StoreBehind, now_ns: int) -> Outcome:
        self._cell.is_store_behind = command.is_behind
        self._cell.touch(*self.workers)
        return self._outcome()

    # Inside

    def _outcome(self, events: list[Event] | None = None, **rest: Any) -> Outcome:
        return Outcome(events=tuple(events or ()), workers=self._cell.concerned(), **rest)


_HANDLERS: Final[dict[type, Callable[[Scheduler, Any, int], Outcome]]] = {
    Configured: Scheduler._configured,
    Submit: Scheduler._submit,
    Cancel: Scheduler._cancel,
    HandedOver: Scheduler._handed_over,
    Expire: Scheduler._expire,
    WorkerJoined: Scheduler._worker_joined,
    WorkerChanged: Scheduler._worker_changed,
    WorkerDraining: Scheduler._worker_draining,
    WorkerLate: Scheduler._worker_late,
    StoreBehind: Scheduler._store_behind,
    WorkerLost: Scheduler._worker_lost,
    MakePlan: Scheduler._make_plan,
    StepDone: Scheduler._step_done,
}


def _sequence(live: LiveRequest, choice: int) -> Sequence:
    request: Request = live.request
    output = (request.outputs[choice] or ()) if request.outputs else ()
    tokens = [*request.prompt, *output]
    tokens_max = len(request.prompt) + request.max_tokens
    return Sequence(
        live=live,
        choice=choice,
        sequence_id=request.sequence_id + choice,
        tokens=tokens,
        num_prompt_tokens=len(request.prompt),
        num_uncomputed_tokens=len(tokens),
        tokens_max=tokens_max,
        is_flex=request.is_flex,
        # The last token's KV is never needed.
        kv=BlockTable(tokens=tokens, tenant=request.tenant, places_max=tokens_max - 1),
    )
