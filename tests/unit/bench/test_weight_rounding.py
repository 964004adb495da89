import math
from pathlib import Path

import pytest
import torch

from benchmarks.worker.weight_rounding import compare, held_out, measure, perplexity
from tests.support.random_model import write_random_model


def test_figures_of_known_logits() -> None:
    exact = torch.tensor([[[0.0, 1.0], [2.0, 0.0]]])
    assert compare(exact, exact) == {"logit_error": 0.0, "divergence": 0.0, "agreement": 1.0}
    # The second choice turns; a constant added to all logits says nothing.
    told = torch.tensor([[[5.0, 6.0], [0.0, 2.0]]])
    found = compare(told, exact)
    assert found["agreement"] == 0.5
    assert found["divergence"] == pytest.approx(math.tanh(1.0), abs=1e-6)
    error = math.sqrt((25 + 25 + 4 + 4) / 4) / float(exact.std())
    assert found["logit_error"] == pytest.approx(error, abs=1e-5)


def test_roundings_of_a_model(tmp_path: Path) -> None:
    found = measure(write_random_model(tmp_path / "model", intermediate_size=64), rows=3, tokens=20)
    assert found["fp32"] == {"logit_error": 0.0, "divergence": 0.0, "agreement": 1.0}
    errors = {kind: each["logit_error"] for kind, each in found.items()}
    assert 0 < errors["fp32 int8"] < 0.05
    assert 0 < errors["bf16"] < errors["bf16 int8"] < 0.05
    for kind in ("int4", "int4_asym"):
        assert 2 * errors["fp32 int8"] < errors[f"fp32 {kind}"] < 1
        assert 2 * errors["bf16 int8"] < errors[f"bf16 {kind}"] < 1


def test_perplexity_of_texts() -> None:
    texts = held_out(2, 24)
    assert texts.shape == (24, 2)
    assert (texts[0] == texts[0, 0]).all()

    class Certain:
        """Gives the next token of each text a third of the odds of all others together."""

        def step(self, token_ids: torch.Tensor, position: int) -> torch.Tensor:
            assert torch.equal(token_ids, texts[position])
            odds = torch.full((2, 4096), 3 / 4095)
            return odds.scatter(1, texts[position + 1].unsqueeze(1), 1.0).log()

    assert perplexity(Certain(), texts) == pytest.approx(4.0, rel=1e-4)
