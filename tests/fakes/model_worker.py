"""A worker without a device: takes plans by the letter of worker_service.proto, believes nothing.

Its "KV cache" holds, per place, a digest of everything up to that position. Before a row computes,
the digest in its blocks is compared with the row's own tokens: a block reused too early, a wrong
prefix hit or a bad copy is found at the step that would have read it. The next token is a pure
function of that digest and the row's sequence id, so that the right output of a request is known
without any scheduler (`expected_output`).
"""

from collections import deque
from dataclasses import dataclass, field

from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.types import Reason, StepResult, WorkerSpec

DIGEST_BITS = 61
MASK = (1 << DIGEST_BITS) - 1
STOP_TOKEN = 0
STOP_EVERY = 40
# What no digest is: of a draft that was refused, and of a place that nobody has written.
WRONG, UNWRITTEN = -1, -2


def digest(previous: int, token: int) -> int:
    """Of a prefix, from the digest of the prefix one shorter."""
    return (previous * 1_000_003 + token + 1) & MASK


def next_token(prefix_digest: int, sequence_id: int, vocab_size: int, stop_every: int) -> int:
    """What the "model" says after a prefix; about one token in `stop_every` stops, 0 for none."""
    mixed = (prefix_digest ^ (sequence_id * 0x9E3779B97F4A7C15)) & MASK
    mixed = (mixed * 0x5851F42D4C957F2D) & MASK
    if stop_every and (mixed >> 20) % stop_every == 0:
        return STOP_TOKEN
    return 1 + (mixed >> 24) % (vocab_size - 1)


def tokens_given(sequence_id: int, position: int, most: int) -> int:
    """By the step that begins at an output position: 1 to `most`."""
    mixed = (sequence_id * 1_000_003 + position) * 0x9E3779B97F4A7C15 & MASK
    return 1 + (mixed >> 30) % most


def expected_output(
    prompt: tuple[int, ...],
    sequence_id: int,
    max_tokens: int,
    vocab_size: int,
    stop_every: int = STOP_EVERY,
) -> tuple[tuple[int, ...], Reason]:
    """The undisturbed output of one choice."""
    state = 0
    output: list[int] = []
    for token in prompt:
        state = digest(state, token)
    while len(output) < max_tokens:
        output.append(next_token(state, sequence_id, vocab_size, stop_every))
        state = digest(state, output[-1])
        if output[-1] == STOP_TOKEN:
            return tuple(output), Reason.STOP
    return tuple(output), Reason.LENGTH


@dataclass
class Row:
    sequence_id: int
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    # By layer group, from the front; None: given back.
    blocks: list[list[int | None]]
    num_computed_tokens: int
    # Prompt logprobs are wanted from this position on.
    prompt_logprobs_from: int
    is_finished: bool = False
    # Of the empty prefix, and of those that were computed.
    digests: list[int] = field(default_factory=lambda: [0])

    @property
    def gap(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    def content(self, group: int, start: int, end: int) -> list[int]:
        """What the places of positions [start, end) hold in a layer group: a digest below it."""
        digests = self.digests[start + 1 : end + 1]
        return [one | group << DIGEST_BITS for one in digests] if group else digests


@dataclass
class ModelWorker:
    """`send` plans, then `step` as often as you like; None means that it has nothing to do."""

    id: str
    spec: WorkerSpec
    max_tokens_of: dict[int, int]
    stop_every: int = STOP_EVERY
    # What a step takes for each token that it computes, and besides; 0 both: it does not say.
    token_us: int = 0
    base_us: int = 0
    # Sequences whose logits are not finite.
    bad_sequence_ids: set[int] = field(default_factory=set)
    rows: dict[int, Row] = field(default_factory=dict)
    # By block what each of its places holds, as `Row.content` has it.
    kv: dict[int, list[int]] = field(default_factory=dict)
    inbox: deque[Plan] = field(default_factory=deque)
    plan: Plan | None = None
    steps_done: int = 0
    steps_total: int = 0

    def __post_init__(self) -> None:
        blocks = range(self.spec.block_count + self.spec.host_block_count)
        self.kv = {block: [UNWRITTEN] * self.spec.block_size for block in blocks}

    def send(self, plan: Plan) -> None:
        self.inbox.append(plan)

    def step(self, *, sees_newer_plan: bool = True) -> StepResult | None:
        """Run one step.

        A newer plan waits for the current plan's first step, and may arrive late.
        """
        if self.inbox and (self.plan is None or (self.steps_done > 0 and sees_newer_plan)):
            self._apply(self.inbox.popleft())
        if self.plan is None:
            return None
        return self._run(self.plan)

    def _apply(self, plan: Plan) -> None:
        for slot in plan.leaves:
            del self.rows[slot]
        for join in plan.joins:
            assert join.slot not in self.rows, "slot taken"
            assert 0 <= join.slot < self.spec.slots_max
            self.rows[join.slot] = Row(
                sequence_id=join.sequence_id,
                tokens=list(join.tokens),
                num_prompt_tokens=join.num_prompt_tokens,
                max_tokens=self.max_tokens_of[join.sequence_id],
                blocks=[[None] * count + list(blocks) for count, blocks in join.block_tables],
                num_computed_tokens=join.num_computed_tokens,
                prompt_logprobs_from=join.prompt_logprobs_from,
            )
        for slot, block, group in plan.appends:
            self.rows[slot].blocks[group].append(block)
        for slot, index, block, group in plan.replacements:
            self._replace(self.rows[slot], index, block, group)
        for source, target in plan.swaps:
            assert len({source, target} & set(range(self.spec.block_count))) == 1
            assert UNWRITTEN not in self.kv[source], "a block that is not full"
            self.kv[target] = self.kv[source].copy()
        for source, target in plan.copies:
            self.kv[target] = self.kv[source].copy()
        members = sum((row.sequence_id + 1) * (2 * slot + 1) for slot, row in self.rows.items())
        assert members & ((1 << 64) - 1) == plan.checksum, "membership differs"
        self._check_tables()
        self.plan, self.steps_done = plan, 0

    def _replace(self, row: Row, index: int, block: int, group: int) -> None:
        """Only by a block of equal content."""
        size, own = self.spec.block_size, row.blocks[group][index]
        assert own is not None
        assert own != block
        assert (index + 1) * size <= row.num_computed_tokens, "a block that is not full"
        assert UNWRITTEN not in self.kv[own]
        assert self.kv[own] == self.kv[block], "a block of other content"
        row.blocks[group][index] = block

    def _run(self, plan: Plan) -> StepResult:
        chunks = dict(plan.chunks) if self.steps_done == 0 else {}
        slots, tokens, counts, finished, errors, prompt_logprobs = [], [], [], {}, {}, {}
        computed = 0
        is_mixed = any(
            row.gap == 1 and not row.is_finished and chunks.get(slot, 1) > 0
            for slot, row in self.rows.items()
        )
        for slot, row in self.rows.items():
            count = chunks.get(slot, 1 if row.gap == 1 else 0)
            if count == 0 or row.is_finished:
                continue
            assert count <= row.gap
            drafted = 0 if slot in chunks else self._drafted(row)
            computed += count + drafted
            if row.sequence_id in self.bad_sequence_ids:
                errors[slot] = (Reason.ERROR, "logits are not finite")
                row.is_finished = True
                continue
            first = row.num_computed_tokens + 1
            state = self._compute(row, count)
            # The logits of a token are about the one after it.
            if positions := range(
                max(first, row.prompt_logprobs_from),
                min(row.num_computed_tokens, row.num_prompt_tokens - 1) + 1,
            ):
                prompt_logprobs[slot] = positions
            if row.gap == 0:
                given = self._sample(state, row, drafted)
                slots.append(slot)
                tokens += given
                counts.append(len(given))
                if (reason := self._end(row)) is not None:
                    finished[slot] = reason
        budget = self.spec.mixed_budget if is_mixed else self.spec.step_tokens_max
        assert computed <= budget, "budget exceeded"
        result = StepResult(
            worker_id=self.id,
            plan_id=plan.plan_id,
            step=self.steps_done,
            slots=tuple(slots),
            tokens=tuple(tokens),
            token_counts=tuple(counts) if self.spec.slot_tokens_max > 1 else (),
            finished=finished,
            errors=errors,
            prompt_logprobs=prompt_logprobs,
            is_last=self._is_last(plan),
            step_us=self.base_us + computed * self.token_us,
        )
        self.steps_done += 1
        self.steps_total += 1
        if result.is_last:
            self.plan = None
        return result

    def _drafted(self, row: Row) -> int:
        """Tokens tried beside the one that is certain, as far as the output goes on."""
        left = row.max_tokens - (len(row.tokens) - row.num_prompt_tokens)
        return min(self.spec.slot_tokens_max, left) - 1

    def _sample(self, state: int, row: Row, drafted: int) -> list[int]:
        """The next tokens. KV of the other drafts was written too: it is wrong."""
        end = row.num_computed_tokens + drafted
        position = len(row.tokens) - row.num_prompt_tokens
        accepted = tokens_given(row.sequence_id, position, drafted + 1) - 1
        given = [self._next_token(state, row)]
        row.tokens.append(given[0])
        while len(given) <= accepted and given[-1] != STOP_TOKEN:
            given.append(self._next_token(self._compute(row, 1), row))
            row.tokens.append(given[-1])
        refused = [WRONG] * (end - row.num_computed_tokens)
        for group in range(len(row.blocks)):
            self._write(row, group, row.num_computed_tokens, refused)
        return given

    def _next_token(self, state: int, row: Row) -> int:
        return next_token(state, row.sequence_id, self.spec.vocab_size, self.stop_every)

    def _compute(self, row: Row, count: int) -> int:
        done = row.num_computed_tokens
        # Of every prefix, from the empty one on. A row's tokens only become more.
        for token in row.tokens[len(row.digests) - 1 : done + count]:
            row.digests.append(digest(row.digests[-1], token))
        for group, window in enumerate(self.spec.windows):
            # The first token of the step attends to these.
            first = 0 if window is None else max(0, done - window + 1)
            assert self._read(row, group, first, done) == row.content(group, first, done), (
                f"{row.sequence_id}: foreign KV in positions {first} to {done} of group {group}"
            )
        for group in range(len(self.spec.windows)):
            self._write(row, group, done, row.content(group, done, done + count))
        row.num_computed_tokens += count
        return row.digests[done + count]

    def _read(self, row: Row, group: int, start: int, end: int) -> list[int]:
        """What is in the places of positions [start, end), block by block."""
        size, blocks, found = self.spec.block_size, row.blocks[group], list[int]()
        for index in range(start // size, -(-end // size)):
            block, before = blocks[index], index * size
            assert block is not None, f"{row.sequence_id}: {before} of group {group} was skipped"
            found += self.kv[block][max(0, start - before) : end - before]
        return found

    def _write(self, row: Row, group: int, start: int, content: list[int]) -> None:
        size, blocks = self.spec.block_size, row.blocks[group]
        for position, one in enumerate(content, start):
            block = blocks[position // size]
            assert block is not None, f"{row.sequence_id}: {position} of group {group} was skipped"
            self.kv[block][position % size] = one

    def _check_tables(self) -> None:
        for row in self.rows.values():
            assert len(row.blocks) == len(self.spec.windows)
            for blocks in row.blocks:
                assert all(b is None or 0 <= b < self.spec.block_count for b in blocks)

    def _end(self, row: Row) -> Reason | None:
        if row.tokens[-1] == STOP_TOKEN:
            reason = Reason.STOP
        elif len(row.tokens) - row.num_prompt_tokens >= row.max_tokens:
            reason = Reason.LENGTH
        else:
            return None
        row.is_finished = True
        return reason

    def _is_last(self, plan: Plan) -> bool:
        can_run_on = any(row.gap == 1 and not row.is_finished for row in self.rows.values())
        return self.steps_done + 1 >= plan.lease_steps or not can_run_on
