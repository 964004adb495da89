"""Checkpoints: single and sharded, and each way in which one can be wrong."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.model.checkpoint import Checkpoint, find_checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.weights import (
    Weights,
    expected_shapes,
    fingerprint,
    load_weights,
    weights_digest,
)
from kernels.linear.linear_int8 import Int8Weight
from kernels.linear.packed_linear import WeightDtype
from service_kit.errors import ConfigError
from tests.support.random_model import write_random_model
from tests.support.tolerances import linear_exact

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


def read(
    folder: Path, dtype: torch.dtype = torch.float32, weight_dtype: WeightDtype = "auto"
) -> tuple[Weights, ModelConfig]:
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        weights = load_weights(
            checkpoint, config, dtype=dtype, device=torch.device("cpu"), weight_dtype=weight_dtype
        )
    return weights, config


def change(folder: Path, add: dict[str, torch.Tensor], drop: tuple[str, ...] = ()) -> Path:
    """Rewrite the weights without some tensors and with others."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in drop}
    save_file(kept | add, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> Path:
    """The same checkpoint in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", attention_bias=True)


def test_linears_are_fused_in_order(folder: Path) -> None:
    weights, config = read(folder)
    tensors = load_file(folder / "model.safetensors")
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    for part, width in (("q", 32), ("k", 16), ("v", 16)):
        start = {"q": 0, "k": 32, "v": 48}[part]
        name = f"model.layers.1.self_attn.{part}_proj"
        exact = linear_exact(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        assert exact.excess(weights.layers[1].qkv(x)[:, start : start + width]) <= 1.0
    gate = linear_exact(x, tensors["model.layers.0.mlp.gate_proj.weight"], None)
    assert gate.excess(weights.layers[0].gate_up(x)[:, :48]) <= 1.0
    ids = torch.tensor([96, 0, 5, 5])
    assert torch.equal(weights.embed(ids), tensors["model.embed_tokens.weight"][ids])


def test_shards_are_the_same_checkpoint(tmp_path: Path) -> None:
    single = write_random_model(tmp_path / "single")
    sharded = shard(write_random_model(tmp_path / "sharded"))
    config = read_config(single)
    with Checkpoint(single) as one, Checkpoint(sharded) as two:
        assert sorted(one) == sorted(two)
        assert all(torch.equal(one.tensor(name), two.tensor(name)) for name in one)
        assert fingerprint(one, config, "x") == fingerprint(two, config, "x")


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", tie_word_embeddings=True)
    weights, config = read(folder)
    assert "lm_head.weight" not in expected_shapes(config)
    x = torch.ones(2, config.hidden_size)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weights.embed(torch.arange(config.vocab_size)), embedding)
    assert linear_exact(x, embedding, None).excess(weights.head(x)) <= 1.0
    # Some checkpoints save the tied head as well.
    change(folder, {"lm_head.weight": embedding.clone()})
    read(folder)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_head_is_also_the_tied_embedding(
    tmp_path: Path, dtype: torch.dtype, kind: WeightDtype
) -> None:
    ids = torch.tensor([96, 0, 5, 5])
    for is_tied in (False, True):
        tied = {"tie_word_embeddings": is_tied, "intermediate_size": 64}
        folder = write_random_model(tmp_path / f"{is_tied}", **tied)
        weights, _ = read(folder, dtype, kind)
        embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
        assert (weights.embedding is weights.head) == is_tied
        kept = Int8Weight.of(embedding).rows(ids).to(dtype) if is_tied else embedding[ids]
        assert torch.equal(weights.embed(ids), kept)


def test_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    read(change(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))


@pytest.mark.parametrize(
    ("drop", "add", "said"),
    [
        ((Q_PROJ,), {}, f"the checkpoint lacks the tensor(s) {Q_PROJ}"),
        (("lm_head.weight",), {}, "lm_head.weight"),
        (
            (),
            {Q_PROJ: torch.zeros(32, 31)},
            f"tensor {Q_PROJ} has shape [32, 31] in the checkpoint, but config.json makes it "
            "[32, 32]",
        ),
        ((), {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight, which"),
        ((), {"model.layers.2.extra": torch.ones(8)}, "does not use"),
        ((), {Q_PROJ: torch.zeros(32, 32, dtype=torch.int8)}, f"{Q_PROJ} is of I8"),
        ((), {Q_PROJ: torch.zeros(32, 32, dtype=torch.float8_e4m3fn)}, "F8_E4M3"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    folder: Path, drop: tuple[str, ...], add: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(change(folder, add, drop))
    assert said in str(caught.value)


def test_a_long_list_is_cut(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"and \d+ more tensors"):
        read(change(folder, {}, tuple(name for name in tensors if "layers" in name)))


def test_pickled_weights_are_never_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        Checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "cannot be read"),
        ("{}", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"weight_map": ' + "[" * 100_000, "cannot be read"),
        ('{"weight_map": {"a": "' + "a" * 5000 + '"}}', "which is missing"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "names gone.safetensors, which is missing"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "which is missing"),
    ],
)
def test_an_index_that_leads_nowhere(folder: Path, index: str, said: str) -> None:
    (folder / INDEX).write_text(index)
    with pytest.raises(ConfigError) as caught:
        Checkpoint(folder)
    assert said in str(caught.value)


def test_files_that_are_broken_or_double(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "more.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="2 safetensors files but no"):
        Checkpoint(folder)
    weight_map = {"a": "model.safetensors", "b": "more.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="is in two files"):
        Checkpoint(folder)


def test_a_pipe_is_no_file_of_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"model\.safetensors is no file"):
        Checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 7, 100, -1], ids=["empty", "length", "header", "data"])
def test_a_shard_that_is_cut_short_is_named(folder: Path, kept: int) -> None:
    """Wherever it was cut; before a tensor of any other is read."""
    path = shard(folder) / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"model-1\.safetensors cannot be read as safetensors"):
        Checkpoint(folder)


def test_finding_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_checkpoint(str(folder)) == folder
    for missing in ("./nowhere", "/no/such/folder", "nowhere"):
        with pytest.raises(ConfigError, match="no such folder"):
            find_checkpoint(missing)
    asked: list[Any] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "owner/missing":
            raise OSError("offline")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert find_checkpoint("owner/name") == folder
    with pytest.raises(ConfigError, match="could be fetched: offline"):
        find_checkpoint("owner/missing")
    # Nothing that could be pickled or run is ever fetched.
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in asked[0][1])


def test_the_weights_are_known_however_they_are_computed_with(folder: Path) -> None:
    other = write_random_model(folder.parent / "other", attention_bias=True, seed=9)
    config = read_config(folder)
    with Checkpoint(folder) as one, Checkpoint(other) as two:
        known = weights_digest(one, config)
        assert known == weights_digest(one, replace(config, norm_eps=1.0))
        assert known != weights_digest(two, config)


@pytest.mark.parametrize("changed", ["model.norm.weight", Q_PROJ])
def test_the_fingerprint_depends_on_content(folder: Path, changed: str) -> None:
    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        before = fingerprint(checkpoint, config, "cpu fp32")
        assert fingerprint(checkpoint, config, "cpu bf16") != before
        tensor = checkpoint.tensor(changed).clone()
    tensor.view(-1)[0] += 1
    with Checkpoint(change(folder, {changed: tensor})) as checkpoint:
        assert fingerprint(checkpoint, config, "cpu fp32") != before
