"""Penalties, biases and bans give bit for bit the logits of transformers, or of the formula."""

import json
import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.row_rules import RowRules, edits_of
from kernels.sampling.logit_edits import EditTensors, edit_logits
from tests.support import warm_python
from tests.support.mini_scheduler import sampling

VOCAB: Final = 61
CASES: Final = 300


def random_case(rng: random.Random) -> dict[str, Any]:
    """Few distinct tokens, so that everything meets everything; a prompt may be all there is."""
    ids = range(VOCAB)
    few = rng.sample(ids, 9)
    allowed = rng.sample(ids, rng.randint(20, VOCAB)) if rng.random() < 0.3 else []
    biased = rng.sample(ids, rng.randint(0, 6))
    return {
        "scores": [float(np.float32(rng.gauss(0, 4))) for _ in ids],
        "prompt": rng.choices(few, k=rng.randint(1, 12)),
        "output": rng.choices(few, k=rng.randint(0, 30)),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 2.0, 0.5, 0.01]),
        "logit_bias": [(each, float(np.float32(rng.uniform(-100, 100)))) for each in biased],
        "bad_words": [rng.choices(few, k=rng.randint(1, 3)) for _ in range(rng.randint(0, 8))],
        "allowed_token_ids": allowed,
    }


def edited(cases: list[dict[str, Any]], **penalties: list[float]) -> npt.NDArray[np.float32]:
    """All rows in one call. Half of the output is given at the join, the rest is sampled."""
    rules = []
    for row, case in enumerate(cases):
        prompt, output = case["prompt"], case["output"]
        wishes = {
            "repetition_penalty": case["repetition_penalty"],
            "logit_bias": tuple(case["logit_bias"]),
            "allowed_token_ids": tuple(case["allowed_token_ids"]),
            "bad_words": tuple(map(tuple, case["bad_words"])),
        }
        wishes |= {name: values[row] for name, values in penalties.items()}
        half = len(output) // 2
        each = RowRules(sampling(**wishes), (*prompt, *output[:half]), len(prompt), VOCAB)
        for token_id in output[half:]:
            each.see(token_id)
        rules.append((row, each))
    edits = edits_of(rules, [], len(cases))
    assert edits is not None
    logits = torch.tensor([case["scores"] for case in cases])
    names = EditTensors.__dataclass_fields__
    edit_logits(
        logits, EditTensors(**{name: torch.from_numpy(getattr(edits, name)) for name in names})
    )
    return logits.numpy()


def test_every_row_has_the_logits_of_transformers(tmp_path: Path) -> None:
    cases = [random_case(random.Random(seed)) for seed in range(CASES)]
    question, target = tmp_path / "cases.json", tmp_path / "scores.npy"
    question.write_text(json.dumps(cases))
    program = "-m", "tests.parity.processors_process", str(question), str(target)
    done = warm_python.run(*program, imports=warm_python.TRANSFORMERS)
    assert done.code == 0, done.err[-4000:]
    expected = np.load(target)
    assert np.isneginf(expected).any(axis=1).sum() > CASES / 4, "the cases forbid too little"
    np.testing.assert_array_equal(edited(cases), expected)


def test_presence_and_frequency_follow_the_formula() -> None:
    """logit - frequency * count - presence * (count > 0), after the repetition penalty."""
    cases = [
        random_case(random.Random(seed)) | {"bad_words": [], "allowed_token_ids": []}
        for seed in range(CASES)
    ]
    rng = random.Random(7)
    presence = [round(rng.uniform(-2, 2), 2) for _ in cases]
    frequency = [round(rng.uniform(-2, 2), 2) for _ in cases]
    found = edited(cases, presence_penalty=presence, frequency_penalty=frequency)
    plain = edited(cases)
    one = np.float32(1)
    for row, case in enumerate(cases):
        for token_id in range(VOCAB):
            count = case["output"].count(token_id)
            expected = plain[row, token_id] - np.float32(frequency[row]) * np.float32(count)
            expected -= np.float32(presence[row]) * one if count else np.float32(0)
            assert found[row, token_id] == expected, (row, token_id)
