"""Which ledger a start of `kaiten serve` takes up: that of the very same model, and no other's."""

import json
import shutil
import struct
from pathlib import Path

import pytest

from kaiten.local import model_identity, model_source
from kaiten.local.stack import ServeOptions, planned_stack

# Two tensors of more than a sample each, so that there is a middle nobody looks at.
TENSOR_BYTES = 3 * model_identity.SAMPLE_BYTES


def checkpoint(folder: Path, fill: bytes = b"\1\2", config: str = "{}") -> Path:
    """A folder as a trainer saves it: one safetensors file with two tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    ends = [TENSOR_BYTES, 2 * TENSOR_BYTES]
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": [0, ends[0]]},
            "b": {"dtype": "U8", "shape": [TENSOR_BYTES], "data_offsets": ends},
        }
    ).encode()
    content = b"".join(bytes([each]) * TENSOR_BYTES for each in fill)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    return folder


def ledger_of(data_dir: Path, model: Path, name: str | None = None) -> Path:
    """The folder of the store that a start would use."""
    options = ServeOptions(
        model=model_source.resolve(str(model), name), data_dir=data_dir, grpc_port=0, http_port=0
    )
    with planned_stack(options) as stack:
        (store,) = stack.stages[0]
    return Path(store.command[store.command.index("--dir") + 1])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_two_checkpoints_of_one_name_have_a_ledger_each(runs: Path, data_dir: Path) -> None:
    """Requests that were accepted for one would be continued by the other."""
    first = ledger_of(data_dir, checkpoint(runs / "a" / "final", b"\1\2"))
    second = ledger_of(data_dir, checkpoint(runs / "b" / "final", b"\1\3"))
    assert first != second
    assert first.name.startswith("store-final-")


def test_names_that_look_alike_as_folders_do_not_meet(runs: Path, data_dir: Path) -> None:
    first = ledger_of(data_dir, checkpoint(runs / "1", b"\1\2"), "a/b")
    second = ledger_of(data_dir, checkpoint(runs / "2", b"\2\2"), "a-b")
    assert first != second


def test_a_start_again_finds_what_was_accepted(runs: Path, data_dir: Path) -> None:
    model = checkpoint(runs / "final")
    assert ledger_of(data_dir, model) == ledger_of(data_dir, model)


def test_a_model_that_was_moved_or_copied_keeps_its_ledger(runs: Path, data_dir: Path) -> None:
    model = checkpoint(runs / "a" / "final")
    before = ledger_of(data_dir, model)
    copied = runs / "b" / "final"
    shutil.copytree(model, copied)
    shutil.rmtree(model)
    assert ledger_of(data_dir, copied) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_updated_model_is_another(runs: Path, data_dir: Path, name: str) -> None:
    """In place, as a trainer overwrites its last checkpoint."""
    model = checkpoint(runs / "final")
    before = ledger_of(data_dir, model)
    other = checkpoint(runs / "other", b"\1\3", '{"rope_theta": 1}')
    (other / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    shutil.copy(other / name, model / name)
    assert ledger_of(data_dir, model) != before


def test_what_no_answer_follows_from_does_not_count(runs: Path, data_dir: Path) -> None:
    """Defaults and templates are resolved before a request is accepted."""
    model = checkpoint(runs / "final")
    before = ledger_of(data_dir, model)
    for name in ("README.md", "generation_config.json", "chat_template.jinja"):
        (model / name).write_text("{}")
    assert ledger_of(data_dir, model) == before


@pytest.mark.parametrize("at", [0, TENSOR_BYTES - 1, TENSOR_BYTES, 2 * TENSOR_BYTES - 1])
def test_every_tensor_counts_at_both_ends(runs: Path, at: int) -> None:
    model = checkpoint(runs / "final")
    before = model_identity.digest(model)
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) - 2 * TENSOR_BYTES + at] ^= 1
    path.write_bytes(raw)
    assert model_identity.digest(model) != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
)
def test_a_file_that_holds_no_tensors_is_the_workers_to_refuse(runs: Path, content: bytes) -> None:
    model = checkpoint(runs / "final")
    before = model_identity.digest(model)
    (model / "model.safetensors").write_bytes(content)
    assert model_identity.digest(model) != before


def test_a_long_name_makes_no_longer_folder(runs: Path, data_dir: Path) -> None:
    assert ledger_of(data_dir, checkpoint(runs / "final"), "x" * 256).is_dir()
