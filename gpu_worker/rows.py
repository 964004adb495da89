"""The mirror of the batch: persistent columns per slot, changed by plans and steps only.

`apply` tries the whole plan on a draft before anything changes, so a refused plan leaves no
trace.
Between two steps, for every member that is not idle:

    0 <= done < known < limit <= context
    blocks[slot, :held] are its blocks; positions [0, done) have their keys and values in them
"""

import numpy as np

from gpu_worker.device import IntArray, SamplingColumns, StepInputs, StepSamples
from gpu_worker.draft import Columns, RowLimits, draft_plan, require
from gpu_worker.plans import FinishReason, Join, Plan, RowLogprobs, StepOutcome
from gpu_worker.row_rules import RowRules, edits_of, has_rules

_NO_STOP = -1
# Below this the division by it would overflow long before the noise could decide anything.
_TEMPERATURE_MIN = 1e-5


class Rows:
    def __init__(self, limits: RowLimits) -> None:
        self.limits = limits
        slots = limits.slots
        # Zeroed pages cost nothing until a long sequence touches them.
        self._tokens = np.zeros((slots, limits.context_tokens), np.int32)
        self._blocks = np.zeros((slots, limits.blocks_per_row), np.int32)
        self._prompt = np.zeros(slots, np.int64)
        self._masked_until = np.zeros(slots, np.int64)
        self._temperature = np.zeros(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._seed = np.zeros(slots, np.int64)
        self._choice = np.zeros(slots, np.int64)
        self._logprobs = np.full(slots, -1, np.int64)
        # As wide as the longest list seen, padded.
        self._stops = np.full((slots, 4), _NO_STOP, np.int64)
        self.clear()

    def clear(self) -> None:
        """Start of a stream: no members, and the next plan is number 1."""
        self._columns = Columns.empty(self.limits.slots)
        self._plan_id = 0
        # Of the few rows that have any, by slot.
        self._rules: dict[int, RowRules] = {}

    def __repr__(self) -> str:
        columns = self._columns
        return (
            f"<Rows plan={self._plan_id} members={int(columns.is_member.sum())} "
            f"idle={int(columns.is_idle.sum())} "
            f"tokens={int(columns.known[columns.is_member].sum())}>"
        )

    @property
    def plan_id(self) -> int:
        """The last plan applied; 0 before the first."""
        return self._plan_id

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """(slot, serial) of every member, by slot."""
        slots = np.flatnonzero(self._columns.is_member)
        return tuple(zip(slots.tolist(), self._columns.serial[slots].tolist(), strict=True))

    def tokens(self, slot: int) -> tuple[int, ...]:
        """All tokens known of a row."""
        return tuple(self._tokens[slot, : self._columns.known[slot]].tolist())

    def tokens_done(self, slot: int) -> int:
        return int(self._columns.done[slot])

    def blocks(self, slot: int) -> list[int]:
        """The blocks of a row, in order."""
        return list(self._blocks[slot, : self._columns.held[slot]].tolist())

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
        draft = draft_plan(plan, self._columns, self.limits, self.blocks)
        # Nothing below can fail.
        for slot in plan.leaves:
            self._rules.pop(slot, None)
        held: dict[int, int] = {}
        for join in plan.joins:
            self._write_join(join)
            held[join.slot] = len(join.blocks)
        for slot, block in plan.appends:
            count = held.get(slot, int(self._columns.held[slot]))
            self._blocks[slot, count] = block
            held[slot] = count + 1
        self._columns = draft.columns
        self._plan_id = plan.plan_id
        return draft.counts

    def _write_join(self, join: Join) -> None:
        slot, sampling = join.slot, join.sampling
        self._tokens[slot, : len(join.token_ids)] = join.token_ids
        self._blocks[slot, : len(join.blocks)] = join.blocks
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

    def _write_stops(self, slot: int, stop_token_ids: tuple[int, ...]) -> None:
        missing = len(stop_token_ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=_NO_STOP)
        self._stops[slot] = _NO_STOP
        self._stops[slot, : len(stop_token_ids)] = stop_token_ids

    # ---- steps -----------------------------------------------------------------------------------

    def steady_counts(self) -> IntArray:
        """Tokens per slot in a step after the first of a lease."""
        return self._columns.steady_counts()

    def step_inputs(self, counts: IntArray) -> StepInputs:
        """The ragged inputs of a step that computes counts[slot] tokens of each slot."""
        columns, block_size = self._columns, self.limits.block_size
        slots = np.flatnonzero(counts)
        per_row = counts[slots]
        done = columns.done[slots]
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(per_row, out=starts[1:])
        slot_of_token = np.repeat(slots, per_row)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - done, per_row)
        block_of_token = self._blocks[slot_of_token, positions // block_size].astype(np.int64)
        context = done + per_row
        width = -(-int(context.max(initial=1)) // block_size)
        sampled_rows = np.flatnonzero(context == columns.known[slots])
        return StepInputs(
            slots=slots,
            serials=columns.serial[slots],
            counts=per_row,
            query_starts=starts.astype(np.int32),
            context_lengths=context.astype(np.int32),
            block_tables=np.ascontiguousarray(self._blocks[slots, :width]),
            token_ids=self._tokens[slot_of_token, positions].astype(np.int64),
            positions=positions,
            kv_slots=block_of_token * block_size + positions % block_size,
            sampled_rows=sampled_rows,
            sampled_tokens=starts[1:][sampled_rows] - 1,
            sampling=self._sampling(slots[sampled_rows]),
        )

    def _sampling(self, slots: IntArray) -> SamplingColumns:
        known = self._columns.known[slots]
        is_masked = (known < self._masked_until[slots]) & (self._stops[slots, 0] != _NO_STOP)
        masks = [(int(row), self._stop_ids(slots[row])) for row in np.flatnonzero(is_masked)]
        rules = [
            (row, self._rules[slot])
            for row, slot in enumerate(slots.tolist() if self._rules else ())
            if slot in self._rules
        ]
        return SamplingColumns(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seed=self._seed[slots],
            choice=self._choice[slots],
            position=known - self._prompt[slots],
            logprobs=self._logprobs[slots],
            edits=edits_of(rules, masks, len(slots)),
        )

    def _stop_ids(self, slot: np.int64) -> IntArray:
        stops = self._stops[slot]
        ids: IntArray = stops[stops != _NO_STOP]
        return ids

    def advance(self, step: StepInputs, samples: StepSamples) -> StepOutcome:
        """Take a step's result: gaps closed, tokens appended; rows end by stop, limit or error."""
        columns = self._columns
        columns.done[step.slots] += step.counts
        sampled = step.slots[step.sampled_rows]
        broken = sampled[~samples.is_ok]
        slots, token_ids = sampled[samples.is_ok], samples.token_ids[samples.is_ok]
        position = columns.known[slots]
        self._tokens[slots, position] = token_ids
        columns.known[slots] = position + 1
        if self._rules:
            self._see(slots, token_ids)
        is_stop = (self._stops[slots] == token_ids[:, None]).any(axis=1)
        is_stop &= position >= self._masked_until[slots]
        is_over = is_stop | (position + 1 >= columns.limit[slots])
        columns.is_idle[slots] = is_over
        columns.is_idle[broken] = True
        return StepOutcome(
            slots=tuple(slots.tolist()),
            token_ids=tuple(token_ids.tolist()),
            logprobs=self._row_logprobs(sampled, samples),
            finished=tuple(
                (int(slots[row]), FinishReason.STOP if is_stop[row] else FinishReason.LENGTH)
                for row in np.flatnonzero(is_over)
            ),
            errors=tuple((slot, self._why_broken(slot)) for slot in broken.tolist()),
        )

    def _see(self, slots: IntArray, token_ids: IntArray) -> None:
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if rules := self._rules.get(slot):
                rules.see(token_id)

    def _why_broken(self, slot: int) -> str:
        if self._is_exhausted(slot):
            return "allowed_token_ids, bad_words and min_tokens leave no token to sample"
        return "the model's logits are not numbers"

    def _is_exhausted(self, slot: int) -> bool:
        """Whether the row's own rules forbid every token it might sample next."""
        is_masked = self._columns.known[slot] < self._masked_until[slot]
        forbidden = set(self._stop_ids(np.int64(slot)).tolist() if is_masked else ())
        allowed = set[int]()
        if rules := self._rules.get(slot):
            forbidden.update(rules.forbidden_ids().tolist())
            allowed.update(rules.allowed_ids.tolist())
        if allowed:
            return allowed <= forbidden
        return len(forbidden) == self.limits.vocab_size

    def fail(self, slot: int) -> None:
        """The row could not be computed: it stays, idle, until a plan lets it leave."""
        assert self._columns.is_member[slot], f"slot {slot} has no row to fail"
        self._columns.is_idle[slot] = True

    def _row_logprobs(self, sampled: IntArray, samples: StepSamples) -> tuple[RowLogprobs, ...]:
        rows = []
        for index, row in enumerate(samples.logprob_rows.tolist()):
            if not samples.is_ok[row]:
                continue
            slot = int(sampled[row])
            wanted = int(self._logprobs[slot])
            rows.append(
                RowLogprobs(
                    slot=slot,
                    logprob=float(samples.logprob[index]),
                    top_token_ids=tuple(samples.top_token_ids[index, :wanted].tolist()),
                    top_logprobs=tuple(samples.top_logprobs[index, :wanted].tolist()),
                )
            )
        return tuple(rows)
