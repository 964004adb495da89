"""Why a row of whose next token nothing can be said ends: its own rules, or the model."""

from typing import NamedTuple

import numpy as np

from gpu_worker.batch.row_rules import RowRules
from gpu_worker.batch.step_types import GrammarRow, IntArray, RowEnds


class Restraints(NamedTuple):
    """What one row may sample. It can be asked, too, when the row has left."""

    rules: RowRules | None = None
    grammar: GrammarRow | None = None


class Broken(NamedTuple):
    """Why a row ends. `is_unsatisfiable`: by its own rules, not by the model."""

    reason: str
    is_unsatisfiable: bool = True


def why_broken(restraints: Restraints, ends: RowEnds, row: int, vocab_size: int) -> Broken:
    """`row`: which one of `ends`. The restraints are as they were before its step."""
    grammar = restraints.grammar
    if grammar is not None and grammar.problem:
        return Broken(f"structured_outputs: {grammar.problem}")
    is_masked = ends.num_tokens[row] < ends.masked_until[row]
    # Padding among them forbids nothing: it is no token.
    forbidden = ends.stops[row] if is_masked else ends.stops[row, :0]
    if _is_exhausted(restraints, forbidden, vocab_size):
        return Broken(
            "allowed_token_ids, bad_words, min_tokens and structured_outputs leave no token to "
            "sample"
        )
    return Broken("the model's logits are not numbers", is_unsatisfiable=False)


def _is_exhausted(restraints: Restraints, stops: IntArray, vocab_size: int) -> bool:
    """Whether the row's own rules, with these stops, forbid every token it might sample next."""
    may = np.ones(vocab_size, np.bool_)
    rules, grammar = restraints
    if grammar is not None:
        bits = np.unpackbits(grammar.next_mask().view(np.uint8), bitorder="little")
        may[:] = bits[:vocab_size]
    elif rules is not None and len(rules.allowed_ids):
        may[:] = False
        may[rules.allowed_ids] = True
    if rules is not None:
        may[rules.forbidden_ids()] = False
    may[stops[stops >= 0]] = False
    return not may.any()
