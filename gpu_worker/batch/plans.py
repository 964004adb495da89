"""The worker's words: what a plan asks for and what a step answers. Values only.

`wire.plan_from_proto` gives a plan its shape; whether it fits the batch is for `plan_validation`.
"""

from dataclasses import dataclass
from enum import Enum

from service_kit.errors import OutOfOrder

LEASE_STEPS_MAX = 4096
STOP_TOKENS_MAX = 256
BIASES_MAX = 1024
BAD_WORDS_MAX = 64
BAD_WORD_TOKENS_MAX = 32


class InvalidPlan(OutOfOrder):
    """The plan does not fit the batch; nothing was changed. The leader must open a new stream."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    epoch: int
    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    # -1: none; 0: the sampled token's own.
    logprobs: int
    # 1: none.
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    # (token id, bias), each id once.
    logit_bias: tuple[tuple[int, float], ...]
    # Empty: all.
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    # As llguidance reads it; empty: none.
    grammar: str = ""
    # Likeliest tokens beside each of the prompt's own. None: no prompt logprobs.
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks of a row in one layer group, and how many before them its window has left."""

    blocks: tuple[int, ...]
    num_skipped_blocks: int = 0

    def __len__(self) -> int:
        """Those that were left included."""
        return self.num_skipped_blocks + len(self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    slot: int
    sequence_id: int
    # Prompt and output committed so far; `prompt_tokens` of them are the prompt.
    token_ids: tuple[int, ...]
    prompt_tokens: int
    num_computed_tokens: int
    # Of each layer group.
    block_tables: tuple[BlockTable, ...]
    sampling: RowSampling
    # Prompt logprobs before this position were answered already.
    prompt_logprobs_from: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    leader: Leader
    plan_id: int
    lease_steps: int
    leaves: tuple[int, ...]
    joins: tuple[Join, ...]
    # (slot, block, layer group): the block becomes the next one of the slot's row.
    appends: tuple[tuple[int, int, int], ...]
    # (slot, index, block, layer group): the block, of equal content, takes the place of the row's
    # block number `index`.
    replacements: tuple[tuple[int, int, int, int], ...] = ()
    # (source, target) blocks, in this order and before any copy: numbers from the worker's
    # block_count on are host blocks, one of each two.
    swaps: tuple[tuple[int, int], ...] = ()
    # (source, target) blocks, copied before the first step.
    copies: tuple[tuple[int, int], ...]
    # (slot, tokens) computed in the first step.
    chunks: tuple[tuple[int, int], ...]
    # That a step may give a row which decodes; there are places for so many.
    slot_tokens_most: int = 1
    membership_checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    slot: int
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.top_token_ids) == len(self.top_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPromptLogprobs:
    """Of the prompt positions from `position` on; the likeliest of each follow one another."""

    slot: int
    position: int
    logprobs: tuple[float, ...]
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.top_token_ids) == len(self.top_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step did to the batch."""

    # A slot that was given several tokens stands there as often, in their order.
    slots: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...] = ()
    finished: tuple[tuple[int, FinishReason], ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    # Slots of those whom their own rules left no token.
    unsatisfiable: tuple[int, ...] = ()
    prompt_logprobs: tuple[RowPromptLogprobs, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.slots) == len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    wait_us: int
    forward_us: int
    sample_us: int
    tokens_computed: int
    rows: int
    # Of the tokens computed, those that were drafted.
    drafted: int = 0
    # The step was launched as a recorded graph.
    is_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    plan_id: int
    step: int
    outcome: StepOutcome
    is_last: bool
    timings: StepTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    # To which its layers attend; None: to everything.
    window_tokens: int | None
    layer_count: int
    # Of the longest sequence, at once.
    blocks_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What this worker is; fixed while the process lives."""

    boot_id: str
    model: str
    fingerprint: str
    architecture: str
    dtype: str
    kv_dtype: str
    device: str
    vocab_size: int
    context_tokens_max: int
    layer_groups: tuple[LayerGroup, ...]
    block_size: int
    block_count: int
    slots_max: int
    step_tokens_max: int
    # Of a step in which somebody decodes.
    mixed_tokens_max: int
    weights_digest: str
    # Of the tokenizer.json beside the weights; empty: there is none.
    tokenizer_digest: str
    reads_grammars: bool = False
    # That one step may give one row.
    slot_tokens_max: int = 1
    # Of KV in the host's memory. 0: it keeps none there.
    host_block_count: int = 0
