"""What comes of a command: the one value that leaves the core. Whoever applied it performs it."""

from dataclasses import dataclass, field
from enum import Enum

from scheduler_svc.core.types import BlockId, Reason, SequenceId, SlotIndex

# Slot, the block's index in the slot's table, the block that takes its place, layer group.
Replacement = tuple[SlotIndex, int, BlockId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A sequence takes a slot, with blocks for what it is to compute first."""

    slot: SlotIndex
    sequence_id: SequenceId
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    # By layer group: how many blocks at the front no token to come attends to, and the others.
    block_tables: tuple[tuple[int, tuple[BlockId, ...]], ...]
    # Prompt logprobs are wanted from this position on; `num_prompt_tokens`: none.
    prompt_logprobs_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a worker does next, as a diff of its batch. Applied in the order of the fields."""

    worker_id: str
    plan_id: int
    lease_steps: int
    leaves: tuple[SlotIndex, ...]
    joins: tuple[Join, ...]
    # Slot, block, and its layer group.
    appends: tuple[tuple[SlotIndex, BlockId, int], ...]
    # Of blocks that are given back for others of equal content.
    replacements: tuple[Replacement, ...]
    # Between the pool and blocks in the host's memory, in this order.
    swaps: tuple[tuple[BlockId, BlockId], ...]
    copies: tuple[tuple[BlockId, BlockId], ...]
    chunks: tuple[tuple[SlotIndex, int], ...]
    checksum: int
    # For readers: the decision in their words.
    preempted: tuple[SequenceId, ...]
    decode_rows: int
    blocks_free: int
    waiting: int

    @property
    def admitted(self) -> tuple[SequenceId, ...]:
        """Sequence ids that joined with this plan."""
        return tuple(join.sequence_id for join in self.joins)

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens computed by the first step."""
        return sum(count for _, count in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One choice ended. Exactly one per choice."""

    sequence_id: SequenceId
    reason: Reason
    num_output_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOver:
    """Every choice of a request has ended; the core has forgotten it."""

    id: str
    sequence_id: SequenceId
    num_prompt_tokens: int
    num_cached_tokens: int
    outputs: tuple[tuple[int, ...], ...]
    endings: tuple[Finished, ...]
    queue_ns: int
    prefill_ns: int
    decode_ns: int
    num_preemptions: int

    @property
    def num_output_tokens(self) -> int:
        """Over all choices."""
        return sum(len(output) for output in self.outputs)


Event = Finished | RequestOver


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """What a step brought that counts. The first four are parallel, one entry per token."""

    slots: tuple[SlotIndex, ...]
    # The same list while the same rows go on.
    sequence_ids: list[SequenceId]
    # Of the token in the sequence's output, from 0.
    positions: list[int]
    tokens: tuple[int, ...]
    # Whose prompt log-probabilities of the result count.
    prompt_logprobs: dict[SlotIndex, SequenceId] = field(default_factory=dict)


class Why(Enum):
    """Why a stage of the planner passed somebody over."""

    # No plan, or nobody joins.
    PLANS_IN_FLIGHT = "the worker has not answered the plans it has"
    NOTHING_CHANGED = "the worker runs on by itself"
    DRAINING = "the worker is draining"
    LATE = "a step of the worker is overdue"
    STORE_BEHIND = "the store has not acknowledged what was decided"
    NO_SLOT = "every slot is taken"
    NO_BUDGET = "another prefill could not be promised its minimum of every step"
    PREEMPTED = "somebody was preempted by this very plan"
    CADENCE = "the queue is not looked at yet"
    # A sequence, or all behind it too.
    TOO_LARGE = "it fits another worker only"
    SUSPECT = "one suspect at a time"
    VERDICT = "nobody knows yet whether the workers it lost died of it"
    ANOTHER_WORKER = "another worker can start it now"
    TENANT = "its tenant has as much running as it may"
    LONG_PREFILL = "as many long prompts as may be are being computed"
    BLOCKS = "too few blocks are free"
    MARGIN = "too few blocks would stay free"
    WORST_CASE = "at its longest it does not fit"
    RESERVED = "at its longest it does not fit beside those that may not be preempted either"
    BATCH = "the batch runs out first"
    BATCH_GAP = "with it the gaps of others would be longer than flex requests may make them"
    # A flex sequence leaves the batch.
    PLACE_NEEDED = "one that is not flex needs its place"
    STEPS_TOO_LONG = "with it the gaps of others are longer than flex requests may make them"
    # The lease is shorter than it might be.
    END_IS_NEAR = "somebody waits, and a slot will be free soon"
    PREFILL = "a prefill goes on"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Whom a stage of the planner passed over, and why; None: whoever it might have been."""

    stage: str
    why: Why
    sequence_id: SequenceId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command changed that the world must hear of."""

    tokens: StepTokens | None = None
    events: tuple[Event, ...] = ()
    # Of MakePlan; None: the worker needs none now, and nothing was changed.
    plan: Plan | None = None
    passed_over: tuple[PassedOver, ...] = ()
    # Of MakePlan: there was none because it is early; ask again then. Whoever does not is named the
    # worker again with its next result.
    again_ns: int | None = None
    # Workers whose next MakePlan may bring a plan; that of every other brings none.
    workers: tuple[str, ...] = ()
