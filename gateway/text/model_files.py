"""Where a model's small files are: in a folder, or fetched from the hub. Never the weights."""

import re
from pathlib import Path
from typing import Final

from service_kit.errors import ConfigError

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
FILES: Final = ("*.json", "*.jinja", "tokenizer*")


def find(model: Path) -> Path:
    """A folder is itself; of `owner/name` the files are fetched once. ConfigError: they cannot."""
    if model.exists() or not HUB_ID.fullmatch(str(model)):
        return model
    # Half a second of imports that folders do not need.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(FILES)))
    except Exception as error:  # the hub library raises its own, httpx's and the system's errors
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--model {model}: no folder here, and cannot be downloaded: {first_line}"
        ) from error
