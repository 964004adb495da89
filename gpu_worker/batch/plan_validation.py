"""A plan tried on a copy of the batch's small columns: everything is checked, nothing is changed.

What comes out, `ValidPlan`, can be written into the batch without a further question.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from gpu_worker.batch.plans import (
    BAD_WORD_TOKENS_MAX,
    BAD_WORDS_MAX,
    BIASES_MAX,
    LEASE_STEPS_MAX,
    STOP_TOKENS_MAX,
    InvalidPlan,
    Join,
    Plan,
    RowSampling,
)
from gpu_worker.batch.step_types import BoolArray, IntArray

SEED_MAX = (1 << 64) - 1
# 16 bytes.
_ALIGN_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    slots: int
    context_tokens: int
    step_tokens: int
    block_size: int
    block_count: int
    vocab_size: int
    # To which the layers of each group attend; None: to everything.
    windows: tuple[int | None, ...] = (None,)
    reads_grammars: bool = False
    # That a step gives a row at most; more than one where tokens are drafted.
    slot_tokens: int = 1
    # Numbered from block_count on.
    host_block_count: int = 0

    @property
    def blocks_per_row(self) -> int:
        return -(-self.context_tokens // self.block_size)

    @property
    def groups(self) -> int:
        return len(self.windows)

    @property
    def table_width(self) -> int:
        """A row's places for blocks: the table of each group begins where kernels expect it to."""
        return -(-self.blocks_per_row // _ALIGN_BLOCKS) * _ALIGN_BLOCKS

    def blocks_behind(self, num_computed_tokens: int, group: int) -> int:
        """Of a row with so many, those from the front that no token to come attends to."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(0, num_computed_tokens + 1 - window) // self.block_size


@dataclass(slots=True, eq=False, kw_only=True)
class Columns:
    """The small columns, one entry per slot. An idle row has ended and computes nothing more."""

    is_member: BoolArray
    is_idle: BoolArray
    sequence_id: npt.NDArray[np.uint64]
    num_tokens: IntArray
    num_computed_tokens: IntArray
    # num_tokens at which the row ends: max_tokens or the context.
    limit: IntArray
    # [groups, slots]: the blocks of each row, those that a window has left included.
    held: IntArray

    @classmethod
    def empty(cls, slots: int, groups: int) -> "Columns":
        return cls(
            is_member=np.zeros(slots, np.bool_),
            is_idle=np.zeros(slots, np.bool_),
            sequence_id=np.zeros(slots, np.uint64),
            num_tokens=np.zeros(slots, np.int64),
            num_computed_tokens=np.zeros(slots, np.int64),
            limit=np.zeros(slots, np.int64),
            held=np.zeros((groups, slots), np.int64),
        )

    def copy(self) -> "Columns":
        return Columns(**{field.name: getattr(self, field.name).copy() for field in fields(self)})

    def steady_counts(self) -> IntArray:
        """Tokens per slot in a step without chunks: one for each row whose gap is one."""
        gaps = self.num_tokens - self.num_computed_tokens
        is_ready: BoolArray = self.is_member & ~self.is_idle & (gaps == 1)
        return is_ready.astype(np.int64)

    def checksum(self) -> int:
        """Of the membership: sum of (sequence id + 1) * (2 * slot + 1), modulo 2^64."""
        factors = 2 * np.flatnonzero(self.is_member).astype(np.uint64) + np.uint64(1)
        sequence_ids = self.sequence_id[self.is_member] + np.uint64(1)
        return int((sequence_ids * factors).sum(dtype=np.uint64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidPlan:
    """The columns as they will be, and how many tokens each slot computes in the first step."""

    columns: Columns
    counts: IntArray


def validate_plan(
    plan: Plan, columns: Columns, limits: RowLimits, blocks_of: Callable[[int, int], list[int]]
) -> ValidPlan:
    """Raise InvalidPlan naming what is wrong. `blocks_of(slot, group)`: those of a present row."""
    require(
        1 <= plan.lease_steps <= LEASE_STEPS_MAX,
        f"a lease is of 1 to {LEASE_STEPS_MAX} steps, not {plan.lease_steps}",
    )
    require(
        1 <= plan.slot_tokens_most <= limits.slot_tokens,
        f"slot_tokens_most: a step gives a row 1 to {limits.slot_tokens} tokens, not "
        f"{plan.slot_tokens_most}",
    )
    after = columns.copy()
    _leave(after, plan, limits)
    _join(after, plan, limits)
    tables = _Tables(plan, blocks_of)
    # First, as a row may be appended a block that it gives up.
    _replace(after, plan, limits, tables)
    _append(after, plan, limits, tables)
    _check_swaps(plan, limits)
    _check_copies(plan, limits)
    counts = _first_counts(after, plan, limits)
    _check_budget(counts, limits)
    _check_lease(after, counts, plan, limits)
    _check_membership(after, plan)
    return ValidPlan(columns=after, counts=counts)


def require(is_kept: bool, rule: str) -> None:
    if not is_kept:
        raise InvalidPlan(rule)


def row_limit(join: Join, limits: RowLimits) -> int:
    return min(join.prompt_tokens + join.sampling.max_tokens, limits.context_tokens)


def _leave(after: Columns, plan: Plan, limits: RowLimits) -> None:
    for slot in plan.leaves:
        _check_slot(slot, limits)
        require(bool(after.is_member[slot]), f"slot {slot} leaves but nobody is in it")
        after.is_member[slot] = False
        after.is_idle[slot] = False


def _join(after: Columns, plan: Plan, limits: RowLimits) -> None:
    for join in plan.joins:
        slot = join.slot
        _check_slot(slot, limits)
        require(not after.is_member[slot], f"slot {slot} is taken")
        _check_tokens(f"slot {slot}", join, limits)
        _check_blocks(f"slot {slot}", join, limits)
        _check_sampling(f"slot {slot}", join.sampling, limits)
        after.is_member[slot] = True
        after.is_idle[slot] = False
        after.sequence_id[slot] = join.sequence_id
        after.num_tokens[slot] = len(join.token_ids)
        after.num_computed_tokens[slot] = join.num_computed_tokens
        after.limit[slot] = row_limit(join, limits)
        after.held[:, slot] = [len(table) for table in join.block_tables]


def _check_tokens(row: str, join: Join, limits: RowLimits) -> None:
    known, limit = len(join.token_ids), row_limit(join, limits)
    require(1 <= join.prompt_tokens <= known, f"{row}: the prompt is 1 to {known} tokens of those")
    require(known < limit, f"{row}: {known} known tokens leave none below the limit of {limit}")
    require(
        0 <= join.num_computed_tokens < known,
        f"{row}: {join.num_computed_tokens} tokens done of {known} known leave nothing to compute",
    )
    _check_token_ids(row, join.token_ids, limits)


def _check_blocks(row: str, join: Join, limits: RowLimits) -> None:
    tables, done = join.block_tables, join.num_computed_tokens
    require(
        len(tables) == limits.groups,
        f"{row}: block_tables has {len(tables)}, and the model has {limits.groups} layer groups",
    )
    for group, table in enumerate(tables):
        count, skipped = len(table), table.num_skipped_blocks
        its = row if limits.groups == 1 else f"{row}, layer group {group}"
        require(
            count <= limits.blocks_per_row,
            f"{its}: {count} blocks are more than the {limits.blocks_per_row} of the context",
        )
        behind = limits.blocks_behind(done, group)
        require(
            skipped <= behind,
            f"{its}: {skipped} blocks are skipped, and only {behind} are behind the window",
        )
        for block in table.blocks:
            _check_block(block, limits)
        require(
            done <= count * limits.block_size,
            f"{its}: {done} tokens done do not fit {count} blocks",
        )
    blocks = [block for table in tables for block in table.blocks]
    require(len(set(blocks)) == len(blocks), f"{row}: a block is listed twice")


def _check_sampling(row: str, sampling: RowSampling, limits: RowLimits) -> None:
    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    rules = (
        (math.isfinite(temperature) and temperature >= 0, "temperature is a number >= 0"),
        (math.isfinite(top_p) and 0 < top_p <= 1, "top_p is in (0, 1]"),
        (math.isfinite(min_p) and 0 <= min_p <= 1, "min_p is in [0, 1]"),
        (sampling.top_k >= 0, "top_k is at least 0"),
        (0 <= sampling.seed <= SEED_MAX, "the seed has 64 bits"),
        (sampling.choice >= 0, "choice is at least 0"),
        (sampling.max_tokens >= 1, "max_tokens is at least 1"),
        (sampling.min_tokens >= 0, "min_tokens is at least 0"),
        (len(sampling.stop_token_ids) <= STOP_TOKENS_MAX, f"at most {STOP_TOKENS_MAX} stop tokens"),
        (
            limits.reads_grammars or not sampling.grammar,
            "this worker reads no grammars, and says so",
        ),
        (-1 <= sampling.logprobs <= limits.vocab_size, "logprobs is at most the vocabulary"),
        (
            (sampling.prompt_logprobs or 0) <= limits.vocab_size,
            "prompt_logprobs is at most the vocabulary",
        ),
    )
    for is_kept, rule in rules:
        require(is_kept, f"{row}: {rule}")
    _check_token_ids(row, sampling.stop_token_ids, limits)
    _check_rules(row, sampling, limits)


def _check_rules(row: str, sampling: RowSampling, limits: RowLimits) -> None:
    repetition, allowed = sampling.repetition_penalty, sampling.allowed_token_ids
    biased = tuple(token_id for token_id, _ in sampling.logit_bias)
    words = sampling.bad_words
    longest = max(map(len, words), default=1)
    rules = (
        (math.isfinite(repetition) and repetition > 0, "repetition_penalty is a number > 0"),
        (math.isfinite(sampling.presence_penalty), "presence_penalty is a number"),
        (math.isfinite(sampling.frequency_penalty), "frequency_penalty is a number"),
        (len(biased) <= BIASES_MAX, f"at most {BIASES_MAX} biases"),
        (all(math.isfinite(bias) for _, bias in sampling.logit_bias), "a bias is a number"),
        (len(set(biased)) == len(biased), "a token has one bias"),
        (len(set(allowed)) == len(allowed), "an allowed token is listed once"),
        (len(words) <= BAD_WORDS_MAX, f"at most {BAD_WORDS_MAX} bad words"),
        (all(words), "a bad word has a token"),
        (longest <= BAD_WORD_TOKENS_MAX, f"a bad word has at most {BAD_WORD_TOKENS_MAX} tokens"),
    )
    for is_kept, rule in rules:
        require(is_kept, f"{row}: {rule}")
    for token_ids in (biased, allowed, *words):
        _check_token_ids(row, token_ids, limits)


class _Tables(dict[tuple[int, int], list[int]]):
    """The block tables of the rows that the plan touches, by slot and layer group."""

    def __init__(self, plan: Plan, blocks_of: Callable[[int, int], list[int]]) -> None:
        # -1: no block, where it was given back before.
        super().__init__(
            {
                (join.slot, group): [-1] * table.num_skipped_blocks + list(table.blocks)
                for join in plan.joins
                for group, table in enumerate(join.block_tables)
            }
        )
        self._blocks_of = blocks_of

    def __missing__(self, key: tuple[int, int]) -> list[int]:
        table = self[key] = self._blocks_of(*key)
        return table


def _replace(after: Columns, plan: Plan, limits: RowLimits, tables: _Tables) -> None:
    for slot, index, block, group in plan.replacements:
        _check_slot(slot, limits)
        _check_group(group, limits)
        _check_block(block, limits)
        require(
            bool(after.is_member[slot]), f"slot {slot} has a block replaced but nobody is in it"
        )
        table, done = tables[slot, group], int(after.num_computed_tokens[slot])
        require(
            index < len(table),
            f"slot {slot} has {len(table)} blocks, number {index} is to be replaced",
        )
        require(
            (index + 1) * limits.block_size <= done,
            f"slot {slot}: block number {index} is to be replaced with {done} tokens done",
        )
        behind = limits.blocks_behind(done, group)
        require(block not in table[behind:], f"slot {slot} already has block {block}")
        table[index] = block


def _append(after: Columns, plan: Plan, limits: RowLimits, tables: _Tables) -> None:
    held: dict[tuple[int, int], set[int]] = {}
    for slot, block, group in plan.appends:
        _check_slot(slot, limits)
        _check_group(group, limits)
        _check_block(block, limits)
        require(bool(after.is_member[slot]), f"slot {slot} gets a block but nobody is in it")
        require(
            after.held[group, slot] < limits.blocks_per_row,
            f"slot {slot} has all the {limits.blocks_per_row} blocks of the context",
        )
        key = slot, group
        if key not in held:
            # What it had behind its window may be another's by now, or its own anew.
            behind = limits.blocks_behind(int(after.num_computed_tokens[slot]), group)
            held[key] = set(tables[key][behind:])
        require(block not in held[key], f"slot {slot} already has block {block}")
        held[key].add(block)
        after.held[group, slot] += 1


def _check_swaps(plan: Plan, limits: RowLimits) -> None:
    own, host = limits.block_count, limits.host_block_count
    require(not plan.swaps or host > 0, "swaps: this worker has no host blocks, and says so")
    for source, target in plan.swaps:
        swap = f"the swap from block {source} to {target}"
        require(
            0 <= min(source, target) <= max(source, target) < own + host,
            f"{swap}: there are {own} blocks, and {host} host blocks from {own} on",
        )
        require(
            (source < own) != (target < own),
            f"{swap}: exactly one of the two is a host block, from {own} on",
        )


def _check_copies(plan: Plan, limits: RowLimits) -> None:
    targets = {target for _, target in plan.copies}
    require(len(targets) == len(plan.copies), "two copies have the same target block")
    both = targets.intersection(source for source, _ in plan.copies)
    require(not both, f"block {min(both, default=0)} is the target of a copy and a source")
    for source, target in plan.copies:
        _check_block(source, limits)
        _check_block(target, limits)


def _first_counts(after: Columns, plan: Plan, limits: RowLimits) -> IntArray:
    counts = after.steady_counts()
    seen: set[int] = set()
    for slot, tokens in plan.chunks:
        _check_slot(slot, limits)
        require(bool(after.is_member[slot]), f"slot {slot} has a chunk but nobody is in it")
        require(slot not in seen, f"slot {slot} has two chunks")
        seen.add(slot)
        # The leader may not know yet that the row ended in the step before.
        if after.is_idle[slot]:
            continue
        gap = int(after.num_tokens[slot] - after.num_computed_tokens[slot])
        require(0 <= tokens <= gap, f"slot {slot}: a chunk of {tokens} tokens for a gap of {gap}")
        counts[slot] = tokens
    return counts


def _check_budget(counts: IntArray, limits: RowLimits) -> None:
    total = int(counts.sum())
    require(
        total <= limits.step_tokens,
        f"the first step computes {total} tokens, a step at most {limits.step_tokens}",
    )


def _check_lease(after: Columns, counts: IntArray, plan: Plan, limits: RowLimits) -> None:
    """Every token that the lease can compute has its place in blocks already granted.

        [0 ── computed ── after the first step ── after the lease)   <=   held * block_size

    Draft tokens too. The token at which a row ends (num_tokens == limit) is never computed.
    """
    after_first = after.num_computed_tokens + counts
    runs_on = after.num_tokens - after_first <= 1
    most = plan.slot_tokens_most
    after_lease = after_first + np.where(runs_on, (plan.lease_steps - 1) * most, 0)
    is_decode = after.steady_counts().astype(np.bool_)
    is_decode[[slot for slot, _ in plan.chunks]] = False
    after_lease[is_decode] += most - 1
    needed = np.minimum(after_lease, after.limit - 1)
    held = np.minimum.reduce(after.held)
    capacity = held * limits.block_size
    is_short = after.is_member & ~after.is_idle & (needed > capacity)
    if is_short.any():
        slot = int(np.flatnonzero(is_short)[0])
        raise InvalidPlan(
            f"slot {slot}: the lease can compute up to token {int(needed[slot])}, "
            f"but its {int(held[slot])} blocks hold {int(capacity[slot])}"
        )


def _check_membership(after: Columns, plan: Plan) -> None:
    checksum = after.checksum()
    require(
        checksum == plan.membership_checksum,
        f"plan {plan.plan_id} has membership checksum {plan.membership_checksum:#x}, the batch of "
        f"{int(after.is_member.sum())} rows has {checksum:#x}",
    )


def _check_slot(slot: int, limits: RowLimits) -> None:
    require(0 <= slot < limits.slots, f"slot {slot} is not below {limits.slots}")


def _check_group(group: int, limits: RowLimits) -> None:
    require(0 <= group < limits.groups, f"layer group {group} is not below {limits.groups}")


def _check_block(block: int, limits: RowLimits) -> None:
    require(0 <= block < limits.block_count, f"block {block} is not below {limits.block_count}")


def _check_token_ids(row: str, token_ids: tuple[int, ...], limits: RowLimits) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        bad = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
        raise InvalidPlan(f"{row}: token id {bad} is not in the vocabulary of {limits.vocab_size}")
