"""Published traces as shapes. Which kind a file is, its first line says.

Azure CSV `TIMESTAMP,ContextTokens,GeneratedTokens`; BurstGPT CSV `Timestamp,Model,Request tokens,
Response tokens,Total tokens,Log Type`; Mooncake JSONL `{timestamp, input_length, output_length,
hash_ids}`. Arrivals are moved so that the first is at 0. Rows without output (BurstGPT's failures)
are left out.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Final

import numpy as np

from kaiten.bench.workload import BLOCK_TOKENS, Shape

# Mooncake's timestamps come in steps of this long; spread them, or every third second is a crowd.
MOONCAKE_STEP_S: Final = 3.0
Reader = Callable[[Sequence[str], int, np.random.Generator], Iterator[Shape]]


class TraceError(ValueError):
    """The file is not a trace that is known here; says where."""


def read_trace(lines: Iterable[str], count: int, rng: np.random.Generator) -> list[Shape]:
    """At most `count` requests (0: all) in the order of arrival."""
    text = [line for line in lines if line.strip()]
    if not text:
        raise TraceError("the trace is empty")
    reader = _reader_of(text[0])
    try:
        shapes = list(reader(text, count, rng))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"not a row of this kind of trace: {error}") from error
    if not shapes:
        raise TraceError("the trace has no request with a prompt and an output")
    shapes.sort(key=lambda shape: shape.due_s or 0.0)
    first_s = shapes[0].due_s or 0.0
    return [replace(shape, due_s=(shape.due_s or 0.0) - first_s) for shape in shapes]


def _reader_of(first_line: str) -> Reader:
    for mark, reader in READERS.items():
        if mark in first_line:
            return reader
    raise TraceError(
        f"unknown kind of trace, its first line is {first_line.strip()[:80]!r}: expected Azure or"
        " BurstGPT CSV with a header, or Mooncake JSONL"
    )


def _azure(lines: Sequence[str], count: int, _rng: np.random.Generator) -> Iterator[Shape]:
    for row in _rows(lines, count, "ContextTokens", "GeneratedTokens"):
        yield Shape(
            prompt_tokens=int(row["ContextTokens"]),
            output_tokens=int(row["GeneratedTokens"]),
            due_s=datetime.fromisoformat(row["TIMESTAMP"]).timestamp(),
        )


def _burstgpt(lines: Sequence[str], count: int, _rng: np.random.Generator) -> Iterator[Shape]:
    for row in _rows(lines, count, "Request tokens", "Response tokens"):
        yield Shape(
            prompt_tokens=int(row["Request tokens"]),
            output_tokens=int(row["Response tokens"]),
            due_s=float(row["Timestamp"]),
        )


def _rows(lines: Sequence[str], count: int, *columns: str) -> Iterator[dict[str, str]]:
    rows = (row for row in csv.DictReader(lines) if all(int(row[name]) >= 1 for name in columns))
    return islice(rows, count or None)


def _mooncake(lines: Sequence[str], count: int, rng: np.random.Generator) -> Iterator[Shape]:
    for line in islice(lines, count or None):
        row = json.loads(line)
        prompt_tokens, output_tokens = int(row["input_length"]), int(row["output_length"])
        if prompt_tokens < 1 or output_tokens < 1:
            continue
        blocks = tuple(int(block) for block in row["hash_ids"])
        yield Shape(
            prompt_tokens=min(prompt_tokens, len(blocks) * BLOCK_TOKENS or prompt_tokens),
            output_tokens=output_tokens,
            due_s=float(row["timestamp"]) / 1e3 + float(rng.uniform(0, MOONCAKE_STEP_S)),
            blocks=blocks,
        )


READERS: Final[dict[str, Reader]] = {
    "ContextTokens": _azure,
    "Request tokens": _burstgpt,
    "hash_ids": _mooncake,
}
