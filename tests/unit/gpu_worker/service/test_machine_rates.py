"""What `kaiten doctor --bench` tells of this machine and of steps on it."""

import itertools
import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from gpu_worker.model.config import config_from_json
from gpu_worker.service import machine_rates
from gpu_worker.service.machine_rates import (
    ROWS,
    TimedModel,
    decode_floor_s,
    main,
    matmul_flops_per_s,
    products,
)
from tests.support.random_model import LLAMA, write_random_model

# 2 layers of 32: 4 heads and 2 of keys of 8, 48 inside, 97 words.
CONFIG = config_from_json(LLAMA)
LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3
HEAD = 32 * 97


def test_every_weight_multiplies_every_token_but_where_nobody_looks() -> None:
    """Of the last layer's other tokens only keys and values are wanted, and of the head nothing."""
    assert products(CONFIG, 1, 1) == 2 * LAYER + HEAD
    assert products(CONFIG, 5, 1) == 5 * LAYER + 4 * 32 * 16 * 2 + LAYER + HEAD


@pytest.mark.parametrize(
    ("rows", "read", "flops", "floor_s"),
    [
        # Reading the weights takes longer than multiplying; then the other way round.
        (1, 1e6, 1e12, 4 * (2 * LAYER + HEAD) / 1e6 + 100 * 2 * 2 * 16 * 4 / 1e6),
        (64, 1e12, 1e6, 64 * 2 * (2 * LAYER + HEAD) / 1e6 + 64 * 100 * 2 * 2 * 16 * 4 / 1e12),
    ],
)
def test_the_floor(rows: int, read: float, flops: float, floor_s: float) -> None:
    assert decode_floor_s(CONFIG, rows, 100, 4, read, flops) == pytest.approx(floor_s)


@pytest.mark.parametrize(
    ("has_bf16", "fastest"),
    [*itertools.product([False], range(3)), *itertools.product([True], range(4))],
)
def test_the_matrix_rate_is_that_of_the_fastest_path(
    has_bf16: bool, fastest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 may be emulated, and then is no ceiling of anything; or be oneDNN's by tiles."""
    has = {torch.float32: True, torch.bfloat16: has_bf16}
    monkeypatch.setattr(machine_rates, "onednn_has", has.__getitem__)
    reads = count()

    def clock() -> float:
        read = next(reads)
        path, is_end = read // 18, read % 2
        return read + is_end * (0.25 if path == fastest else 1.0)

    # An end is one read after its beginning.
    rate = matmul_flops_per_s(torch.bfloat16, 8, clock)
    assert rate == pytest.approx(2 * 8**3 / 1.25)
    assert next(reads) == (3 + has_bf16) * 18


def test_layers_that_would_fill_the_memory_are_not_all_made() -> None:
    wide = replace(CONFIG, hidden_size=2048, inner_size=8192, blocks=CONFIG.blocks * 8)
    made = TimedModel(wide, torch.bfloat16)
    assert len(made._layers) == 3
    assert made.step_s(1, 16, repeats=1) > 0


def test_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_random_model(tmp_path / "model")
    threads = torch.get_num_threads()
    assert main(["--model", str(model), "--dtype", "fp32", "--threads", "1"]) == 0
    torch.set_num_threads(threads)
    told = json.loads(capsys.readouterr().out)
    assert (told["dtype"], told["threads"]) == ("fp32", 1)
    assert told["read_gb_s"] > 0 < told["products_gflop_s"]
    assert [step["rows"] for step in told["steps"]] == [*ROWS]
    assert all(step["timed_ms"] > 0 < step["floor_ms"] for step in told["steps"])


def test_what_is_no_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["--model", str(tmp_path)]) == 2
    assert "gpt2" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
