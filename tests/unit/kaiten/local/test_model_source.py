"""Which model is served: a folder, a hub id, or the shipped one."""

import os
from pathlib import Path

import pytest

from kaiten.local import model_source
from kaiten.local.part_options import GatewayOptions, flags_of
from kaiten.start_error import StartError


def checkpoint(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_a_folder_is_a_model(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "my-model", "config.json", "model.safetensors")
    found = model_source.resolve(str(folder))
    assert (found.folder, found.name, found.can_chat) == (folder, "my-model", False)
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_bytes(b'{"chat_template": "\xff"}')
    assert [found.can_chat] == [True]
    tokenizer.unlink()
    tokenizer.mkdir()
    assert [found.can_chat] == [False]
    (folder / "chat_template.jinja").write_text("x")
    assert model_source.resolve(str(folder), "other").name == "other"
    assert found.can_chat


@pytest.mark.parametrize(
    ("names", "said"),
    [((), "has no config.json"), (("config.json", "pytorch_model.bin"), r"no \*\.safetensors")],
)
def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    with pytest.raises(StartError, match=said):
        model_source.resolve(str(checkpoint(tmp_path / "m", *names)))


def test_a_home_of_nobody_is_told_in_a_sentence() -> None:
    with pytest.raises(StartError, match=r"^~nobody-here/m: nobody here has this home folder"):
        model_source.resolve("~nobody-here/m")
    with pytest.raises(StartError, match=r"^~nobody-here/k"):
        flags_of(GatewayOptions(api_keys_file=Path("~nobody-here/k")))


def test_a_pipe_is_no_file_of_a_model(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", "config.json")
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(StartError, match=r"m/model\.safetensors is no file"):
        model_source.resolve(str(folder))


def test_a_hub_id_is_fetched_without_code_or_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((hub_id, revision, allow_patterns))
        return str(checkpoint(tmp_path, "config.json", "model.safetensors"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert model_source.resolve("owner/name").name == "owner/name"
    assert model_source.resolve("owner/name", revision="v2").name == "owner/name"
    files = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
    assert asked == [("owner/name", None, files), ("owner/name", "v2", files)]


@pytest.mark.parametrize("model", [None, "."])
def test_a_folder_has_no_revision(model: str | None) -> None:
    with pytest.raises(StartError, match="--revision is of a model of the hub"):
        model_source.resolve(model, revision="v2")


def test_a_failed_download_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(_hub_id: str, **_options: object) -> str:
        raise OSError("no network\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        StartError, match=r"^owner/name is no folder here, and cannot be downloaded: no network\n"
    ):
        model_source.resolve("owner/name")
