"""The batch beside a dumb model of it: whatever plans and steps come, both see the same."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import BlockTable, FinishReason, Join
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import StepInputs, StepSamples
from tests.support.mini_scheduler import checksum, plan, sampling

LIMITS = RowLimits(
    slots=3, context_tokens=14, step_tokens=12, block_size=3, block_count=15, vocab_size=8
)
STOPS = (6, 7)


@dataclass
class Row:
    """One row, in lists."""

    sequence_id: int
    tokens: list[int]
    prompt: int
    max_tokens: int
    min_tokens: int
    stops: tuple[int, ...]
    blocks: list[int]
    done: int
    is_idle: bool = False

    @property
    def gap(self) -> int:
        return len(self.tokens) - self.done


@dataclass
class Batch:
    """The dumb model: dictionaries and loops."""

    rows: dict[int, Row] = field(default_factory=dict)

    def runnable(self) -> dict[int, int]:
        return {s: 1 for s, row in self.rows.items() if not row.is_idle and row.gap == 1}


class RowsMachine(RuleBasedStateMachine):
    """Any valid plans and steps keep the mirror equal to the model."""

    @initialize()
    def start(self) -> None:
        self.rows, self.batch = Rows(LIMITS), Batch()
        self.plan_id = self.sequence_id = 0

    @rule(data=st.data())
    def plan_and_lease(self, data: st.DataObject) -> None:
        leaves = tuple(s for s in self.batch.rows if data.draw(st.integers(0, 3)) == 0)
        for slot in leaves:
            del self.batch.rows[slot]
        joins = self._draw_joins(data)
        chunks = self._draw_chunks(data)
        lease_steps = data.draw(st.integers(1, 4))
        replacements = self._replace(data)
        appends = self._grant(dict(chunks), lease_steps)
        self.plan_id += 1
        members = [(slot, row.sequence_id) for slot, row in self.batch.rows.items()]
        counts = self.rows.apply(
            plan(
                self.plan_id,
                lease_steps=lease_steps,
                leaves=leaves,
                joins=joins,
                appends=appends,
                replacements=replacements,
                chunks=chunks,
                membership_checksum=checksum(members),
            )
        )
        # A plan may be cut short after any step.
        for step in range(data.draw(st.integers(1, lease_steps))):
            expected = self.batch.runnable() | (self._live(dict(chunks)) if step == 0 else {})
            expected = {slot: count for slot, count in expected.items() if count}
            assert {s: n for s, n in enumerate(counts.tolist()) if n} == expected
            self._step(data, expected)
            counts = self.rows.steady_counts()

    @precondition(lambda self: self.batch.rows)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.batch.rows)))
        self.rows.fail(slot)
        self.batch.rows[slot].is_idle = True

    @rule()
    def new_stream(self) -> None:
        self.rows.clear()
        self.batch, self.plan_id = Batch(), 0

    @invariant()
    def both_see_the_same(self) -> None:
        rows = self.batch.rows
        assert self.rows.members == tuple((s, rows[s].sequence_id) for s in sorted(rows))
        for slot, row in rows.items():
            assert self.rows.tokens(slot) == tuple(row.tokens)
            assert self.rows.num_computed_tokens(slot) == row.done
            assert self.rows.blocks(slot) == row.blocks
            assert self.rows.is_idle(slot) == row.is_idle

    def _draw_joins(self, data: st.DataObject) -> tuple[Join, ...]:
        joins = []
        for slot in range(LIMITS.slots):
            if slot in self.batch.rows or not data.draw(st.booleans()):
                continue
            # Five blocks of its own per slot, in an order of its own.
            own = data.draw(st.permutations(range(slot * 5, slot * 5 + 5)))
            tokens = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
            prompt = data.draw(st.integers(1, len(tokens)))
            done = data.draw(st.integers(0, len(tokens) - 1))
            row = Row(
                sequence_id=self.sequence_id,
                tokens=tokens,
                prompt=prompt,
                max_tokens=data.draw(st.integers(len(tokens) - prompt + 1, 9)),
                min_tokens=data.draw(st.integers(0, 3)),
                stops=data.draw(st.sampled_from([(), STOPS, STOPS[:1]])),
                blocks=list(own[: -(-done // LIMITS.block_size)]),
                done=done,
            )
            self.sequence_id += 1
            joins.append(_join(slot, row))
            self.batch.rows[slot] = row
        return tuple(joins)

    def _draw_chunks(self, data: st.DataObject) -> tuple[tuple[int, int], ...]:
        """Within the budget; a row that has ended may be named too."""
        budget = LIMITS.step_tokens - len(self.batch.rows)
        chunks = []
        for slot, row in self.batch.rows.items():
            count = data.draw(st.integers(0, min(row.gap, 1 + budget)))
            if count > 0:
                chunks.append((slot, count))
                budget -= 0 if row.is_idle else count - 1
            elif data.draw(st.integers(0, 3)) == 0:
                chunks.append((slot, 0))
        return tuple(chunks)

    def _live(self, chunks: dict[int, int]) -> dict[int, int]:
        return {s: count for s, count in chunks.items() if not self.batch.rows[s].is_idle}

    def _replace(self, data: st.DataObject) -> tuple[tuple[int, int, int, int], ...]:
        """Full blocks of some rows give way to others."""
        replacements = []
        for slot, row in self.batch.rows.items():
            full = row.done // LIMITS.block_size
            spare = [b for b in range(slot * 5, slot * 5 + 5) if b not in row.blocks]
            if full and spare and data.draw(st.integers(0, 3)) == 0:
                index = data.draw(st.integers(0, full - 1))
                row.blocks[index] = data.draw(st.sampled_from(spare))
                replacements.append((slot, index, row.blocks[index], 0))
        return tuple(replacements)

    def _grant(self, chunks: dict[int, int], lease_steps: int) -> tuple[tuple[int, int, int], ...]:
        """Blocks for the worst case of the lease."""
        appends = []
        for slot, row in self.batch.rows.items():
            last = min(row.prompt + row.max_tokens, LIMITS.context_tokens) - 1
            needed = min(row.done + chunks.get(slot, 1) + lease_steps - 1, last)
            spare = [b for b in range(slot * 5, slot * 5 + 5) if b not in row.blocks]
            while len(row.blocks) * LIMITS.block_size < needed:
                row.blocks.append(spare.pop())
                appends.append((slot, row.blocks[-1], 0))
        return tuple(appends)

    def _step(self, data: st.DataObject, counts: dict[int, int]) -> None:
        array = np.array([counts.get(slot, 0) for slot in range(LIMITS.slots)], np.int64)
        inputs = self.rows.step_inputs(array)
        self._check_inputs(inputs, counts)
        closing = [s for s in sorted(counts) if counts[s] == self.batch.rows[s].gap]
        assert inputs.slots[inputs.sampled_rows].tolist() == closing
        tokens = [data.draw(st.integers(0, LIMITS.vocab_size - 1)) for _ in closing]
        is_ok = [data.draw(st.integers(0, 9)) > 0 for _ in closing]
        outcome = self.rows.advance(inputs, _samples(tokens, is_ok))
        for slot, count in counts.items():
            self.batch.rows[slot].done += count
        sampled = [(s, t) for s, t, ok in zip(closing, tokens, is_ok, strict=True) if ok]
        assert list(zip(outcome.slots, outcome.token_ids, strict=True)) == sampled
        broken = [slot for slot, ok in zip(closing, is_ok, strict=True) if not ok]
        assert [slot for slot, _ in outcome.errors] == broken
        assert outcome.unsatisfiable == ()
        for slot in broken:
            self.batch.rows[slot].is_idle = True
        assert dict(outcome.finished) == self._take(sampled)

    def _take(self, sampled: list[tuple[int, int]]) -> dict[int, FinishReason]:
        finished = {}
        for slot, token in sampled:
            row = self.batch.rows[slot]
            row.tokens.append(token)
            output = len(row.tokens) - row.prompt
            if token in row.stops and output > row.min_tokens:
                finished[slot] = FinishReason.STOP
            elif output == row.max_tokens or len(row.tokens) == LIMITS.context_tokens:
                finished[slot] = FinishReason.LENGTH
            row.is_idle = slot in finished
        return finished

    def _check_inputs(self, inputs: StepInputs, counts: dict[int, int]) -> None:
        size, at = LIMITS.block_size, 0
        assert inputs.slots.tolist() == sorted(counts)
        for index, slot in enumerate(sorted(counts)):
            row, count = self.batch.rows[slot], counts[slot]
            span = range(row.done, row.done + count)
            assert inputs.query_starts[index] == at
            assert inputs.context_lengths[index] == row.done + count
            assert inputs.positions[at : at + count].tolist() == list(span)
            assert inputs.token_ids[at : at + count].tolist() == [row.tokens[p] for p in span]
            places = [row.blocks[p // size] * size + p % size for p in span]
            assert inputs.tables().slot_mapping[0, at : at + count].tolist() == places
            used = -(-(row.done + count) // size)
            assert inputs.tables().block_tables[0, index, :used].tolist() == row.blocks[:used]
            at += count
        assert inputs.query_starts[len(counts)] == at == inputs.token_count
        self._check_sampling(inputs)

    def _check_sampling(self, inputs: StepInputs) -> None:
        edits = inputs.sampling.edits()
        for index, slot in enumerate(inputs.slots[inputs.sampled_rows].tolist()):
            row = self.batch.rows[slot]
            output = len(row.tokens) - row.prompt
            assert inputs.sampling.position[index] == output
            assert inputs.sampling.seed[index] == -row.sequence_id
            is_masked = bool(row.stops) and output < row.min_tokens
            forbidden = () if edits is None else edits.forbidden_ids[edits.forbidden_rows == index]
            assert tuple(forbidden) == (row.stops if is_masked else ())


def _join(slot: int, row: Row) -> Join:
    return Join(
        slot=slot,
        sequence_id=row.sequence_id,
        token_ids=tuple(row.tokens),
        prompt_tokens=row.prompt,
        num_computed_tokens=row.done,
        block_tables=(BlockTable(tuple(row.blocks)),),
        sampling=sampling(
            max_tokens=row.max_tokens,
            min_tokens=row.min_tokens,
            stop_token_ids=row.stops,
            # The upper half of the range arrives as negative numbers.
            seed=-row.sequence_id % (1 << 64),
        ),
    )


def _samples(tokens: list[int], is_ok: list[bool]) -> StepSamples:
    return StepSamples(
        token_ids=np.array(tokens, np.int64),
        is_ok=np.array(is_ok, np.bool_),
        forward_us=0,
        sample_us=0,
        logprob_rows=np.zeros(0, np.int64),
        logprob=np.zeros(0, np.float32),
        top_token_ids=np.zeros((0, 0), np.int64),
        top_logprobs=np.zeros((0, 0), np.float32),
    )


TestRows = RowsMachine.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_more_stop_tokens_than_any_row_before() -> None:
    rows = Rows(LIMITS)
    many = tuple(range(LIMITS.vocab_size - 1))
    row = Row(0, [7], 1, 5, 0, many, [0], 0)
    rows.apply(plan(1, joins=(_join(0, row),), membership_checksum=1))
    inputs = rows.step_inputs(rows.steady_counts())
    outcome = rows.advance(inputs, _samples([6], [True]))
    assert outcome.finished == ((0, FinishReason.STOP),)


def test_a_late_result_leaves_no_trace_in_the_row_that_came_after() -> None:
    """The step was on its way when its row left and another took the slot."""
    rows = Rows(LIMITS)
    first = Row(1, [1, 2], 2, 9, 0, (6,), [0], 1)
    rows.apply(plan(1, joins=(_join(0, first),), membership_checksum=checksum([(0, 1)])))
    inputs = rows.step_inputs(rows.steady_counts())
    rows.expect(inputs)
    second = Row(2, [3, 4, 5, 1], 4, 9, 0, (), [1, 2], 3)
    rows.apply(
        plan(2, leaves=(0,), joins=(_join(0, second),), membership_checksum=checksum([(0, 2)]))
    )
    outcome = rows.settle(inputs, _samples([6], [True]))
    assert outcome.finished == ((0, FinishReason.STOP),)
    assert rows.tokens(0) == (3, 4, 5, 1)
    assert not rows.is_idle(0)
    assert rows.num_computed_tokens(0) == 3


def test_a_row_that_stopped_forgets_the_steps_expected_since() -> None:
    rows = Rows(LIMITS)
    row = Row(1, [1, 2], 2, 9, 0, (6,), [0, 1], 1)
    rows.apply(
        plan(1, joins=(_join(0, row),), lease_steps=3, membership_checksum=checksum([(0, 1)]))
    )
    first = rows.step_inputs(rows.steady_counts())
    rows.expect(first)
    second = rows.step_inputs(rows.steady_counts())
    rows.expect(second)
    assert rows.settle(first, _samples([6], [True])).token_ids == (6,)
    absent = dataclasses.replace(_samples([0], [False]), is_there=np.array([False]))
    outcome = rows.settle(second, absent)
    assert (outcome.slots, outcome.finished, outcome.errors) == ((), (), ())
    assert rows.tokens(0) == (1, 2, 6)
    assert rows.num_computed_tokens(0) == 2
    assert rows.is_idle(0)
