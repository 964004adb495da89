"""What a run's journal says of its batches: who computed in how many of the seats, and how much of
the KV memory taken held tokens. Pure; fed with records in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kaiten.v1.ledger_pb2 import JournalRecord, PlanInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Means over the steps that brought tokens."""

    steps: int
    occupancy: float
    # Of the memory taken by blocks, and of the memory a reservation of the longest request per
    # seat would take: the part that holds no token.
    kv_waste_paged: float
    kv_waste_reserved: float
    preemptions: int
    # Output lengths in the order of acceptance.
    lengths: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Tally:
    """`prompt_tokens` is every request's; `reserve_tokens` what a seat would reserve."""

    slots: int
    block_tokens: int
    block_count: int
    prompt_tokens: int
    reserve_tokens: int
    _live: dict[int, int] = field(default_factory=dict)  # sequence id -> tokens known
    _blocks_used: int = 0
    _steps: int = 0
    _rows: int = 0
    _held: int = 0
    _paged: int = 0
    _reserved: int = 0
    _preemptions: int = 0
    _lengths: dict[int, int] = field(default_factory=dict)

    def add(self, records: Iterable[JournalRecord]) -> None:
        for record in records:
            for told in record.inputs:
                if told.HasField("plan"):
                    self._plan(told.plan)
            if record.sequence_ids:
                self._step(record)
            for ended in record.finished:
                self._live.pop(ended.sequence_id, None)
                self._lengths[ended.sequence_id] = ended.output_tokens

    def _plan(self, plan: PlanInput) -> None:
        self._blocks_used = self.block_count - plan.blocks_free
        for sequence_id in plan.admitted:
            self._live.setdefault(sequence_id, self.prompt_tokens)
        for sequence_id in plan.preempted:
            self._live.pop(sequence_id, None)
            self._preemptions += 1

    def _step(self, record: JournalRecord) -> None:
        for sequence_id, position in zip(record.sequence_ids, record.positions, strict=True):
            if sequence_id in self._live:
                self._live[sequence_id] = self.prompt_tokens + position + 1
        self._steps += 1
        self._rows += len(set(record.sequence_ids))
        self._held += sum(self._live.values())
        self._paged += self._blocks_used * self.block_tokens
        self._reserved += len(self._live) * self.reserve_tokens

    def result(self) -> Batches:
        return Batches(
            steps=self._steps,
            occupancy=_share(self._rows, self._steps * self.slots),
            kv_waste_paged=1 - min(_share(self._held, self._paged), 1.0),
            kv_waste_reserved=1 - min(_share(self._held, self._reserved), 1.0),
            preemptions=self._preemptions,
            lengths=tuple(self._lengths[sequence_id] for sequence_id in sorted(self._lengths)),
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
