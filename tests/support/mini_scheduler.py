"""The least scheduler that can drive a worker: no prefix cache, no preemption, one plan at a time.

Blocks are granted as a lease needs them; a request joins when its whole length is sure to fit.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import (
    BlockTable,
    FinishReason,
    Join,
    Leader,
    Plan,
    RowLogprobs,
    RowPromptLogprobs,
    RowSampling,
    StepOutcome,
)

LEADER = Leader(epoch=1, nonce=7)


def sampling(**changes: object) -> RowSampling:
    """Greedy, without end, sixteen tokens."""
    base: dict[str, object] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "choice": 0,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop_token_ids": (),
        "logprobs": -1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "allowed_token_ids": (),
        "bad_words": (),
    }
    return RowSampling(**(base | changes))  # type: ignore[arg-type]


def checksum(members: Sequence[tuple[int, int]]) -> int:
    """Of (slot, sequence id) pairs, as worker_service.proto defines it."""
    return sum((sequence_id + 1) * (2 * slot + 1) for slot, sequence_id in members) % (1 << 64)


def plan(plan_id: int, **changes: object) -> Plan:
    """An empty plan of one step."""
    base: dict[str, object] = {
        "leader": LEADER,
        "plan_id": plan_id,
        "lease_steps": 1,
        "leaves": (),
        "joins": (),
        "appends": (),
        "copies": (),
        "chunks": (),
        "membership_checksum": 0,
    }
    return Plan(**(base | changes))  # type: ignore[arg-type]


@dataclass
class _Running:
    sequence_id: int
    limit: int
    known: int
    done: int
    blocks: list[int]
    # Of the layer groups after the first, which has as many in each; nothing is ever given back.
    others: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def gap(self) -> int:
        return self.known - self.done


@dataclass
class MiniScheduler:
    limits: RowLimits
    chunk_tokens: int = 1 << 30
    lease_steps: int = 1
    # While there are prompts, who decodes sits the first step of each plan out.
    decodes_wait: bool = False
    # Sequence id, tokens known, how many of them are the prompt.
    waiting: deque[tuple[int, list[int], int, RowSampling]] = field(default_factory=deque)
    running: dict[int, _Running] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[RowLogprobs]] = field(default_factory=dict)
    # Pieces in order.
    prompts: dict[int, list[RowPromptLogprobs]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    plan_id: int = 0

    def __post_init__(self) -> None:
        # Highest first, so that block ids and token positions never agree by accident.
        self._free = list(range(self.limits.block_count))
        self._slots = list(range(self.limits.slots))

    def submit(
        self, prompt: Sequence[int], params: RowSampling, *, committed: Sequence[int] = ()
    ) -> int:
        """`committed` is output of an earlier life."""
        sequence_id = len(self.outputs)
        self.outputs[sequence_id], self.logprobs[sequence_id] = [], []
        self.waiting.append((sequence_id, [*prompt, *committed], len(prompt), params))
        return sequence_id

    def next_plan(self) -> Plan | None:
        """None when everything has finished."""
        leaves = tuple(slot for slot, row in self.running.items() if row.is_finished)
        for slot in leaves:
            row = self.running.pop(slot)
            self._free += row.blocks + row.others
            self._slots.append(slot)
        joins = tuple(self._joins())
        if not self.running:
            return None
        chunks = self._chunks()
        appends = self._appends(dict(chunks))
        self.plan_id += 1
        return plan(
            self.plan_id,
            lease_steps=self.lease_steps,
            leaves=leaves,
            joins=joins,
            appends=appends,
            chunks=chunks,
            slot_tokens_most=self.limits.slot_tokens,
            membership_checksum=checksum([(s, row.sequence_id) for s, row in self.running.items()]),
        )

    def on_outcome(self, computed: Plan, step: int, outcome: StepOutcome) -> None:
        """Advance the rows by one step of a plan."""
        chunks = dict(computed.chunks) if step == 0 else {}
        for slot, row in self.running.items():
            if not row.is_finished:
                row.done += chunks.get(slot, 1 if row.gap == 1 else 0)
        for slot, count in Counter(outcome.slots).items():
            self.running[slot].known += count
            # Behind the one that was certain, drafts that were accepted.
            self.running[slot].done += count - 1
        for slot, token in zip(outcome.slots, outcome.token_ids, strict=True):
            self.outputs[self.running[slot].sequence_id].append(token)
        for item in outcome.logprobs:
            self.logprobs[self.running[item.slot].sequence_id].append(item)
        for piece in outcome.prompt_logprobs:
            self.prompts.setdefault(self.running[piece.slot].sequence_id, []).append(piece)
        for slot, reason in outcome.finished:
            self.running[slot].is_finished = True
            self.reasons[self.running[slot].sequence_id] = reason
        for slot, text in outcome.errors:
            self.running[slot].is_finished = True
            self.errors[self.running[slot].sequence_id] = text

    def _joins(self) -> list[Join]:
        joins = []
        while self.waiting and self._slots:
            sequence_id, tokens, prompt_tokens, params = self.waiting[0]
            limit = min(prompt_tokens + params.max_tokens, self.limits.context_tokens)
            if self._promised() + self._blocks_for(limit) * self.limits.groups > len(self._free):
                break
            self.waiting.popleft()
            slot = self._slots.pop(0)
            self.running[slot] = _Running(sequence_id, limit, len(tokens), 0, [])
            joins.append(
                Join(
                    slot=slot,
                    sequence_id=sequence_id,
                    token_ids=tuple(tokens),
                    prompt_tokens=prompt_tokens,
                    num_computed_tokens=0,
                    block_tables=(BlockTable(()),) * self.limits.groups,
                    sampling=params,
                )
            )
        return joins

    def _promised(self) -> int:
        missing = (self._blocks_for(row.limit) - len(row.blocks) for row in self.running.values())
        return sum(missing) * self.limits.groups

    def _chunks(self) -> tuple[tuple[int, int], ...]:
        decodes = sum(row.gap == 1 for row in self.running.values())
        budget = self.limits.step_tokens - decodes * self.limits.slot_tokens
        chunks = []
        for slot, row in self.running.items():
            count = min(row.gap, self.chunk_tokens, budget)
            if row.gap > 1 and count > 0:
                chunks.append((slot, count))
                budget -= count
        if chunks and self.decodes_wait:
            chunks += [(slot, 0) for slot, row in self.running.items() if row.gap == 1]
        return tuple(chunks)

    def _appends(self, chunks: dict[int, int]) -> tuple[tuple[int, int, int], ...]:
        appends, most = [], self.limits.slot_tokens
        for slot, row in self.running.items():
            after = row.done + chunks.get(slot, 1 if row.gap == 1 else 0)
            if row.known - after <= 1:
                after += (self.lease_steps - 1) * most
            if row.gap == 1 and slot not in chunks:
                after += most - 1
            while len(row.blocks) < self._blocks_for(min(after, row.limit - 1)):
                row.blocks.append(self._free.pop())
                appends.append((slot, row.blocks[-1], 0))
                for group in range(1, self.limits.groups):
                    row.others.append(self._free.pop())
                    appends.append((slot, row.others[-1], group))
        return tuple(appends)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)
