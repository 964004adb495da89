"""A gateway's model may be a folder or a hub id; of the latter no weights are fetched."""

from pathlib import Path

import huggingface_hub
import pytest

from gateway.main import GatewayService
from gateway.settings import GatewaySettings
from gateway.text import model_files
from service_kit.errors import ConfigError
from tests.support.tokenizers import write_model_folder


def test_a_hub_id_is_fetched_without_weights_and_named_by_its_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = write_model_folder(tmp_path / "snapshots" / "c0ffee")
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    service = GatewayService(GatewaySettings(model=Path("owner/Name-1.5b")))
    assert service.generation_service.card.name == "Name-1.5b"
    assert asked == [("owner/Name-1.5b", ["*.json", "*.jinja", "tokenizer*"])]


def test_a_folder_is_itself_and_what_is_neither_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(_hub_id: str, **_options: object) -> str:
        raise OSError("no network\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for model in (folder, Path("owner/name"), Path("/no/such/folder"), Path("nowhere")):
        assert model_files.find(model) == model
    with pytest.raises(ConfigError, match=r"^--model owner/other: no folder here, .*: no network$"):
        model_files.find(Path("owner/other"))
