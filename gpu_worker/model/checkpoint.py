"""Finds a checkpoint: a folder, or a hub id whose files are fetched; then opens its safetensors.

Only safetensors are read. Pickled weights can run code, so a folder with nothing else is refused.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from service_kit.errors import ConfigError

_INDEX: Final = "model.safetensors.index.json"
_FETCHED: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_checkpoint(model: str) -> Path:
    """The folder of `--model`, fetched first when it is a hub id."""
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        return folder
    looks_like_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    if not looks_like_hub_id:
        raise ConfigError(
            f"--model {model}: no such folder; give a checkpoint folder or a hub id like owner/name"
        )
    from huggingface_hub import snapshot_download  # a second of imports that folders do not need

    try:
        return Path(snapshot_download(model, allow_patterns=list(_FETCHED)))
    except Exception as error:  # the hub client raises from several unrelated families
        raise ConfigError(
            f"--model {model}: neither a folder nor a hub id that could be fetched: {error}"
        ) from error


def tokenizer_digest(folder: Path) -> str:
    """Hex SHA-256 of the tokenizer that gateways read; empty when there is none."""
    path = folder / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


class Checkpoint:
    """The tensors of a folder by name; a context manager that closes the files.

    A tensor is a view of the memory-mapped file, mapped anew for each: what was read of the file
    stays in this process only as long as the tensor. Copy what must outlive the checkpoint: a file
    cut short under a mapping ends the process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        try:
            for path in _weight_files(folder):
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self._folder} tensors={len(self._files)}>"

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._files[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._paths[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _open(self, path: Path) -> None:
        # A pipe would be waited for without end.
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file; copy the checkpoint again")
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path} cannot be read as safetensors ({error}); copy the checkpoint again"
            ) from error
        for name in file.keys():  # noqa: SIM118  (a file handle, not a dict)
            if name in self._files:
                raise ConfigError(f"{path}: tensor {name} is in two files of the checkpoint")
            self._files[name] = file
            self._paths[name] = path


def _weight_files(folder: Path) -> list[Path]:
    """The files named by the index, or the only one there is."""
    index = folder / _INDEX
    if index.is_file():
        return _indexed_files(folder, index)
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError(_nothing_to_read(folder))
    if len(found) > 1:
        raise ConfigError(
            f"{folder} has {len(found)} safetensors files but no {_INDEX} that says which to read"
        )
    return found


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{index} cannot be read: {error!r}; copy the checkpoint again"
        ) from error
    files = []
    for name in dict.fromkeys(map(str, names)):
        # A name that leads out of the folder is not a file of this checkpoint.
        path = folder / Path(name).name
        if Path(name).name != name or not os.path.isfile(path):
            raise ConfigError(f"{index} names {name}, which is missing; copy the checkpoint again")
        files.append(path)
    return files


def _nothing_to_read(folder: Path) -> str:
    pickled = [path.name for pattern in _PICKLED for path in folder.glob(pattern)]
    if pickled:
        return (
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when read; "
            "convert it to safetensors (save_pretrained does) or fetch a checkpoint that has them"
        )
    return f"{folder} has no *.safetensors file; --model must name a Hugging Face checkpoint folder"
