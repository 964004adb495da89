"""From what a user calls a model to a folder with a checkpoint."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kaiten.local.model_identity import digest
from kaiten.mini import CHECKPOINT
from kaiten.start_error import StartError, expanded

SHIPPED_NAME: Final = "kaiten-mini"
# Never pickles, never code.
FILES: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A folder and the name its model is served under."""

    folder: Path
    name: str

    @property
    def can_chat(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        config = self.folder / "tokenizer_config.json"
        try:
            return (self.folder / "chat_template.jinja").exists() or (
                b'"chat_template"' in config.read_bytes()
            )
        except OSError:
            return False

    @property
    def digest(self) -> str:
        """Which model it is, wherever it lies. StartError when its files cannot be read."""
        try:
            return digest(self.folder)
        except OSError as error:
            raise StartError(
                f"{error.filename or self.folder} cannot be read: {error.strerror}",
                "the model's files must be readable by this user",
            ) from error


def resolve(
    model: str | None, served_name: str | None = None, revision: str | None = None
) -> ModelSource:
    """None is the shipped model; a folder is itself; `owner/name` is downloaded once.

    `revision`: a branch, tag or commit of the latter; None: its main branch.
    """
    if revision is not None and (model is None or expanded(Path(model)).exists()):
        raise StartError(
            "--revision is of a model of the hub, and this one is a folder here",
            "leave it out, or give an id such as owner/name",
        )
    if model is None:
        if not CHECKPOINT.is_dir():
            raise StartError(
                f"{CHECKPOINT} is missing", "name a model: kaiten serve FOLDER_OR_HUB_ID"
            )
        return _checked(CHECKPOINT, served_name or SHIPPED_NAME)
    folder = expanded(Path(model))
    if folder.exists():
        return _checked(folder.resolve(), served_name or folder.resolve().name)
    if HUB_ID.fullmatch(model) and not model.startswith("."):
        return _checked(_download(model, revision), served_name or model)
    raise StartError(
        f"model {model!r} is neither a folder nor a hub id",
        "give the folder that holds config.json and *.safetensors, or an id such as owner/name",
    )


def _checked(folder: Path, name: str) -> ModelSource:
    """Refuse at once what no worker could load, with the folder's name in the sentence."""
    if not folder.is_dir():
        raise StartError(f"{folder} is not a folder", "give the folder of the checkpoint")
    if not (folder / "config.json").is_file():
        raise StartError(f"{folder} has no config.json", "give the folder of a checkpoint")
    if not any(folder.glob("*.safetensors")):
        raise StartError(
            f"{folder} has no *.safetensors",
            "convert the weights to safetensors: pickled weights can run code and are never read",
        )
    for path in folder.glob("*.safetensors"):
        # A pipe would be waited for without end.
        if path.exists() and not path.is_file():
            raise StartError(f"{path} is no file", "copy the checkpoint again")
    return ModelSource(folder=folder, name=name)


def _download(hub_id: str, revision: str | None) -> Path:
    """The local snapshot of a hub model, fetched when it is not there."""
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise StartError(
            f"{hub_id} would have to be downloaded, and huggingface_hub is not installed",
            "pip install 'kaiten[worker]', or give a local folder",
        ) from None
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # the hub library raises its own, httpx's and the system's errors
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StartError(
            f"{hub_id} is no folder here, and cannot be downloaded: {first_line}",
            "check the path or the id, the network, and HF_TOKEN for gated models",
        ) from error
