"""What a step is made of, and what a model runner is to the engine: it computes steps.

Engine, rows and server are the same for every runner; tests put a function in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gpu_worker.batch.plans import RowSampling

IntArray = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[np.generic]
# (source, target) of each.
BlockPairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """What rows change in their own logits, as parallel (row of the Q, token id) entries.

    Order and arithmetic are those of `kernels.sampling.logit_edits`.
    """

    bias_rows: IntArray
    bias_ids: IntArray
    biases: FloatArray
    seen_rows: IntArray
    seen_ids: IntArray
    # Times in the output; 0: in the prompt only.
    seen_counts: FloatArray
    # [Q] each.
    repetition: FloatArray
    presence: FloatArray
    frequency: FloatArray
    forbidden_rows: IntArray
    forbidden_ids: IntArray
    allowed_rows: IntArray
    allowed_ids: IntArray

    @property
    def arrays(self) -> tuple[AnyArray, ...]:
        """In the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """What G rows may sample at all, by their grammars."""

    rows: IntArray  # [G] index into the Q rows
    bits: IndexArray  # [G, vocab / 32] a bit for each token that may come


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """One entry per sampled row (Q of them)."""

    temperature: FloatArray
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    # The 64 bits of the seed, seen as signed.
    seed: IntArray
    choice: IntArray
    # Index of the token in the output.
    position: IntArray
    # Log-probabilities wanted: -1 none, 0 the sampled token's own, k the k likeliest too.
    logprobs: IntArray
    # Gathered when called, as the rows are then; None: nobody changes its logits.
    edits: Callable[[], LogitEdits | None]
    # To be called while the step computes: it waits for the tokens that the step before samples.
    # None: no row has a grammar.
    masks: Callable[[], TokenMasks] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobTokens:
    """Prompt tokens whose log-probabilities are wanted (E of them), row after row."""

    rows: IntArray  # [E] index into the R rows, rising
    positions: IntArray  # [E] in the prompt
    # [E] index into the T tokens: the one before, whose logits are about it.
    computed: IntArray
    token_ids: IntArray  # [E]
    # [E] how many of the likeliest besides.
    tops: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEnds:
    """Of each sampled row, as it was before the step: what decides whether its token is its last.

    A result may be read when its rows have gone on, or left and given their slots to others.
    """

    # The plan with which the row joined.
    joined: IntArray  # [Q]
    num_tokens: IntArray  # [Q]
    limit: IntArray  # [Q]
    masked_until: IntArray  # [Q]
    stops: IntArray  # [Q, longest list], padded with -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """Where keys and values are; a device that holds the rows itself knows."""

    block_tables: IndexArray  # [layer groups, R, blocks of the longest row]
    slot_mapping: IntArray  # [layer groups, T] block * block_size + offset


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One ragged step: T tokens of R rows, and what is sampled after Q of them: after the last of
    each row that closes its gap, and after those drafted behind it."""

    slots: IntArray  # [R]
    sequence_ids: npt.NDArray[np.uint64]  # [R]
    counts: IntArray  # [R] tokens of each row
    query_starts: IndexArray  # [R + 1]
    context_lengths: IndexArray  # [R] including this step's tokens
    token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    # Gathered when called, as the rows are then.
    tables: Callable[[], StepTables]
    # [Q] index into the R rows, rising; once per drafted token of a row, and once more
    sampled_rows: IntArray
    sampled_tokens: IntArray  # [Q] index into the T tokens
    sampling: SamplingColumns
    ends: RowEnds
    # None: nobody wants log-probabilities of its prompt.
    prompt_logprobs: PromptLogprobTokens | None = None
    # [R] of `counts`, those at the end that are drafted. None: none is.
    drafts: IntArray | None = None

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    @property
    def row_count(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokenLogprobs:
    """One entry per `PromptLogprobTokens`; k is the largest number asked for. NaN: no numbers."""

    logprob: FloatArray  # [E]
    top_token_ids: IntArray  # [E, k]
    top_logprobs: FloatArray  # [E, k]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """One entry per sampled row, in the order of `StepInputs.sampled_rows`."""

    token_ids: IntArray  # [Q]
    # False: the row's logits were not numbers; its token means nothing.
    is_ok: BoolArray  # [Q]
    # Rows that asked for log-probabilities: index into the Q rows; k is the largest asked for.
    logprob_rows: IntArray  # [P]
    logprob: FloatArray  # [P]
    top_token_ids: IntArray  # [P, k]
    top_logprobs: FloatArray  # [P, k]
    forward_us: int
    sample_us: int
    # Launched as a recorded graph.
    is_graph: bool = False
    # [Q] False: the row had ended in a step before, which was not known at the launch. None: all.
    is_there: BoolArray | None = None
    # Of `StepInputs.prompt_logprobs`.
    prompt_logprobs: PromptTokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChanges:
    """Rules of C rows that joined, as `kernels.rows.edit_rows.RuleState` holds them."""

    slots: IntArray  # [C]
    bias_ids: IndexArray  # [C, longest list], padded with -1
    biases: FloatArray
    words: IndexArray  # [C, most words, RECENT], padded with -1
    recent: IndexArray  # [C, RECENT]
    allowed: IndexArray  # [C, vocab / 32] bits
    # slot * vocab + id, and what `seen` says there; 0 elsewhere.
    seen: IntArray
    seen_times: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """What a plan changed, for a device that holds the rows itself: C slots, B places of blocks."""

    slots: IntArray  # [C] distinct
    # By INT_COLUMNS; all 0 for a row that left.
    ints: IntArray  # [columns, C]
    # By FLOAT_COLUMNS.
    floats: FloatArray  # [columns, C]
    stops: IndexArray  # [C, longest list], padded with -1
    # (layer group * slots + slot) * width of a table + index of the block in the row.
    places: IntArray  # [B]
    blocks: IndexArray  # [B]
    # None: nobody who joined has any.
    rules: RuleChanges | None = None


INT_COLUMNS: Final = (
    "is_live", "num_tokens", "num_computed_tokens", "limit", "prompt", "masked_until", "last_token",
    "top_k", "seed", "choice", "logprobs", "kinds",
)  # fmt: skip
FLOAT_COLUMNS: Final = (
    "temperature", "top_p", "min_p", "repetition", "presence", "frequency",
)  # fmt: skip


class GrammarRow(Protocol):
    """One row's. What it says after the row has left is what it said last."""

    @property
    def problem(self) -> str:
        """Why the row cannot go on; empty: its grammar knows no reason."""

    def next_mask(self) -> IndexArray:
        """A bit for each token that may come next, for all of the vocabulary."""


class Grammars(Protocol):
    """What rows with grammars may sample: `grammar_masks.GrammarMasks`."""

    def join(self, slot: int, sampling: RowSampling, output: Sequence[int]) -> None:
        """`output`: the tokens sampled so far."""

    def leave(self, slot: int) -> None: ...

    def see(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """These rows sampled these tokens, and go on."""

    def masks(self, slots: Sequence[int]) -> IndexArray:
        """[rows, vocabulary / 32] of these rows: a bit for each token that may come next."""

    def row(self, slot: int) -> GrammarRow: ...


class ModelRunner(Protocol):
    """One that the host takes turns with: `EagerRunner`, or a function in a test."""

    def swap_blocks(self, pairs: BlockPairs) -> None:
        """Copy the KV of each source block to its target, one pair after the other.

        One of each two is a host block.
        """

    def copy_blocks(self, pairs: BlockPairs) -> None:
        """Copy the KV of each source block to its target. No block is both."""

    def execute(self, step: StepInputs) -> StepSamples:
        """Compute the step. Repeating it, whole or row by row, gives the same result."""


class DeviceLost(Exception):
    """The device failed while it computed. What it held is lost, and so is it to this process."""


class Flight(Protocol):
    """A step on its way."""

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""

    def result(self) -> StepSamples:
        """Wait for it. Raises DeviceLost."""


@runtime_checkable
class AheadRunner(Protocol):
    """One that holds the rows itself: steps are launched before the last is read. `GraphRunner`.

    All calls are in the order of the plans and come from one thread.
    """

    def clear(self) -> None:
        """No rows."""

    def apply(self, changes: RowChanges, swaps: BlockPairs, copies: BlockPairs) -> None:
        """Take a plan's changes to the rows, swap and then copy blocks, as `ModelRunner` does.

        After the steps launched so far.
        """

    def launch(self, step: StepInputs) -> Flight:
        """Begin a step and return at once.

        `step` is built from what is expected of the steps still on their way: token ids that they
        sample are not in it, and rows that they end are. The device knows better. If it raises, it
        has left the rows as they were, so that others, or the same, may be launched instead.
        """

    def finish(self) -> None:
        """Wait for everything launched so far. Raises DeviceLost."""
