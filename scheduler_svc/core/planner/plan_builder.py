"""A plan in the making: makes the moves that the stages choose, and writes them down."""

from dataclasses import dataclass

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.kv import Hits
from scheduler_svc.core.outcome import Join, PassedOver, Plan, Why
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.types import BlockId, SequenceId, SlotIndex
from scheduler_svc.core.workers import CHECKSUM_MASK, Worker

# Of one plan; behind somebody who fits another worker only there may be thousands more. Of those
# who leave its batch, all: of whom nothing is said, it was for want of blocks.
PASSED_OVER_MAX = 32
# To pass one over, in tokens that join.
LOOK_EFFORT = 16
# Sequences whose block tables are too short, and by how many blocks of each layer group.
Growth = list[tuple[Sequence, list[int]]]


@dataclass(frozen=True, slots=True)
class Admission:
    """Who joins, from which cached blocks, whether those that are retiring must give theirs, and
    which flex sequences leave for it.
    """

    sequence: Sequence
    hits: Hits
    needs_reclaim: bool
    leaving: tuple[Sequence, ...] = ()


class PlanBuilder:
    """What the stages share: the cell, the worker, and the plan so far."""

    def __init__(self, cell: CellState, worker: Worker, now_ns: int) -> None:
        self.cell = cell
        self.worker = worker
        # For want of blocks, and flex ones for the good of others.
        self.preempted: list[SequenceId] = []
        self.gave_way: list[SequenceId] = []
        self.joins: list[Join] = []
        # What it takes to make, in tokens that join.
        self.effort = 0
        # Each once, as of the last look that found it so.
        self.passed_over: dict[PassedOver, None] = {}
        self.now_ns = now_ns
        # Other workers that could start a sequence, by all of it that makes a difference to them.
        self.others: dict[object, list[Worker]] = {}
        self._appends: list[tuple[SlotIndex, BlockId, int]] = []
        self._copies: list[tuple[BlockId, BlockId]] = []

    def pass_over(self, stage: str, why: Why, sequence_id: SequenceId | None = None) -> None:
        """For readers: whom a stage passed over, and why."""
        self.effort += LOOK_EFFORT
        over = PassedOver(stage, why, sequence_id)
        self.passed_over.pop(over, None)
        if stage == "give_way" or len(self.passed_over) < PASSED_OVER_MAX:
            self.passed_over[over] = None

    # Moves

    def retire(self, sequence: Sequence) -> None:
        """The slot is free from this plan on; the last token is on its way."""
        self.cell.retire(self.worker, sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Back into the queue, for want of blocks."""
        self.cell.preempt(self.worker, sequence)
        sequence.num_preemptions += 1
        self.preempted.append(sequence.sequence_id)

    def give_way(self, sequence: Sequence, why: Why) -> None:
        """A flex sequence goes back into the queue. That is not counted as if it had been short of
        blocks.
        """
        assert sequence.residency is not None
        slot = sequence.residency.slot
        self._appends = [append for append in self._appends if append[0] != slot]
        self.cell.preempt(self.worker, sequence)
        self.gave_way.append(sequence.sequence_id)
        self.pass_over("give_way", why, sequence.sequence_id)

    def extend(self, growth: Growth) -> None:
        """Blocks for those whose tables are too short. The caller has seen that they are free."""
        for sequence, counts in growth:
            assert sequence.residency is not None
            slot = sequence.residency.slot
            for group, blocks in enumerate(self.worker.kv.extend(sequence.kv, counts)):
                for block in blocks:
                    self._appends.append((slot, block, group))

    def admit(self, admission: Admission) -> None:
        """A slot, and blocks for what its first step may write."""
        for flex in admission.leaving:
            self.give_way(flex, Why.PLACE_NEEDED)
        if admission.needs_reclaim:
            self.worker.reclaim()
        sequence, table = admission.sequence, admission.sequence.kv
        self.worker.kv.allocate(table, admission.hits, self.worker.spec.slot_tokens_max - 1)
        num_computed_tokens = admission.hits.num_tokens
        if copies := self._fork(sequence):
            self._copies += copies
            num_computed_tokens = len(sequence.tokens) - 1
        slot = self.cell.admit(self.worker, sequence, num_computed_tokens, self.now_ns)
        self.effort += len(sequence.tokens)
        self.joins.append(
            Join(
                slot=slot,
                sequence_id=sequence.sequence_id,
                tokens=tuple(sequence.tokens),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=num_computed_tokens,
                block_tables=table.parts,
                prompt_logprobs_from=sequence.live.prompt_logprobs_done,
            )
        )

    def _fork(self, sequence: Sequence) -> list[tuple[BlockId, BlockId]]:
        """Block copies that spare all of the prompt but its last token, if the first choice has
        computed it here.
        """
        first = sequence.live.sequences[0]
        can_fork = (
            sequence.num_output_tokens == 0
            and first.residency is not None
            and self.worker.running.get(first.residency.slot) is first
            and first.num_computed_tokens >= sequence.num_prompt_tokens
        )
        if not can_fork:
            return []
        return self.worker.kv.fork(first.kv, sequence.kv, sequence.num_prompt_tokens - 1)

    # The plan itself

    def seal(self, chunks: dict[SlotIndex, int], lease_steps: int) -> Plan:
        """Send it on its way."""
        worker = self.worker
        sit_out = list(chunks.values()).count(0)
        decode_rows = len(worker.running) - len(worker.prefills) - sit_out
        worker.schedule(chunks, lease_steps)
        leaves, worker.leaves = tuple(worker.leaves), []
        return Plan(
            worker_id=worker.id,
            plan_id=worker.plan_id,
            lease_steps=lease_steps,
            leaves=leaves,
            joins=tuple(self.joins),
            appends=tuple(self._appends),
            replacements=worker.take_replacements(),
            swaps=worker.kv.take_swaps(),
            copies=tuple(self._copies),
            chunks=tuple(chunks.items()),
            checksum=worker.checksum & CHECKSUM_MASK,
            preempted=(*self.preempted, *self.gave_way),
            decode_rows=decode_rows,
            blocks_free=worker.kv.free_count,
            waiting=len(self.cell.waiting),
        )
