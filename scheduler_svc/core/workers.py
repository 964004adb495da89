"""One worker as the core sees it: its slots, its blocks, and the plans it has not answered in full.

The core owns all of this; the worker holds a mirror that the plan's checksum proves right. A worker
applies plans strictly in order, each between two steps. So a block or slot given up here may be
given to another sequence in the very next plan: whatever the plans in flight still write there is
written before (docs/adr/0002).
"""

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from scheduler_svc.core.cost import StepCost
from scheduler_svc.core.kv import NO_BLOCK, KVManager
from scheduler_svc.core.outcome import Replacement
from scheduler_svc.core.requests import Residency, Sequence, Tenant
from scheduler_svc.core.types import SequenceId, SlotIndex, WorkerSpec

CHECKSUM_MASK = (1 << 64) - 1
# From a step's result until the plan that answers it is there, a busy scheduler's time included.
PLAN_US = 10_000
# As that, of a scheduler that is not so busy: what is held for less than a worker has stood still
# for it is held for less by and by, up to about the last of these times what it stands still.
HOLD_US, HOLD_GROWS_BITS, HOLD_SHRINKS_BITS = 5_000, 2, 5
# A tenth of the steps that flex sequences have been in they may sit out, for first tokens of others
# that come soon enough anyway; and so many at once, as requests come in groups.
SPARE_EVERY = 10
SPARES_MAX = 4


def slot_checksum(slot: SlotIndex, sequence_id: SequenceId) -> int:
    """One member's part of the membership checksum, as worker_service.proto defines it."""
    return (sequence_id + 1) * (2 * slot + 1)


@dataclass(eq=False, slots=True, kw_only=True)
class Flight:
    """An in-flight plan: it was sent and may still produce results."""

    plan_id: int
    lease_steps: int
    # As of this plan.
    members: dict[SlotIndex, Residency]
    chunks: dict[SlotIndex, int]
    # Slots that the next result of this plan must answer for: no more, no fewer.
    sampling: set[SlotIndex]
    # Of some member a token that may come, of this plan or one before it, is the last it may have.
    may_end: bool
    # Members that have left since: what is computed for them never happened.
    gone: set[SlotIndex] = field(default_factory=set)
    answered: int = 0
    # As of the last step, which the next mostly repeats: slots and whose a token was each.
    slots: tuple[SlotIndex, ...] = ()
    sequences: list[Sequence] = field(default_factory=list)
    sequence_ids: list[SequenceId] = field(default_factory=list)
    tenants: defaultdict[Tenant, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def next_step(self) -> tuple[int, int]:
        """How many rows decode in the next step of it, and how many prompt tokens it computes."""
        chunks = {} if self.answered else self.chunks
        return len(self.sampling) - len(self.sampling & chunks.keys()), sum(chunks.values())

    @property
    def optional_steps(self) -> int:
        """Steps that happen only if no newer plan comes first."""
        return self.lease_steps - max(self.answered, 1)


class Worker:
    """Slots, blocks and in-flight plans of one worker process."""

    def __init__(self, worker_id: str, spec: WorkerSpec) -> None:
        self.id = worker_id
        self.spec = spec
        self.kv = KVManager(spec)
        self.cost = StepCost()
        self.running: dict[SlotIndex, Sequence] = {}
        # Of those, the ones with more than one token to go.
        self.prefills: dict[SlotIndex, Sequence] = {}
        # Those that are flex.
        self.flex: dict[SlotIndex, Sequence] = {}
        # And those that are certain to finish with the steps in flight.
        self.finishing: dict[SlotIndex, Sequence] = {}
        # Certain to finish, and their slot is already free.
        self.retiring: dict[SequenceId, Sequence] = {}
        self.flights: deque[Flight] = deque()
        self.leaves: list[SlotIndex] = []
        self.is_draining = False
        # A step is overdue; it takes none of what waits.
        self.is_late = False
        self.plan_id = 0
        self.checksum = 0
        # Answered since somebody joined last.
        self.steps_since_join = 0
        # Steps that flex sequences may sit out, in parts of `SPARE_EVERY`.
        self.spares = SPARES_MAX * SPARE_EVERY
        # When the step under way began, and when it ends, as far as steps so far tell; so long
        # before that the next plan is made.
        self.step_began_ns = self.step_end_ns = 0
        self.hold_us = HOLD_US
        # A heap.
        self.slots_free = list(range(spec.slots_max))
        # Of those who run, for the next plan to remember.
        self._residents: dict[SlotIndex, Residency] = {}
        # Layer groups and indices of the blocks that have given way to others of equal content.
        self._replaced: list[tuple[Residency, int, int]] = []

    def __repr__(self) -> str:
        flights = len(self.flights)
        return f"<Worker {self.id} {len(self.running)} running, {flights} in flight, {self.kv}>"

    # Questions

    @property
    def is_open(self) -> bool:
        """Somebody might join, if nobody gives way."""
        return bool(self.slots_free) and not self.is_draining and not self.is_late

    @property
    def first_steps_unanswered(self) -> int:
        """Plans of which nothing has come back yet."""
        return [flight.answered for flight in self.flights].count(0)

    @property
    def is_lease_low(self) -> bool:
        """Of its newest plan the worker has half or less to run by itself, or a step, or none. Not
        yet half where steps are known to be so long that the next plan comes in time all the same.
        """
        if not self.flights:
            return True
        newest = self.flights[-1]
        left, half = newest.lease_steps - newest.answered, newest.lease_steps // 2
        step_us = self.cost.decode_us(len(self.running))
        return left <= max(1, min(half, -(-PLAN_US // step_us)) if step_us else half)

    @property
    def optional_steps(self) -> int:
        """Steps in flight that may or may not happen."""
        return sum(flight.optional_steps for flight in self.flights)

    def tokens_ahead(self, lease_steps: int) -> int:
        """With a plan of so many steps: tokens of a sequence that may come beyond `num_tokens`."""
        optional, certain = self.optional_steps + lease_steps - 1, self.first_steps_unanswered + 1
        most = self.spec.slot_tokens_max
        return optional * most + certain * (most - 1)

    @property
    def tokens_to_end(self) -> int:
        """Beyond those that are certain, until the first sequence has all that it may have."""
        running = self.running.values()
        return min([s.tokens_max - len(s.tokens) - s.num_tokens_ahead for s in running], default=0)

    def lease_steps_max(self, plans_in_flight_max: int) -> int:
        """Of the next plan, so that no plan has to ask for more ahead than the blocks are for."""
        most = self.spec.slot_tokens_max
        certain = (plans_in_flight_max + 1) * (most - 1)
        return max(1, (self.kv.ahead_max - certain) // most - self.optional_steps + 1)

    @property
    def members(self) -> list[Sequence]:
        """Every sequence that the worker's death would interrupt."""
        return [*self.retiring.values(), *self.running.values()]

    def sequences_of(self, plan_id: int) -> dict[SlotIndex, SequenceId]:
        """Who had which slot in a plan in flight, of those that are still there."""
        for flight in self.flights:
            if flight.plan_id == plan_id:
                members = flight.members.items()
                return {s: r.sequence.sequence_id for s, r in members if s not in flight.gone}
        return {}

    def can_do(self, sequence: Sequence) -> bool:
        """Whether it has every feature that the request needs."""
        return sequence.live.request.needs <= self.spec.features

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether it can do it, and the sequence fits pool and context at its longest."""
        return sequence.kv.places_max <= self.kv.places_max and self.can_do(sequence)

    # Commands. `CellState` calls those that take a slot or give it up.

    def admit(self, sequence: Sequence, num_computed_tokens: int) -> SlotIndex:
        """Give the lowest free slot to a sequence whose blocks are allocated."""
        slot = heapq.heappop(self.slots_free)
        sequence.residency = Residency(sequence=sequence, worker_id=self.id, slot=slot)
        self._residents[slot] = sequence.residency
        gap = len(sequence.tokens) - num_computed_tokens
        sequence.num_uncomputed_tokens = sequence.gap = gap
        sequence.num_tokens_ahead = sequence.milestone = 0
        self.running[slot] = sequence
        self.steps_since_join = 0
        if gap > 1:
            self.prefills[slot] = sequence
        if sequence.is_flex:
            self.flex[slot] = sequence
        self.checksum += slot_checksum(slot, sequence.sequence_id)
        return slot

    def change(self, spec: WorkerSpec) -> None:
        """Budgets and features alone may, with plans in flight; with windows no step grows."""
        step, mixed, features = spec.step_tokens_max, spec.mixed_tokens_max, spec.features
        same = replace(self.spec, step_tokens_max=step, mixed_tokens_max=mixed, features=features)
        assert spec == same, f"{spec} is another worker than {self.spec}"
        most = self.kv.step_tokens_max
        step, mixed = min(step, most), mixed and min(mixed, most)
        self.spec = replace(spec, step_tokens_max=step, mixed_tokens_max=mixed)

    def vacate(self, sequence: Sequence) -> None:
        """Take the slot back; the worker is told with the next plan."""
        assert sequence.residency is not None
        slot = sequence.residency.slot
        del self.running[slot]
        del self._residents[slot]
        for some in (self.prefills, self.flex, self.finishing):
            some.pop(slot, None)
        heapq.heappush(self.slots_free, slot)
        self.leaves.append(slot)
        self.checksum -= slot_checksum(slot, sequence.sequence_id)

    def release(self, sequence: Sequence) -> None:
        """It has no slot any more: nothing of it is left here."""
        residency, sequence.residency = sequence.residency, None
        assert residency is not None
        for flight in self.flights:
            if flight.members.get(residency.slot) is residency:
                flight.gone.add(residency.slot)
        self.retiring.pop(sequence.sequence_id, None)
        self.kv.release(sequence.kv)

    def reclaim(self) -> bool:
        """Take the blocks of those that are retiring, and what only steps in flight attend to;
        whether any is free now that was not.

        Unasked, they live to be committed, and can be found as a prefix.
        """
        free_count = self.kv.free_count
        for sequence in self.retiring.values():
            self.kv.release(sequence.kv)
        for sequence in self.running.values() if self.kv.has_windows else ():
            self.kv.trim(sequence.kv, sequence.num_scheduled_tokens)
        return self.kv.free_count > free_count

    def commit(self, sequence: Sequence) -> None:
        """Cache what is certain; the worker is told with the next plan of the blocks replaced."""
        for group, index in self.kv.commit(sequence.kv, sequence.num_computed_tokens):
            assert sequence.residency is not None
            self._replaced.append((sequence.residency, group, index))
        sequence.pass_milestone()

    def take_replacements(self) -> tuple[Replacement, ...]:
        """For the next plan, of those that will still be there."""
        replaced, self._replaced = self._replaced, []
        return tuple(
            (one.slot, index, block, group)
            for one, group, index in replaced
            if self._residents.get(one.slot) is one
            and (block := one.sequence.kv.blocks[group][index]) != NO_BLOCK
        )

    def schedule(self, chunks: dict[SlotIndex, int], lease_steps: int) -> None:
        """A plan is on its way: the next token, or chunk of a prompt, of everybody it is for is
        certain to come. A chunk of 0 tokens: who decodes sits its first step out.
        """
        waiting = {slot for slot, count in chunks.items() if not count}
        for slot, sequence in list(self.prefills.items()):
            count, gap = chunks.get(slot, 0), sequence.gap
            if count < gap:
                waiting.add(slot)
                sequence.gap -= count
            else:
                # The last one is counted below, with the token that it samples.
                sequence.gap -= count - 1
            if gap - count <= 1:
                del self.prefills[slot]
        sampling = self.running.keys() - waiting
        for slot in sampling:
            self.running[slot].num_tokens_ahead += 1
        self.plan_id, tokens_to_end = self.plan_id + 1, self.tokens_to_end
        self.flights.append(
            Flight(
                plan_id=self.plan_id,
                lease_steps=lease_steps,
                members=self._residents.copy(),
                chunks={slot: count for slot, count in chunks.items() if count},
                sampling=sampling,
                may_end=tokens_to_end <= self.tokens_ahead(lease_steps),
            )
        )
        if tokens_to_end <= 0:
            self.note_finishing()

    def end_step(self, step_us: int, now_ns: int) -> None:
        """It was answered. What the worker was idle before it, a plan came too late."""
        idle_us = (now_ns - self.step_began_ns) // 1000 - step_us
        self.hold_us += min(max(0, idle_us), step_us) >> HOLD_GROWS_BITS
        self.hold_us -= self.hold_us - HOLD_US >> HOLD_SHRINKS_BITS
        self.begin_step(now_ns)

    def begin_step(self, now_ns: int) -> None:
        """The worker begins with the next of its steps, if it has one."""
        self.step_began_ns = now_ns
        due = [flight for flight in self.flights if not flight.answered] or [*self.flights]
        if due:
            decodes, prompt_tokens = due[0].next_step
            step_us = self.cost.decode_us(decodes) + self.cost.prefill_us(prompt_tokens)
            self.step_end_ns = now_ns + 1000 * step_us

    def note_finishing(self) -> None:
        """More tokens are certain, or have come: of some it may be the last."""
        for slot, sequence in self.running.items() if self.flights[-1].may_end else ():
            if len(sequence.tokens) + sequence.num_tokens_ahead >= sequence.tokens_max:
                self.finishing[slot] = sequence

    def advance(self, flight: Flight, ended: set[SlotIndex], *, is_last: bool) -> None:
        """A step was answered: older plans are over, and those that ended answer no more."""
        while self.flights[0] is not flight:
            self.flights.popleft()
        flight.answered += 1
        for slot in ended:
            member = flight.members[slot]
            for other in self.flights:
                if other.members.get(slot) is member:
                    other.sampling.discard(slot)
        self.steps_since_join += 1
        self.spares = min(self.spares + bool(self.flex), SPARES_MAX * SPARE_EVERY)
        if is_last or flight.answered == flight.lease_steps:
            self.flights.popleft()

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        self.kv.check([sequence.kv for sequence in self.members])
        running = self.running.items()
        assert len(self.running) + len(self.slots_free) == self.spec.slots_max
        assert self.checksum == sum(slot_checksum(slot, s.sequence_id) for slot, s in running)
        assert self.prefills == {slot: s for slot, s in running if s.gap > 1}
        assert self.flex == {slot: s for slot, s in running if s.is_flex}
        assert self.finishing == {slot: s for slot, s in running if s.num_tokens >= s.tokens_max}
        for slot, sequence in running:
            assert sequence.residency is not None
            assert sequence.residency.slot == slot
            assert self._residents[slot] is sequence.residency
            scheduled = sequence.num_scheduled_tokens
            assert 0 <= sequence.num_computed_tokens <= scheduled < sequence.num_tokens
            assert sequence.num_tokens_ahead >= 0
            assert min(scheduled, sequence.kv.places_max) <= sequence.kv.capacity
        for sequence in self.members:
            assert sequence.residency is not None
            assert sequence.residency.worker_id == self.id
