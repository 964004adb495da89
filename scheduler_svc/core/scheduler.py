"""The scheduler core: requests and step results in, plans and events out. It decides everything and
performs nothing.

Every change of state passes one of the commands below; each is synchronous and returns what the
world must hear. Same commands in, same values out, whatever the process: nothing here looks at a
clock, a hash order or a socket.

    submit ─► waiting ─► plan ─► running ─► commit ─► events
                 ▲                  │
                 └──── preempted ◄──┘

"""

import heapq

from scheduler_svc.core.planning import Planner
from scheduler_svc.core.policies import Policy
from scheduler_svc.core.sequence import Life, Sequence, State
from scheduler_svc.core.types import (
    Committed,
    Config,
    Event,
    Finished,
    Plan,
    Reason,
    Request,
    RequestOver,
    ResultRejected,
    Serial,
    SlotIndex,
    StepResult,
    WorkerSpec,
)
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker import Flight, Worker


class Scheduler:
    """One cell's decisions."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self.config = config
        self.waiting = WaitingQueue(policy, config.tenant_tokens_max)
        self.workers: dict[str, Worker] = {}
        self._planner = Planner(config, policy, self.waiting, self.workers)
        self._lives: dict[Serial, Life] = {}
        self._deadlines: list[tuple[int, Serial]] = []

    def __repr__(self) -> str:
        waiting, running = len(self.waiting), self.running_count
        return f"<Scheduler {waiting} waiting, {running} running, {self.live_count} live>"

    # Questions

    @property
    def live_count(self) -> int:
        """Requests submitted and not over."""
        return len(self._lives)

    @property
    def running_count(self) -> int:
        """Rows in all batches."""
        return sum(len(worker.running) for worker in self.workers.values())

    def next_deadline_ns(self) -> int | None:
        """When `expire` next has something to do, at the earliest."""
        return self._deadlines[0][0] if self._deadlines else None

    # Requests

    def submit(self, request: Request, *, now_ns: int) -> list[Event]:
        """Take a request in. A serial seen before changes nothing."""
        if request.serial in self._lives:
            return []
        explained = request.explain_from or len(request.prompt)
        life = Life(
            request=request,
            tenant=self.waiting.welcome(request),
            deaths_max=self.config.deaths_max,
            explained=explained,
        )
        life.sequences = [self._sequence(life, choice) for choice in range(request.n)]
        self._lives[request.serial] = life
        if request.deadline_ns is not None:
            self._add_deadline(request.deadline_ns, request.serial)
        events: list[Event] = []
        for sequence in life.sequences:
            if request.outputs and request.outputs[sequence.choice] is None:
                # Before this core existed; its ending is known elsewhere.
                sequence.move(State.FINISHED)
            elif sequence.choice > 0 and sequence.output_tokens == 0 and self._leads(life):
                life.siblings.append(sequence)
            else:
                self.waiting.add(sequence)
        if (misfit := self._misfit(life)) is not None:
            self._end(life, Reason.ERROR, now_ns, events, misfit)
        return events

    def cancel(
        self,
        serial: Serial,
        *,
        now_ns: int,
        choice: int | None = None,
        reason: Reason = Reason.CANCELLED,
        output_tokens: int | None = None,
        error: str = "",
    ) -> list[Event]:
        """End a request, or one choice of it, wherever it is. Unknown or ended: nothing happens.

        `output_tokens` cuts the output to a length that somebody downstream found to be the end (a
        stop string).
        """
        life = self._lives.get(serial)
        if life is None or (choice is not None and choice >= len(life.sequences)):
            return []
        events: list[Event] = []
        for sequence in life.sequences if choice is None else [life.sequences[choice]]:
            if sequence.state is not State.FINISHED:
                if output_tokens is not None:
                    del sequence.tokens[sequence.prompt_tokens + output_tokens :]
                self._finish(sequence, reason, now_ns, events, error=error)
        return events

    def expire(self, *, now_ns: int) -> list[Event]:
        """End every request whose deadline, or whose wait for a worker that fits, has passed."""
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, serial = heapq.heappop(self._deadlines)
            life = self._lives.get(serial)
            if life is None:
                continue
            deadline_ns = life.request.deadline_ns
            if deadline_ns is not None and deadline_ns <= now_ns:
                events += self.cancel(serial, now_ns=now_ns, reason=Reason.DEADLINE_EXCEEDED)
            elif life.misfit_ns is not None and life.misfit_ns <= now_ns:
                life.misfit_ns = None
                if (misfit := self._misfit(life)) is not None:
                    error = f"{misfit}, and none like the one that was lost came back"
                    self._end(life, Reason.ERROR, now_ns, events, error)
        return events

    # Workers

    def worker_joined(self, worker_id: str, spec: WorkerSpec, *, now_ns: int) -> list[Event]:
        """A worker with an empty batch.

        Ends requests that fit none of the workers now known, unless they wait for a lost one.
        """
        assert worker_id not in self.workers
        self.workers[worker_id] = Worker(worker_id, spec, self.waiting.left)
        events: list[Event] = []
        for life in list(self._lives.values()):
            misfit = self._misfit(life)
            if misfit is None:
                life.misfit_ns = None
            elif life.misfit_ns is None:
                self._end(life, Reason.ERROR, now_ns, events, misfit)
        return events

    def worker_draining(self, worker_id: str) -> bool:
        """Give it nothing new; True once nothing of it is left."""
        worker = self.workers[worker_id]
        worker.is_draining = True
        return not worker.members

    def worker_lost(
        self, worker_id: str, *, now_ns: int, is_crash: bool, reason: str
    ) -> list[Event]:
        """Its batch is gone. Sequences go on elsewhere from their committed tokens.

        A sequence that has seen `deaths_max` crashes without a token in between is tried alone from
        then on (`Planner._candidate`), and one more crash under it alone convicts its request: all
        choices share the prompt, so all are failed, not replayed.
        """
        worker = self.workers.pop(worker_id)
        convicted = [s for s in worker.members if s.is_suspect and is_crash]
        for sequence in worker.members:
            worker.release(sequence)
            sequence.deaths += is_crash
            sequence.move(State.PREEMPTED)
            self.waiting.add(sequence)
        events: list[Event] = []
        for sequence in convicted:
            deaths = sequence.deaths
            error = f"{deaths} workers were lost computing this request, the last: {reason}"
            self._end(sequence.life, Reason.ERROR, now_ns, events, error)
        self._await_fit(now_ns)
        return events

    # Steps

    def plan(self, worker_id: str, *, now_ns: int) -> Plan | None:
        """What this worker does next; None when it needs no new plan: nothing has changed."""
        return self._planner.plan(self.workers[worker_id], now_ns)

    def commit(self, result: StepResult, *, now_ns: int) -> Committed:
        """Book one step. ResultRejected, with nothing changed, when it contradicts its plan."""
        worker = self.workers[result.worker_id]
        flight = worker.flight_of(result)
        self._check_ends(flight, result)
        self._check_explained(flight, result)
        committed = Committed(slots=[], serials=[], positions=[], tokens=[], events=[])
        self._book_chunks(worker, flight, result, committed)
        self._book_tokens(worker, flight, result, now_ns, committed)
        worker.advance(flight, result)
        for slot, reason in result.finished.items():
            self._end_row(flight, slot, reason, now_ns, committed.events)
        for slot, error in result.errors.items():
            self._end_row(flight, slot, Reason.ERROR, now_ns, committed.events, error)
        self.waiting.settle()
        return committed

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken.

        The shell calls it when idle, tests after every command.
        """
        for worker in self.workers.values():
            worker.check()
        self.waiting.check([s for w in self.workers.values() for s in w.running.values()])
        waiting = {s.serial for s in self.waiting}
        seated = {s.serial for w in self.workers.values() for s in w.members}
        assert not waiting & seated
        for life in self._lives.values():
            siblings = {s.serial for s in life.siblings}
            assert life.is_explained or not any(s.output_tokens for s in life.sequences)
            for sequence in life.sequences:
                places = (sequence.serial in waiting, sequence.serial in seated)
                has_place = sum(places) + (sequence.serial in siblings)
                assert has_place == (sequence.state is not State.FINISHED), sequence
        if not self._lives:
            assert not waiting
            assert not seated
            for worker in self.workers.values():
                assert worker.pool.free_count == worker.pool.block_count

    # Inside

    def _sequence(self, life: Life, choice: int) -> Sequence:
        request = life.request
        output = (request.outputs[choice] or ()) if request.outputs else ()
        return Sequence(
            life=life,
            choice=choice,
            serial=request.serial + choice,
            tokens=[*request.prompt, *output],
            prompt_tokens=len(request.prompt),
            places_max=len(request.prompt) + request.max_tokens - 1,
        )

    def _add_deadline(self, deadline_ns: int, serial: Serial) -> None:
        heapq.heappush(self._deadlines, (deadline_ns, serial))
        # Most requests end long before: forget theirs, or the heap grows with the traffic.
        if len(self._deadlines) > 2 * len(self._lives):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._lives]
            heapq.heapify(self._deadlines)

    def _leads(self, life: Life) -> bool:
        """The first choice will compute the prompt, so that the others can fork from it."""
        first = life.sequences[0]
        return first.state is State.WAITING and first.output_tokens == 0

    def _misfit(self, life: Life) -> str | None:
        """Why no worker can ever hold its sequences, which all need the same places, or None."""
        sequence = life.sequences[0]
        workers = self.workers.values()
        if not workers or any(worker.can_hold(sequence) for worker in workers):
            return None
        largest = max(worker.spec.places_max for worker in workers)
        return (
            f"prompt and max_tokens need KV for {sequence.places_max} tokens, "
            f"the largest worker holds {largest}"
        )

    def _await_fit(self, now_ns: int) -> None:
        """Whom none of the workers left can hold waits a while for one that can."""
        for life in self._lives.values():
            if life.misfit_ns is None and self._misfit(life) is not None:
                life.misfit_ns = now_ns + self.config.misfit_wait_ns
                self._add_deadline(life.misfit_ns, life.request.serial)

    def _check_ends(self, flight: Flight, result: StepResult) -> None:
        """A row ends for length exactly at its last token."""
        for slot in result.slots:
            stay = flight.members[slot]
            assert stay is not None
            sequence = stay.sequence
            if sequence.stay is not stay:
                continue
            is_last = len(sequence.tokens) >= sequence.places_max
            reason = result.finished.get(slot)
            if is_last != (reason is Reason.LENGTH) and not (is_last and reason is Reason.STOP):
                raise ResultRejected(
                    f"sequence {sequence.serial} has {sequence.output_tokens + 1} output tokens "
                    f"and was reported {reason.value if reason else 'running'}"
                )

    def _check_explained(self, flight: Flight, result: StepResult) -> None:
        """Of every chunk exactly the prompt positions that it was to explain."""
        expected: dict[SlotIndex, range] = {}
        for slot, count in flight.chunks.items() if result.step == 0 else ():
            stay = flight.members[slot]
            assert stay is not None
            if stay.sequence.stay is not stay:
                # It never happened, so nobody knows what it had done.
                positions = result.explained.get(slot)
            elif slot not in result.errors:
                positions = stay.sequence.to_explain(count)
            else:
                positions = None
            if positions:
                expected[slot] = positions
        if expected != result.explained:
            raise ResultRejected(
                f"plan {result.plan_id}: prompt positions by slot {dict(result.explained)} "
                f"explained, {expected} expected"
            )

    def _book_chunks(
        self, worker: Worker, flight: Flight, result: StepResult, out: Committed
    ) -> None:
        if result.step > 0:
            return
        for slot, count in flight.chunks.items():
            stay = flight.members[slot]
            assert stay is not None
            sequence = stay.sequence
            if slot not in result.errors and sequence.stay is stay:
                # A row that samples advances one more token in _book_tokens.
                if slot in result.explained:
                    sequence.life.explained = result.explained[slot].stop
                    out.explained[slot] = sequence.serial
                sequence.done += count - (slot in flight.sampling)
                self._remember(worker, sequence)

    def _book_tokens(
        self, worker: Worker, flight: Flight, result: StepResult, now_ns: int, out: Committed
    ) -> None:
        is_optional = result.step > 0
        size = worker.spec.block_size
        for slot, token in zip(result.slots, result.tokens, strict=True):
            stay = flight.members[slot]
            assert stay is not None
            sequence = stay.sequence
            if sequence.stay is not stay:
                continue
            out.slots.append(slot)
            out.serials.append(sequence.serial)
            out.positions.append(len(sequence.tokens) - sequence.prompt_tokens)
            out.tokens.append(token)
            sequence.tokens.append(token)
            sequence.done += 1
            sequence.deaths = 0
            sequence.life.tenant.served += 1
            if is_optional:
                sequence.planned += 1
                sequence.known += 1
            if sequence.done // size > sequence.remembered:
                self._remember(worker, sequence)
            if sequence.life.first_token_ns is None or sequence.life.siblings:
                self._first_token(sequence.life, now_ns)

    def _remember(self, worker: Worker, sequence: Sequence) -> None:
        """Full, committed blocks can be found by their prefix from now on."""
        size = worker.spec.block_size
        full = min(sequence.done // size, len(sequence.blocks))
        hashes = sequence.full_hashes(full, worker.layout)
        for index in range(sequence.remembered, full):
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            worker.pool.remember(sequence.blocks[index], hashes[index], tokens)
        sequence.remembered = max(sequence.remembered, full)

    def _first_token(self, life: Life, now_ns: int) -> None:
        life.first_token_ns = life.first_token_ns or now_ns
        self._queue_siblings(life)

    def _queue_siblings(self, life: Life) -> None:
        siblings, life.siblings = life.siblings, []
        for sequence in siblings:
            self.waiting.add(sequence)

    def _end_row(
        self,
        flight: Flight,
        slot: int,
        reason: Reason,
        now_ns: int,
        events: list[Event],
        error: str = "",
    ) -> None:
        stay = flight.members[slot]
        assert stay is not None
        if stay.sequence.stay is stay:
            self._finish(stay.sequence, reason, now_ns, events, error=error)

    def _end(
        self, life: Life, reason: Reason, now_ns: int, events: list[Event], error: str
    ) -> None:
        for sequence in life.sequences:
            if sequence.state is not State.FINISHED:
                self._finish(sequence, reason, now_ns, events, error=error)

    def _finish(
        self, sequence: Sequence, reason: Reason, now_ns: int, events: list[Event], error: str = ""
    ) -> None:
        """The one way a sequence ends: seat and blocks are free, and its event is out."""
        life = sequence.life
        if sequence.worker is not None:
            sequence.worker.release(sequence)
        elif not self.waiting.remove(sequence) and sequence in life.siblings:
            life.siblings.remove(sequence)
        sequence.move(State.FINISHED)
        ending = Finished(
            serial=sequence.serial,
            reason=reason,
            output_tokens=sequence.output_tokens,
            error=error,
        )
        life.endings[sequence.choice] = ending
        events.append(ending)
        if all(s.state is State.FINISHED for s in life.sequences):
            del self._lives[life.request.serial]
            self.waiting.farewell(life.tenant)
            events.append(self._over(life, now_ns))
        elif sequence.choice == 0 and not life.is_explained:
            # The others would have nobody to explain their prompt, and it is what failed.
            self._end(life, reason, now_ns, events, error)
        elif sequence.choice == 0:
            self._queue_siblings(life)

    def _over(self, life: Life, now_ns: int) -> RequestOver:
        admitted_ns = life.admitted_ns if life.admitted_ns is not None else now_ns
        first_token_ns = life.first_token_ns if life.first_token_ns is not None else now_ns
        return RequestOver(
            id=life.request.id,
            serial=life.request.serial,
            prompt_tokens=len(life.request.prompt),
            cached_tokens=life.cached_tokens,
            outputs=tuple(tuple(s.tokens[s.prompt_tokens :]) for s in life.sequences),
            endings=tuple(life.endings[choice] for choice in sorted(life.endings)),
            queue_ns=max(0, admitted_ns - life.request.arrived_ns),
            prefill_ns=max(0, first_token_ns - admitted_ns),
            decode_ns=max(0, now_ns - first_token_ns),
            preemptions=sum(s.preemptions for s in life.sequences),
        )
