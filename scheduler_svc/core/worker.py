"""One worker as the scheduler sees it: its seats, its blocks, and the plans it has not answered in
full.

The scheduler owns all of this; the worker holds a mirror that the plan's checksum proves right. A
worker applies plans strictly in order, each between two steps. So a block or slot given up here may
be given to another sequence in the very next plan: whatever the plans in flight still write there
is written before (docs/adr/0002).
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.blocks import BlockPool, blocks_for
from scheduler_svc.core.sequence import Sequence, Stay
from scheduler_svc.core.types import (
    BlockId,
    Reason,
    ResultRejected,
    Serial,
    SlotIndex,
    StepResult,
    WorkerSpec,
)

CHECKSUM_MASK = (1 << 64) - 1


def seat_checksum(slot: SlotIndex, serial: Serial) -> int:
    """One member's part of the membership checksum, as worker_service.proto defines it."""
    return (serial + 1) * (2 * slot + 1)


@dataclass(eq=False, slots=True, kw_only=True)
class Flight:
    """A plan that was sent and may still produce results."""

    plan_id: int
    lease_steps: int
    # By slot, as of this plan.
    members: list[Stay | None]
    chunks: dict[SlotIndex, int]
    # Slots that the next result of this plan must answer for: no more, no fewer.
    sampling: set[SlotIndex]
    answered: int = 0

    @property
    def optional_steps(self) -> int:
        """Steps that happen only if no newer plan comes first."""
        return self.lease_steps - max(self.answered, 1)


class Worker:
    """Seats, blocks and flights of one worker process."""

    def __init__(
        self, worker_id: str, spec: WorkerSpec, on_leave: Callable[[Sequence], None]
    ) -> None:
        self.id = worker_id
        self.spec = spec
        # Told of every sequence whose seat has become free.
        self._on_leave = on_leave
        # What prefix hashes are made for.
        self.layout = (spec.fingerprint, spec.block_size)
        self.pool = BlockPool(block_count=spec.block_count, block_size=spec.block_size)
        self.running: dict[SlotIndex, Sequence] = {}
        # Certain to finish with the steps in flight; their seat is already free.
        self.departed: dict[Serial, Sequence] = {}
        self.flights: deque[Flight] = deque()
        self.leaves: list[SlotIndex] = []
        # Blocks that the rows may still come to need, each at its longest.
        self.blocks_owed = 0
        self.is_draining = False
        self.plan_id = 0
        self.checksum = 0
        self._slots_free = list(range(spec.slots_max))
        self._seated: dict[SlotIndex, Serial] = {}

    def __repr__(self) -> str:
        flights = len(self.flights)
        return f"<Worker {self.id} {len(self.running)} running, {flights} in flight, {self.pool}>"

    @property
    def slots_free(self) -> int:
        """Seats a new sequence could take."""
        return len(self._slots_free)

    @property
    def first_steps_unanswered(self) -> int:
        """Plans of which nothing has come back yet."""
        return sum(flight.answered == 0 for flight in self.flights)

    @property
    def lease_left(self) -> int:
        """Steps the worker can still run by itself under its newest plan."""
        return self.flights[-1].lease_steps - self.flights[-1].answered if self.flights else 0

    @property
    def optional_steps(self) -> int:
        """Steps in flight that may or may not happen."""
        return sum(flight.optional_steps for flight in self.flights)

    @property
    def members(self) -> list[Sequence]:
        """Every sequence that the worker's death would interrupt."""
        return [*self.departed.values(), *self.running.values()]

    def blocks_for(self, tokens: int) -> int:
        """Blocks of this worker's size."""
        return blocks_for(tokens, self.spec.block_size)

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence fits pool and context at its longest."""
        return sequence.places_max <= self.spec.places_max

    def seat(self, sequence: Sequence, blocks: list[BlockId], tokens_done: int) -> SlotIndex:
        """Give a sequence the lowest free slot and the blocks, already held for it."""
        slot = heapq.heappop(self._slots_free)
        sequence.stay = Stay(sequence=sequence, worker=self, slot=slot)
        sequence.blocks = blocks
        sequence.done = sequence.planned = tokens_done
        sequence.known = len(sequence.tokens)
        self.running[slot] = sequence
        self.blocks_owed += self._owed(sequence)
        self._seated[slot] = sequence.serial
        self.checksum += seat_checksum(slot, sequence.serial)
        return slot

    def depart(self, sequence: Sequence) -> None:
        """Free the seat of a sequence whose last token is certain to come with steps in flight.

        Its blocks are anybody's for the asking (`reclaim`). Unasked, they live to be committed, and
        can be found as a prefix.
        """
        self._vacate(sequence)
        self.departed[sequence.serial] = sequence

    def reclaim(self) -> list[tuple[Sequence, list[BlockId]]]:
        """Take back the blocks of all that departed; who had which, nobody if there were none."""
        holding = [(s, s.blocks) for s in self.departed.values() if s.blocks]
        for sequence, _ in holding:
            self._free_blocks(sequence)
        return holding

    def restore(self, holding: list[tuple[Sequence, list[BlockId]]]) -> None:
        """As before a reclaim that nothing has followed."""
        for sequence, blocks in holding:
            self.pool.hold(blocks)
            sequence.blocks = blocks

    def release(self, sequence: Sequence) -> None:
        """The sequence is no longer this worker's: finished, preempted or cancelled."""
        if self.departed.pop(sequence.serial, None) is None:
            self._vacate(sequence)
        self._free_blocks(sequence)
        sequence.stay = None

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.stay is not None
        slot = sequence.stay.slot
        del self.running[slot]
        heapq.heappush(self._slots_free, slot)
        self.leaves.append(slot)
        self.checksum -= seat_checksum(slot, self._seated.pop(slot))
        self.blocks_owed -= self._owed(sequence)
        self._on_leave(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []

    def _owed(self, sequence: Sequence) -> int:
        return self.blocks_for(sequence.places_max) - len(sequence.blocks)

    def flight_of(self, result: StepResult) -> Flight:
        """The flight a result belongs to.

        ResultRejected when the result is not what the plan asked for.
        """
        flight = self._expected_flight(result)
        answered = set(result.slots)
        if len(result.slots) != len(answered) or len(result.slots) != len(result.tokens):
            raise ResultRejected(f"plan {result.plan_id}: slots repeated or without a token")
        if answered & result.errors.keys() or not result.finished.keys() <= answered:
            raise ResultRejected(
                f"plan {result.plan_id}: a slot both failed and sampled, or ended unsampled"
            )
        if not set(result.finished.values()) <= {Reason.STOP, Reason.LENGTH}:
            raise ResultRejected(f"plan {result.plan_id}: a row ends for stop or length only")
        computing = flight.sampling if flight.answered else flight.sampling | flight.chunks.keys()
        extra = result.errors.keys() - computing
        if extra or answered | (result.errors.keys() & flight.sampling) != flight.sampling:
            raise ResultRejected(
                f"plan {result.plan_id} step {result.step}: slots {sorted(answered)} answered, "
                f"{sorted(flight.sampling)} expected"
            )
        if (
            result.tokens
            and not 0 <= min(result.tokens) <= max(result.tokens) < self.spec.vocab_size
        ):
            raise ResultRejected(
                f"plan {result.plan_id}: a token is not in [0, {self.spec.vocab_size})"
            )
        return flight

    def _expected_flight(self, result: StepResult) -> Flight:
        for flight in self.flights:
            if flight.plan_id == result.plan_id and flight.answered == result.step:
                return flight
            if flight.plan_id == result.plan_id or flight.answered == 0:
                break
        raise ResultRejected(f"plan {result.plan_id} step {result.step} is out of sequence")

    def advance(self, flight: Flight, result: StepResult) -> None:
        """Book a checked result: older plans are over, and rows that ended answer no more."""
        while self.flights[0] is not flight:
            self.flights.popleft()
        flight.answered += 1
        ended = result.finished.keys() | result.errors.keys()
        for slot in ended:
            member = flight.members[slot]
            for other in self.flights:
                if other.members[slot] is member:
                    other.sampling.discard(slot)
        if result.is_last or flight.answered == flight.lease_steps:
            self.flights.popleft()

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        self.pool.check()
        assert len(self.running) + len(self._slots_free) == self.spec.slots_max
        assert self._seated == {slot: s.serial for slot, s in self.running.items()}
        assert self.checksum == sum(seat_checksum(*seat) for seat in self._seated.items())
        for slot, sequence in self.running.items():
            assert sequence.stay is not None
            assert sequence.stay.slot == slot
            assert sequence.worker is self
            assert 0 <= sequence.done <= sequence.planned < sequence.known
            assert len(sequence.tokens) <= sequence.known
            reach = min(sequence.planned, sequence.places_max)
            assert self.blocks_for(reach) <= len(sequence.blocks)
        assert self.blocks_owed == sum(self._owed(s) for s in self.running.values())
        for sequence in self.departed.values():
            assert sequence.worker is self
