"""The mirror of the batch: persistent columns per slot, changed by plans and steps only.

`apply` tries the whole plan on a copy before anything changes, so a refused plan leaves no
trace. Between two steps, for every member that is not idle:

    0 <= num_computed_tokens < num_tokens < limit <= context
    blocks[group, slot, :held] are its blocks in each layer group; in them the keys and values of
        [0, num_computed_tokens), but for those that a sliding window has left, which may be
        another's by now
"""

from collections.abc import Callable, Collection
from functools import partial

import numpy as np

from gpu_worker.batch.broken_rows import Broken, Restraints, why_broken
from gpu_worker.batch.drafts import PromptLookup, after_each, is_reached
from gpu_worker.batch.plan_validation import Columns, RowLimits, require, validate_plan
from gpu_worker.batch.plans import FinishReason, Join, Plan, RowLogprobs, StepOutcome
from gpu_worker.batch.prompt_logprobs import (
    PromptLogprobsRequest,
    prompt_logprob_tokens,
    row_prompt_logprobs,
)
from gpu_worker.batch.row_rules import RowRules, edits_of, has_rules, rule_changes
from gpu_worker.batch.step_types import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    BoolArray,
    Grammars,
    IndexArray,
    IntArray,
    LogitEdits,
    RowChanges,
    RowEnds,
    SamplingColumns,
    StepInputs,
    StepSamples,
    StepTables,
    TokenMasks,
)
from kernels.rows.edit_rows import ALLOWED

_NO_STOP = -1
# Below this the division by it would overflow long before the noise could decide anything.
_TEMPERATURE_MIN = 1e-5


class Rows:
    def __init__(self, limits: RowLimits, grammars: Grammars | None = None) -> None:
        """`grammars` None: no row has one."""
        assert limits.reads_grammars == (grammars is not None)
        self.limits = limits
        self._grammars = grammars
        slots = limits.slots
        # Zeroed pages cost nothing until a long sequence touches them.
        self._tokens = np.zeros((slots, limits.context_tokens), np.int32)
        self._blocks = np.zeros((limits.groups, slots, limits.table_width), np.int32)
        self._prompt = np.zeros(slots, np.int64)
        self._masked_until = np.zeros(slots, np.int64)
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._seed = np.zeros(slots, np.int64)
        self._choice = np.zeros(slots, np.int64)
        self._logprobs = np.full(slots, -1, np.int64)
        self._has_grammar = np.zeros(slots, np.bool_)
        # The plan with which the row joined: tells it from a later one in the same slot.
        self._joined = np.zeros(slots, np.int64)
        # As wide as the longest list seen, padded.
        self._stops = np.full((slots, 4), _NO_STOP, np.int64)
        self.clear()

    def clear(self) -> None:
        """Start of a stream: no members, and the next plan is number 1."""
        self._columns = Columns.empty(self.limits.slots, self.limits.groups)
        self._plan_id = 0
        self._lookup = PromptLookup(self.limits.slots, self.limits.slot_tokens - 1)
        self._can_draft = False
        # Of the few rows that have any, by slot.
        self._rules: dict[int, RowRules] = {}
        self._prompt_logprobs: dict[int, PromptLogprobsRequest] = {}
        # Of rows that left while a step of theirs may be on its way, until one settles.
        self._left: dict[int, Restraints] = {}

    def __repr__(self) -> str:
        columns = self._columns
        return (
            f"<Rows plan={self._plan_id} members={int(columns.is_member.sum())} "
            f"idle={int(columns.is_idle.sum())} "
            f"tokens={int(columns.num_tokens[columns.is_member].sum())}>"
        )

    @property
    def plan_id(self) -> int:
        """The last plan applied; 0 before the first."""
        return self._plan_id

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """(slot, sequence id) of every member, by slot."""
        slots = np.flatnonzero(self._columns.is_member)
        return tuple(zip(slots.tolist(), self._columns.sequence_id[slots].tolist(), strict=True))

    def tokens(self, slot: int) -> tuple[int, ...]:
        """All tokens known of a row."""
        return tuple(self._tokens[slot, : self._columns.num_tokens[slot]].tolist())

    def num_computed_tokens(self, slot: int) -> int:
        return int(self._columns.num_computed_tokens[slot])

    def blocks(self, slot: int, group: int = 0) -> list[int]:
        """The blocks of a row in a layer group, in order."""
        return list(self._blocks[group, slot, : self._columns.held[group, slot]].tolist())

    def is_idle(self, slot: int) -> bool:
        return bool(self._columns.is_idle[slot])

    # ---- plans -----------------------------------------------------------------------------------

    def apply(self, plan: Plan) -> IntArray:
        """Take the plan and return how many tokens each slot computes in its first step.

        Raises InvalidPlan saying what is wrong, with nothing changed.
        """
        expected = self._plan_id + 1
        require(
            plan.plan_id == expected,
            f"plan {plan.plan_id} is out of order: expected plan {expected}",
        )
        valid = validate_plan(plan, self._columns, self.limits, self.blocks)
        # Nothing below can fail.
        for slot in plan.leaves:
            self._forget(slot)
        for join in plan.joins:
            self._write_join(join)
            self._joined[join.slot] = plan.plan_id
        for slot, index, block, group in plan.replacements:
            self._blocks[group, slot, index] = block
        for (slot, group), blocks in _appended(plan).items():
            end = int(valid.columns.held[group, slot])
            self._blocks[group, slot, end - len(blocks) : end] = blocks
        self._columns = valid.columns
        self._plan_id = plan.plan_id
        self._can_draft = plan.slot_tokens_most == self.limits.slot_tokens > 1
        return valid.counts

    def _forget(self, slot: int) -> None:
        self._left[slot] = self._restraints(slot)
        self._rules.pop(slot, None)
        self._prompt_logprobs.pop(slot, None)
        if self._has_grammar[slot] and self._grammars is not None:
            self._grammars.leave(slot)
        self._has_grammar[slot] = False

    def _write_join(self, join: Join) -> None:
        slot, sampling = join.slot, join.sampling
        self._lookup.join(slot)
        self._tokens[slot, : len(join.token_ids)] = join.token_ids
        for blocks, table in zip(self._blocks, join.block_tables, strict=True):
            blocks[slot, table.num_skipped_blocks : len(table)] = table.blocks
        self._prompt[slot] = join.prompt_tokens
        self._masked_until[slot] = join.prompt_tokens + sampling.min_tokens
        is_greedy = sampling.temperature < _TEMPERATURE_MIN
        self._temperature[slot] = 0.0 if is_greedy else sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = np.uint64(sampling.seed).astype(np.int64)
        self._choice[slot] = sampling.choice
        self._logprobs[slot] = sampling.logprobs
        self._write_stops(slot, sampling.stop_token_ids)
        if has_rules(sampling):
            self._rules[slot] = RowRules(
                sampling, join.token_ids, join.prompt_tokens, self.limits.vocab_size
            )
        self._has_grammar[slot] = bool(sampling.grammar)
        if sampling.grammar and self._grammars is not None:
            self._grammars.join(slot, sampling, join.token_ids[join.prompt_tokens :])
        if sampling.prompt_logprobs is not None and join.prompt_logprobs_from < join.prompt_tokens:
            self._prompt_logprobs[slot] = PromptLogprobsRequest(
                prompt=np.array(join.token_ids[: join.prompt_tokens], np.int64),
                prompt_logprobs_from=join.prompt_logprobs_from,
                top=sampling.prompt_logprobs,
            )

    def _write_stops(self, slot: int, stop_token_ids: tuple[int, ...]) -> None:
        missing = len(stop_token_ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=_NO_STOP)
        self._stops[slot] = _NO_STOP
        self._stops[slot, : len(stop_token_ids)] = stop_token_ids

    def changes(self, plan: Plan) -> RowChanges:
        """What the plan just applied has changed, for a device that holds the rows itself."""
        columns = self._columns
        joined = np.array([join.slot for join in plan.joins], np.int64)
        left = np.setdiff1d(np.array(plan.leaves, np.int64), joined)
        ints = np.zeros((len(INT_COLUMNS), len(joined) + len(left)), np.int64)
        known = columns.num_tokens[joined]
        ints[:, : len(joined)] = (
            columns.is_member[joined], known, columns.num_computed_tokens[joined],
            columns.limit[joined],
            self._prompt[joined], self._masked_until[joined], self._tokens[joined, known - 1],
            self._top_k[joined], self._seed[joined], self._choice[joined], self._logprobs[joined],
            [self._kinds(slot) for slot in joined.tolist()],
        )  # fmt: skip
        slots = np.concatenate([joined, left])
        floats = np.zeros((len(FLOAT_COLUMNS), len(slots)), np.float32)
        floats[:3] = self._temperature[slots], self._top_p[slots], self._min_p[slots]
        rules = {slot: self._rules[slot] for slot in joined.tolist() if slot in self._rules}
        for column, slot in enumerate(joined.tolist()):
            if slot in rules:
                own = rules[slot]
                floats[3:, column] = own.repetition, own.presence, own.frequency
        places, blocks = self._new_blocks(plan)
        return RowChanges(
            slots=slots,
            ints=ints,
            floats=floats,
            stops=self._stops[slots].astype(np.int32),
            places=places,
            blocks=blocks,
            rules=rule_changes(rules, self.tokens, self.limits.vocab_size) if rules else None,
        )

    def _kinds(self, slot: int) -> int:
        rules = self._rules[slot].kinds if slot in self._rules else 0
        return rules | ALLOWED if self._has_grammar[slot] else rules

    def _new_blocks(self, plan: Plan) -> tuple[IntArray, IndexArray]:
        """Where in the block tables the plan wrote, and what."""
        held, (groups, slots, width) = self._columns.held, self._blocks.shape
        first = {(join.slot, group): 0 for join in plan.joins for group in range(groups)}
        for (slot, group), blocks in _appended(plan).items():
            first.setdefault((slot, group), int(held[group, slot]) - len(blocks))
        spans = [
            (group * slots + slot, start, int(held[group, slot]))
            for (slot, group), start in first.items()
        ]
        spans += [
            (group * slots + slot, index, index + 1) for slot, index, _, group in plan.replacements
        ]
        tables = self._blocks.reshape(-1, width)
        places = [np.arange(row * width + start, row * width + end) for row, start, end in spans]
        written = [tables[row, start:end] for row, start, end in spans]
        return (
            np.concatenate([np.zeros(0, np.int64), *places]),
            np.concatenate([np.zeros(0, np.int32), *written]),
        )

    # ---- steps -----------------------------------------------------------------------------------

    def steady_counts(self) -> IntArray:
        """Tokens per slot in a step after the first of a lease."""
        return self._columns.steady_counts()

    def draft(self, counts: IntArray, chunked: Collection[int] = ()) -> IntArray | None:
        """How many tokens are drafted of each slot for a step of `counts`, of which those chunked
        are a prompt's; None: of nobody. They lie behind those that are known.

        A row that changes its own logits is left alone: how depends on what was sampled before.
        """
        if not self._can_draft:
            return None
        left_out = {*chunked, *self._rules, *self._prompt_logprobs}
        slots = np.flatnonzero((counts == 1) & ~self._has_grammar).tolist()
        slots = [slot for slot in slots if slot not in left_out]
        drafts = self._lookup.draft(slots, self._columns, self._tokens, counts)
        return drafts if drafts.any() else None

    def step_inputs(self, counts: IntArray, drafts: IntArray | None = None) -> StepInputs:
        """The ragged inputs of a step that computes counts[slot] tokens of each slot, and behind
        them those of `draft`."""
        columns = self._columns
        slots = np.flatnonzero(counts)
        done = columns.num_computed_tokens[slots]
        closing = np.flatnonzero(done + counts[slots] == columns.num_tokens[slots])
        drafted = None if drafts is None else drafts[slots]
        per_row = counts[slots] if drafted is None else counts[slots] + drafted
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(per_row, out=starts[1:])
        slot_of_token = np.repeat(slots, per_row)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - done, per_row)
        context = done + per_row
        sampled_rows, sampled_tokens = closing, starts[1:][closing] - 1
        known = columns.num_tokens[slots[closing]]
        if drafted is not None:
            sampled_rows, sampled_tokens, known = after_each(
                closing, sampled_tokens, known, drafted[closing]
            )
        requests = [
            (row, self._prompt_logprobs[slot])
            for row, slot in enumerate(slots.tolist() if self._prompt_logprobs else ())
            if slot in self._prompt_logprobs
        ]
        return StepInputs(
            slots=slots,
            sequence_ids=columns.sequence_id[slots],
            counts=per_row,
            query_starts=starts.astype(np.int32),
            context_lengths=context.astype(np.int32),
            token_ids=self._tokens[slot_of_token, positions].astype(np.int64),
            positions=positions,
            tables=partial(self._tables, slots, context, slot_of_token, positions),
            sampled_rows=sampled_rows,
            sampled_tokens=sampled_tokens,
            sampling=self._sampling(slots[sampled_rows], known),
            ends=self._ends(slots[sampled_rows], known),
            prompt_logprobs=prompt_logprob_tokens(requests, done, per_row, starts),
            drafts=drafted,
        )

    def _tables(
        self, slots: IntArray, context: IntArray, slot_of_token: IntArray, positions: IntArray
    ) -> StepTables:
        block_size = self.limits.block_size
        blocks = self._blocks[:, slot_of_token, positions // block_size]
        # Dense group by group, which the result of an index need not be.
        blocks = blocks.astype(np.int64, order="C")
        width = -(-int(context.max(initial=1)) // block_size)
        return StepTables(
            block_tables=np.ascontiguousarray(self._blocks[:, slots, :width]),
            slot_mapping=blocks * block_size + positions % block_size,
        )

    def _ends(self, slots: IntArray, known: IntArray) -> RowEnds:
        return RowEnds(
            joined=self._joined[slots],
            num_tokens=known,
            limit=self._columns.limit[slots],
            masked_until=self._masked_until[slots],
            stops=self._stops[slots],
        )

    def _sampling(self, slots: IntArray, known: IntArray) -> SamplingColumns:
        return SamplingColumns(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seed=self._seed[slots],
            choice=self._choice[slots],
            position=known - self._prompt[slots],
            logprobs=self._logprobs[slots],
            edits=partial(self._edits, slots, known),
            masks=self._masks(slots),
        )

    def _masks(self, slots: IntArray) -> Callable[[], TokenMasks] | None:
        rows, grammars = np.flatnonzero(self._has_grammar[slots]), self._grammars
        if grammars is None or not len(rows):
            return None
        own = slots[rows].tolist()
        return lambda: TokenMasks(rows=rows, bits=grammars.masks(own))

    def _edits(self, slots: IntArray, known: IntArray) -> LogitEdits | None:
        is_masked = (known < self._masked_until[slots]) & (self._stops[slots, 0] != _NO_STOP)
        masks = [(int(row), self._stop_ids(slots[row])) for row in np.flatnonzero(is_masked)]
        rules = [
            (row, self._rules[slot])
            for row, slot in enumerate(slots.tolist() if self._rules else ())
            if slot in self._rules
        ]
        return edits_of(rules, masks, len(slots))

    def _stop_ids(self, slot: np.int64) -> IntArray:
        stops = self._stops[slot]
        ids: IntArray = stops[stops != _NO_STOP]
        return ids

    def advance(self, step: StepInputs, samples: StepSamples) -> StepOutcome:
        """Take a step's result: gaps closed, tokens appended; rows end by stop, limit or error."""
        self.expect(step)
        return self.settle(step, samples)

    def expect(self, step: StepInputs) -> None:
        """The step is on its way: all but its tokens is known, and whether one of them stops.

        Until `settle`, a row that stops or breaks counts as running, and may be in later steps.
        """
        columns = self._columns
        # Of a step that waited for the one before: rows that this one ended.
        is_there = ~columns.is_idle[step.slots]
        certain = step.counts if step.drafts is None else step.counts - step.drafts
        columns.num_computed_tokens[step.slots[is_there]] += certain[is_there]
        sampled = step.slots[step.sampled_rows][is_there[step.sampled_rows]]
        columns.num_tokens[sampled] += 1
        columns.is_idle[sampled] = columns.num_tokens[sampled] >= columns.limit[sampled]

    def is_anyone_left(self, step: StepInputs) -> bool:
        """Of an expected step's samples: whether not all their rows turned out to have ended."""
        sampled = step.slots[step.sampled_rows]
        return bool((self._columns.num_tokens[sampled] > step.ends.num_tokens).any())

    def settle(self, step: StepInputs, samples: StepSamples) -> StepOutcome:
        """Take the result of a step that was expected. Steps settle in the order of `expect`.

        Rows that have left since are answered for, but leave no trace.
        """
        ends, sampled = step.ends, step.slots[step.sampled_rows]
        is_there = np.ones(len(sampled), np.bool_) if samples.is_there is None else samples.is_there
        is_stop = (ends.stops == samples.token_ids[:, None]).any(axis=1)
        is_stop &= ends.num_tokens >= ends.masked_until
        is_over = is_stop | (ends.num_tokens + 1 >= ends.limit)
        if step.drafts is not None:
            is_there = is_reached(step, samples, is_over)
        is_ok = samples.is_ok & is_there
        is_over &= is_ok
        stays = self._columns.is_member[sampled] & (self._joined[sampled] == ends.joined)
        taken = stays & is_ok
        self._tokens[sampled[taken], ends.num_tokens[taken]] = samples.token_ids[taken]
        if step.drafts is not None:
            self._lookup.settle(step, step.drafts, taken, self._columns)
        goes_on = taken & ~is_over
        if self._rules:
            self._see(sampled[goes_on], samples.token_ids[goes_on])
        goes_on &= self._has_grammar[sampled]
        if self._grammars is not None and goes_on.any():
            self._grammars.see(sampled[goes_on].tolist(), samples.token_ids[goes_on].tolist())
        is_broken = is_there & ~is_ok
        broken = {
            int(sampled[row]): self._why_broken(ends, row, int(sampled[row]), stays=stays[row])
            for row in np.flatnonzero(is_broken).tolist()
        }
        self._close(sampled, ends, stays & is_there & (is_broken | is_stop), is_ok)
        self._left.clear()
        return StepOutcome(
            slots=tuple(sampled[is_ok].tolist()),
            token_ids=tuple(samples.token_ids[is_ok].tolist()),
            logprobs=self._row_logprobs(step, samples, is_ok),
            finished=tuple(
                (int(sampled[row]), FinishReason.STOP if is_stop[row] else FinishReason.LENGTH)
                for row in np.flatnonzero(is_over)
            ),
            errors=tuple((slot, why.reason) for slot, why in broken.items()),
            unsatisfiable=tuple(slot for slot, why in broken.items() if why.is_unsatisfiable),
            prompt_logprobs=row_prompt_logprobs(step, samples, sampled[is_broken]),
        )

    def _close(self, sampled: IntArray, ends: RowEnds, rows: BoolArray, is_ok: BoolArray) -> None:
        """These ended otherwise than expected: later steps did nothing for them."""
        slots, known = sampled[rows], ends.num_tokens[rows]
        self._columns.is_idle[slots] = True
        self._columns.num_tokens[slots] = known + is_ok[rows]
        self._columns.num_computed_tokens[slots] = known

    def _see(self, slots: IntArray, token_ids: IntArray) -> None:
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if rules := self._rules.get(slot):
                rules.see(token_id)

    def _why_broken(self, ends: RowEnds, row: int, slot: int, *, stays: bool) -> Broken:
        own = self._restraints(slot) if stays else self._left.get(slot, Restraints())
        return why_broken(own, ends, row, self.limits.vocab_size)

    def _restraints(self, slot: int) -> Restraints:
        grammars = self._grammars if self._has_grammar[slot] else None
        grammar = None if grammars is None else grammars.row(slot)
        return Restraints(self._rules.get(slot), grammar)

    def fail(self, slot: int) -> None:
        """The row could not be computed: it stays, idle, until a plan lets it leave."""
        assert self._columns.is_member[slot], f"slot {slot} has no row to fail"
        self._columns.is_idle[slot] = True

    def _row_logprobs(
        self, step: StepInputs, samples: StepSamples, is_ok: BoolArray
    ) -> tuple[RowLogprobs, ...]:
        rows = []
        for index, row in enumerate(samples.logprob_rows.tolist()):
            if not is_ok[row]:
                continue
            slot = int(step.slots[step.sampled_rows[row]])
            wanted = int(step.sampling.logprobs[row])
            rows.append(
                RowLogprobs(
                    slot=slot,
                    logprob=float(samples.logprob[index]),
                    top_token_ids=tuple(samples.top_token_ids[index, :wanted].tolist()),
                    top_logprobs=tuple(samples.top_logprobs[index, :wanted].tolist()),
                )
            )
        return tuple(rows)


def _appended(plan: Plan) -> dict[tuple[int, int], list[int]]:
    """By slot and layer group."""
    appended: dict[tuple[int, int], list[int]] = {}
    for slot, block, group in plan.appends:
        appended.setdefault((slot, group), []).append(block)
    return appended
