"""What a worker does next: who leaves, who stays, who joins, and how far everybody gets.

The order is the order of `Planner.plan`: secure the next step of those who run, preempting if
blocks are short; admit those who wait, unless somebody was just preempted; share the step's token
budget among prefills; and, when nothing is about to change, let the worker run several steps on its
own.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.policies import Policy, Seat
from scheduler_svc.core.sequence import Sequence, State, Stay
from scheduler_svc.core.types import BlockId, Config, Join, Plan, Serial, SlotIndex
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker import CHECKSUM_MASK, Flight, Worker


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    joins: list[Join] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    appends: list[tuple[SlotIndex, BlockId]] = field(default_factory=list)
    preempted: list[Serial] = field(default_factory=list)


class Planner:
    """Makes plans over the scheduler's queue and workers; holds no state of its own."""

    def __init__(
        self, config: Config, policy: Policy, waiting: WaitingQueue, workers: dict[str, Worker]
    ) -> None:
        self.config = config
        self.policy = policy
        self.waiting = waiting
        self.workers = workers

    def plan(self, worker: Worker, now_ns: int) -> Plan | None:
        """The worker's next plan, or None when it needs none now. None changes nothing."""
        if worker.first_steps_unanswered >= self.config.plans_in_flight_max:
            return None
        for sequence in [s for s in worker.running.values() if s.is_certain_to_finish]:
            worker.depart(sequence)
        if not self._is_due(worker) and self._next(worker, joining=0) is None:
            return None
        draft = Draft()
        running = len(worker.running)
        self._secure(worker, draft, lease_steps=1)
        while not draft.preempted:
            candidate = self._next(worker, joining=len(worker.running) - running)
            if candidate is None:
                break
            self._seat(worker, draft, candidate, now_ns)
        chunks = self._chunks(worker)
        lease_steps = self._lease(worker, draft, chunks)
        return self._send(worker, draft, chunks, lease_steps)

    # When a plan is needed

    def _is_due(self, worker: Worker) -> bool:
        """Something changed in the batch, a prefill has tokens left, or the lease runs low."""
        if worker.leaves:
            return True
        if not worker.running:
            return False
        if any(s.known - s.planned > 1 for s in worker.running.values()):
            return True
        steps = 1 if self.waiting else self.config.lease_steps_max
        return worker.lease_left <= max(1, steps // 2)

    # Who joins

    def _next(self, worker: Worker, *, joining: int) -> Sequence | None:
        """Who is to be seated next; blocks of departed sequences are taken back if that helps.

        Only then: a plan that is not made leaves no trace, or a replay of those made would differ.
        """
        candidate = self._candidate(worker, joining=joining)
        if candidate is None and self.waiting and self._is_open(worker):
            holding = worker.reclaim()
            candidate = self._candidate(worker, joining=joining) if holding else None
            if candidate is None:
                worker.restore(holding)
        return candidate

    def _candidate(self, worker: Worker, *, joining: int) -> Sequence | None:
        """Who can and may be seated next on this worker, or None. A question."""
        if not self.waiting or not self._is_open(worker):
            return None
        for sequence in self.waiting.in_turn():
            if not worker.can_hold(sequence):
                continue  # fits another worker only
            if sequence.is_suspect and any(s.is_suspect for s in worker.members):
                continue  # one at a time, so that the next death has one name
            if not self._may_sit(worker, sequence, joining, self._prefix(worker, sequence)):
                return None
            return sequence if len(worker.running) < self._fair_share(worker, sequence) else None
        return None

    def _is_open(self, worker: Worker) -> bool:
        return not worker.is_draining and worker.slots_free > 0 and self._has_budget(worker)

    def _fair_share(self, worker: Worker, sequence: Sequence) -> int:
        """Rows for each worker that could take the sequence now, if everyone who waits and may run
        were seated.

        No worker takes what another could start now; none waits for another that is full.
        """
        rows = [len(worker.running)]
        for other in self.workers.values():
            could = other is not worker and self._is_open(other) and other.can_hold(sequence)
            # Without a look at its prefixes: that costs as much as seating it.
            if could and self._may_sit(other, sequence, joining=0, hits=[]):
                rows.append(len(other.running))
        return -(-(self.waiting.seatable + sum(rows)) // len(rows))

    def _has_budget(self, worker: Worker) -> bool:
        """One more prefill can be promised its minimum of every step, whoever decodes beside it."""
        prefills = sum(s.known - s.planned > 1 for s in worker.running.values())
        decodes = len(worker.running) - prefills
        budget = worker.spec.mixed_budget - decodes
        return budget >= (prefills + 1) * min(self.config.prefill_tokens_min, budget)

    def _may_sit(
        self, worker: Worker, sequence: Sequence, joining: int, hits: list[BlockId]
    ) -> bool:
        cost = worker.pool.free_among(hits) - len(hits)
        return self.policy.admit(
            Seat(
                running=len(worker.running) - joining,
                joining=joining,
                blocks_free=worker.pool.free_count,
                blocks_now=worker.blocks_for(len(sequence.tokens)) + cost,
                blocks_worst=worker.blocks_for(sequence.places_max) + cost,
                blocks_owed=worker.blocks_owed,
                is_reserved=sequence.preemptions >= self.config.preemptions_max,
            )
        )

    def _prefix(self, worker: Worker, sequence: Sequence) -> list[BlockId]:
        """Cached blocks it can start from."""
        full = sequence.skippable // worker.spec.block_size
        hashes = sequence.full_hashes(full, worker.layout)
        return worker.pool.find(hashes, sequence.tokens)

    def _seat(self, worker: Worker, draft: Draft, sequence: Sequence, now_ns: int) -> None:
        hits = self._prefix(worker, sequence)
        worker.pool.hold(hits)
        fresh = worker.pool.take(worker.blocks_for(len(sequence.tokens)) - len(hits))
        tokens_done = len(hits) * worker.spec.block_size
        if (source := self._fork_source(worker, sequence, len(hits))) is not None:
            draft.copies.append((source, fresh[0]))
            tokens_done = len(sequence.tokens) - 1
        self.waiting.seat(sequence, tokens_done)
        sequence.move(State.RUNNING)
        sequence.remembered = len(hits)
        slot = worker.seat(sequence, hits + fresh, tokens_done)
        life = sequence.life
        if life.admitted_ns is None:
            life.admitted_ns = now_ns
            life.cached_tokens = tokens_done
        draft.joins.append(
            Join(
                slot=slot,
                serial=sequence.serial,
                tokens=tuple(sequence.tokens),
                prompt_tokens=sequence.prompt_tokens,
                tokens_done=tokens_done,
                blocks=tuple(sequence.blocks),
                explain_from=life.explained,
            )
        )

    def _fork_source(self, worker: Worker, sequence: Sequence, hits: int) -> BlockId | None:
        """The first choice's partly filled last prompt block, when all but the last token can be
        copied from it.
        """
        first = sequence.life.sequences[0]
        full, rest = divmod(sequence.prompt_tokens - 1, worker.spec.block_size)
        can_fork = (
            sequence.output_tokens == 0
            and first.stay is not None
            and worker.running.get(first.stay.slot) is first
            and first.done >= sequence.prompt_tokens
            and hits == full
            and rest > 0
        )
        return first.blocks[full] if can_fork else None

    # Who stays

    def _secure(self, worker: Worker, draft: Draft, lease_steps: int) -> None:
        """Blocks for everything that may be written by the end of this plan, at whatever cost."""
        while self._blocks_short(worker, lease_steps) > worker.pool.free_count:
            if worker.reclaim():
                continue
            victim = max(worker.running.values(), key=self._victim_key)
            assert len(worker.running) > 1, "one sequence alone was admitted only if it fits"
            worker.release(victim)
            victim.move(State.PREEMPTED)
            victim.preemptions += 1
            self.waiting.add(victim)
            draft.preempted.append(victim.serial)
        self._append(worker, draft, lease_steps)

    def _victim_key(self, sequence: Sequence) -> tuple[int, ...]:
        may_be = sequence.preemptions < self.config.preemptions_max
        return (may_be, *self.policy.victim(sequence))

    def _reach(self, worker: Worker, sequence: Sequence, ahead: int) -> int:
        """Blocks for the last KV place that may be written `ahead` optional steps from the next
        one.
        """
        return worker.blocks_for(min(sequence.known + ahead, sequence.places_max))

    def _blocks_short(self, worker: Worker, lease_steps: int) -> int:
        ahead = worker.optional_steps + lease_steps - 1
        size, total = worker.spec.block_size, 0
        for sequence in worker.running.values():
            # Almost always enough: ask for the ceiling division only when it is not.
            if sequence.known + ahead > len(sequence.blocks) * size:
                total += max(0, self._reach(worker, sequence, ahead) - len(sequence.blocks))
        return total

    def _append(self, worker: Worker, draft: Draft, lease_steps: int) -> None:
        ahead = worker.optional_steps + lease_steps - 1
        size = worker.spec.block_size
        for slot, sequence in worker.running.items():
            if sequence.known + ahead > len(sequence.blocks) * size:
                count = self._reach(worker, sequence, ahead) - len(sequence.blocks)
                blocks = worker.pool.take(max(0, count))
                sequence.blocks += blocks
                worker.blocks_owed -= len(blocks)
                draft.appends += [(slot, block) for block in blocks]

    # How far everybody gets

    def _chunks(self, worker: Worker) -> dict[SlotIndex, int]:
        """Tokens of the first step for rows with more than one to go.

        In the queue's order, and none takes more than half of what is left while another waits
        behind it: a short prompt is never serialised behind long ones. Each gets at least
        `prefill_tokens_min` (see `_has_budget`). Where nobody decodes, nobody is kept waiting.
        """
        prefills = [(slot, s) for slot, s in worker.running.items() if s.known - s.planned > 1]
        decodes, spec = len(worker.running) - len(prefills), worker.spec
        budget = spec.mixed_budget - decodes if decodes else spec.step_tokens_max
        prefills.sort(key=lambda row: self.waiting.turn(row[1]))
        minimum = self.config.prefill_tokens_min
        chunks: dict[SlotIndex, int] = {}
        for index, (slot, sequence) in enumerate(prefills):
            behind = len(prefills) - index - 1
            share = min(budget // 2, budget - behind * minimum) if behind else budget
            chunks[slot] = min(sequence.known - sequence.planned, share)
            assert chunks[slot] > 0, "admitted only where its minimum can be promised"
            budget -= chunks[slot]
        return chunks

    def _lease(self, worker: Worker, draft: Draft, chunks: dict[SlotIndex, int]) -> int:
        """Steps the worker may run alone: one while membership may change or a prefill goes on."""
        steps = self.config.lease_steps_max
        if self.waiting or steps == 1 or not worker.running:
            return 1
        rows = worker.running.items()
        if any(s.known - s.planned != chunks.get(slot, 1) for slot, s in rows):
            return 1
        if self._blocks_short(worker, steps) > worker.pool.free_count:
            return 1
        self._append(worker, draft, steps)
        return steps

    # The plan itself

    def _send(
        self, worker: Worker, draft: Draft, chunks: dict[SlotIndex, int], lease_steps: int
    ) -> Plan:
        members: list[Stay | None] = [None] * worker.spec.slots_max
        sampling: set[SlotIndex] = set()
        decode_rows = len(worker.running)
        for slot, sequence in worker.running.items():
            members[slot] = sequence.stay
            gap = sequence.known - sequence.planned
            count = 1 if gap == 1 else chunks.get(slot, 0)
            decode_rows -= gap > 1
            sequence.planned += count
            if count == gap:
                sequence.known += 1
                sampling.add(slot)
        worker.plan_id += 1
        worker.flights.append(
            Flight(
                plan_id=worker.plan_id,
                lease_steps=lease_steps,
                members=members,
                chunks=chunks,
                sampling=sampling,
            )
        )
        leaves, worker.leaves = tuple(worker.leaves), []
        return Plan(
            worker_id=worker.id,
            plan_id=worker.plan_id,
            lease_steps=lease_steps,
            leaves=leaves,
            joins=tuple(draft.joins),
            appends=tuple(draft.appends),
            copies=tuple(draft.copies),
            chunks=tuple(chunks.items()),
            checksum=worker.checksum & CHECKSUM_MASK,
            preempted=tuple(draft.preempted),
            decode_rows=decode_rows,
            blocks_free=worker.pool.free_count,
            waiting=len(self.waiting),
        )
