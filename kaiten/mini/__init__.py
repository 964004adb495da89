"""The shipped model: a grammar of one small world, the script that trains on it, the checkpoint."""

from pathlib import Path
from typing import Final

CHECKPOINT: Final = Path(__file__).parent / "checkpoint"
