"""What transformers' logits processors make of rows of scores; in a process of its own.

Started with QUESTION.json TARGET.npy, as `oracle_process.py` is.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)


def processed(case: dict[str, Any]) -> torch.Tensor:
    """One row, in the order in which `generate` applies them."""
    seen = torch.tensor([case["prompt"] + case["output"]])
    chain = LogitsProcessorList()
    if case["logit_bias"]:
        chain.append(
            SequenceBiasLogitsProcessor([[[each], bias] for each, bias in case["logit_bias"]])
        )
    if case["repetition_penalty"] != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(case["repetition_penalty"]))
    scores: torch.Tensor = chain(seen, torch.tensor([case["scores"]]))
    if case["bad_words"]:
        # Of the output alone, which is what a bad word may not be in.
        output = torch.tensor([case["output"]], dtype=torch.int64)
        scores = NoBadWordsLogitsProcessor(case["bad_words"])(output, scores)
    if case["allowed_token_ids"]:
        allowed = PrefixConstrainedLogitsProcessor(lambda _, __: case["allowed_token_ids"], 1)
        scores = allowed(seen, scores)
    return scores[0]


def main(question: str, target: str) -> None:
    cases = json.loads(Path(question).read_text())
    np.save(target, torch.stack([processed(case) for case in cases]).numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
