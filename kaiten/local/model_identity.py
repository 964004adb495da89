"""Which model a folder holds: the same wherever it lies, another when its weights are replaced.

The ledger of `kaiten serve` is kept under this: what was accepted for one model must never be
resumed by another. What decides tokens and their text counts: config, tokenizer, weights. What is
resolved before a request is accepted (defaults, chat template) does not, nor do path and times.

Weights are looked at as a worker's fingerprint looks at them: every tensor's name, shape and dtype,
and both ends of its content. That tells fine-tunes apart without reading gigabytes.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

SAMPLE_BYTES: Final = 4096
# As the format's own readers have it. A longer one is no safetensors file.
HEADER_BYTES_MAX: Final = 100_000_000
_LENGTH_BYTES: Final = 8


def digest(folder: Path) -> str:
    """Hex SHA-256 of the model in a folder. OSError when a file cannot be read."""
    told = hashlib.sha256()
    for part in _parts(folder):
        # With its length: two parts must not read as one of another cut.
        told.update(len(part).to_bytes(_LENGTH_BYTES, "little") + part)
    return told.hexdigest()


def _parts(folder: Path) -> Iterator[bytes]:
    for name in ("config.json", "tokenizer.json"):
        path = folder / name
        yield path.read_bytes() if path.is_file() else b""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            yield from _weights(file)


def _weights(file: BinaryIO) -> Iterator[bytes]:
    """Size, header and samples. A file that has no header is the worker's to refuse."""
    size = file.seek(0, os.SEEK_END)
    yield size.to_bytes(_LENGTH_BYTES, "little")
    file.seek(0)
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    header = file.read(header_bytes) if header_bytes <= HEADER_BYTES_MAX else b""
    yield header
    start = _LENGTH_BYTES + header_bytes
    for first, end in _tensors(header):
        if 0 <= first <= end <= size - start:
            for at in (first, max(first, end - SAMPLE_BYTES)):
                file.seek(start + at)
                yield file.read(min(SAMPLE_BYTES, end - first))


def _tensors(header: bytes) -> list[tuple[int, int]]:
    """Where each tensor begins and ends in the file, counted from the end of the header."""
    try:
        entries = json.loads(header)
        found = [entries[name]["data_offsets"] for name in entries if name != "__metadata__"]
        return sorted((int(first), int(end)) for first, end in found)
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
