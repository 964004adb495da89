"""The values that commands and outcomes are made of. Frozen, plain, the same on every side."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, repeat

SequenceId = int
SlotIndex = int
BlockId = int

TENANT_WEIGHT_MAX = 1000
# Of flex requests, and no other: the least there is.
FLEX_PRIORITY = -1000


class Reason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ERROR = "error"
    # Of no fault of its own: no worker was there that can do it, so it may be sent again.
    UNSERVED = "unserved"
    # Its own rules left it no token: it is the request that is wrong.
    UNSATISFIABLE = "unsatisfiable"


class Feature(Enum):
    """What a request may want and not every worker can do."""

    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    # Penalties, biases, allowed tokens and bad words.
    LOGITS_PROCESSORS = "logits_processors"
    STRUCTURED_OUTPUTS = "structured_outputs"


class ResultRejected(Exception):
    """A worker's result contradicts its plan.

    Nothing was changed, and the worker is not to be trusted.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What an operator may choose. Token and step counts; see docs/operating.md."""

    # Steps a worker may run on by itself in steady decode.
    lease_steps_max: int = 8
    # Plans sent ahead of the answer to their first step. Two keep the worker busy while we think.
    plans_in_flight_max: int = 2
    # What a waiting prefill gets of every step, at least.
    prefill_tokens_min: int = 16
    # Afterwards a sequence is the last victim, and taken only where it and those like it fit at
    # their longest: so it is not preempted again.
    preemptions_max: int = 3
    # Worker deaths without progress in between: from here a sequence is tried alone, and then
    # failed.
    deaths_max: int = 2
    # A request that fits none of the workers that came since it did, or are left, waits this long.
    misfit_wait_ns: int = 30_000_000_000
    # Running tokens of a tenant whose requests name no bound of their own; None: no bound.
    tenant_tokens_max: int | None = None
    # What the rules of a policy are made with (`policy.rules`). Waiting that a step of priority is
    # worth, and a token: of work for the order `shortest`, of cached prefix for `prefix`.
    priority_worth_ns: int = 5_000_000_000
    token_worth_ns: int = 10_000_000
    # Who has waited longer goes first, whatever the order; None: nobody.
    wait_ns_max: int | None = None
    # Prompts of more tokens are long, and so many of them are computed at once on a worker.
    long_prefill_tokens: int | None = None
    long_prefills_max: int | None = None
    # Of the cadence `interval`: steps between two admissions; waiting per 1000 running from which
    # the queue is looked at; steps after which it is anyway.
    schedule_interval_steps: int | None = None
    waiting_served_permille: int | None = None
    waiting_steps_max: int | None = None
    # How long a step may take in which some decode beside a prompt; None: as long as the worker
    # allows.
    itl_target_us: int | None = None
    # And one with flex requests beside others, or with a prompt of theirs; None: as it comes.
    batch_gap_us: int | None = None
    # Shares of tenants under fair orders, by name; of all others 1.
    tenant_weights: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1")
        for tenant, weight in self.tenant_weights:
            if not 1 <= weight <= TENANT_WEIGHT_MAX:
                raise ValueError(
                    f"tenant_weights: {tenant!r} must weigh 1 to {TENANT_WEIGHT_MAX}, got {weight}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The six rules of a policy as an operator names them (`policy.rules`); empty: the policy's."""

    placement: str = ""
    order: str = ""
    victim: str = ""
    admission: str = ""
    mix: str = ""
    cadence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked for, as far as scheduling is concerned."""

    id: str
    # Of choice 0; choice c has sequence_id + c.
    sequence_id: SequenceId
    n: int = 1
    prompt: tuple[int, ...]
    max_tokens: int
    arrived_ns: int
    deadline_ns: int | None = None
    priority: int = 0
    # Part of every prefix hash: requests of different tenants never share blocks.
    tenant: str = ""
    # What the tenant may have running from now on, as its newest request says; None: what
    # `Config.tenant_tokens_max` says.
    tenant_tokens_max: int | None = None
    # A worker that lacks one of them never runs it.
    needs: frozenset[Feature] = frozenset()
    # Output committed before this core existed, per choice; None for a choice that has ended.
    outputs: tuple[tuple[int, ...] | None, ...] = ()
    # Log-probabilities of the prompt's own tokens are wanted from this position on: 1
    # unless some were committed before this core existed. None: not at all.
    prompt_logprobs_from: int | None = None
    # How long it waits while no worker is there at all; None: for any time.
    worker_wait_ns: int | None = None

    @property
    def is_flex(self) -> bool:
        """It may wait for all that are not, and gives way to them at any time."""
        return self.priority <= FLEX_PRIORITY

    def __post_init__(self) -> None:
        assert self.prompt, "an empty prompt has no next token"
        assert self.n >= 1
        assert self.max_tokens >= 1
        assert len(self.outputs) in (0, self.n)
        assert self.prompt_logprobs_from is None or 1 <= self.prompt_logprobs_from <= len(
            self.prompt
        )
        if self.outputs:
            live = [output for output in self.outputs if output is not None]
            assert live, "every choice has ended"
            assert all(len(output) < self.max_tokens for output in live)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePast:
    """Of one sequence, what is not its tokens."""

    sequence_id: SequenceId
    num_preemptions: int
    deaths: int
    furthest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Bounded: those under whom workers died first, and the tenants that are furthest ahead."""

    sequences: tuple[SequencePast, ...] = ()
    # Tokens served beyond the queue's virtual time, by tenant.
    tenants: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker can hold and do."""

    fingerprint: str
    block_size: int
    block_count: int
    slots_max: int
    step_tokens_max: int
    vocab_size: int
    # Longest prompt + output; None: whatever the blocks hold.
    context_tokens_max: int | None = None
    # Tokens of a step in which somebody decodes; None: `step_tokens_max`.
    mixed_tokens_max: int | None = None
    # Tokens that a step may give a row that decodes. It always gives one at least.
    slot_tokens_max: int = 1
    features: frozenset[Feature] = frozenset()
    # By layer group: a token attends to so many newest tokens, itself included; None: to all.
    windows: tuple[int | None, ...] = (None,)
    # In memory of the host, numbered from `block_count` on: for cached blocks that have to go.
    host_block_count: int = 0

    def __post_init__(self) -> None:
        assert min(self.block_size, self.block_count, self.slots_max, self.slot_tokens_max) >= 1
        assert min(1 if window is None else window for window in self.windows) >= 1
        assert self.step_tokens_max >= self.mixed_budget > self.slots_max * self.slot_tokens_max, (
            "decode rows must leave room for a prefill"
        )

    @property
    def mixed_budget(self) -> int:
        """Tokens of a step in which somebody decodes, and waits for the others' prompts."""
        return self.step_tokens_max if self.mixed_tokens_max is None else self.mixed_tokens_max


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a worker says one step did. Untrusted until the core has checked it."""

    worker_id: str
    plan_id: int
    step: int
    slots: tuple[SlotIndex, ...]
    tokens: tuple[int, ...]
    # How many of the tokens each slot was given, one after the other. Empty: one each.
    token_counts: tuple[int, ...] = ()
    finished: Mapping[SlotIndex, Reason] = field(default_factory=dict)
    # ERROR or UNSATISFIABLE, and why.
    errors: Mapping[SlotIndex, tuple[Reason, str]] = field(default_factory=dict)
    # What it took, waiting aside; 0: not told.
    step_us: int = 0
    # For readers: it was launched as a recorded graph.
    is_graph: bool = False
    # Prompt positions, of rows that advanced a chunk.
    prompt_logprobs: Mapping[SlotIndex, range] = field(default_factory=dict)
    is_last: bool = False

    @property
    def token_slots(self) -> Iterable[SlotIndex]:
        """Of each token."""
        repeated = map(repeat, self.slots, self.token_counts)
        return chain.from_iterable(repeated) if self.token_counts else self.slots
