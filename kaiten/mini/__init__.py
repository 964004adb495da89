"""The shipped model; its grammar and the script that trains on it are in `tools/mini`."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
