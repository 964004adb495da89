"""Checkpoints with random weights, and what transformers answers to prompts on them.

    folders = oracle.write_checkpoints(factory)                            a tokenizer included
    answers = oracle.answers("few", {folder: prompts}, max_tokens=32, factory=factory)

Each starts one process for all that is asked, because importing transformers takes seconds, and
does so once per run of the tests: a name is a question.
"""

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.once import made_once
from tests.support.tokenizers import CHAT_TEMPLATE, byte_level_bpe

MODELS: Final = (
    "llama-gqa-tied",
    "llama-mha-bias",
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-rope-yarn",
    "mistral-gqa",
    "mistral-wide-head",
    "mistral-mha-tied",
    "qwen2-gqa-tied",
    "qwen2-mha",
    "qwen2-rope-yarn",
    "qwen3-gqa-tied",
    "qwen3-wide-head",
    "qwen3-bias",
)
EOS: Final = 2
TOP: Final = 5
# Of the tokenizer; below every model's vocabulary, so that some model ids have no text.
_TOKENIZER_VOCAB: Final = 380
_SCRIPT: Final = Path(__file__).with_name("oracle_process.py")
_SECONDS_MAX: Final = 280


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Greedy output of one prompt, up to and with the end-of-sequence token."""

    token_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]
    # [len(token_ids), TOP], best first.
    top_token_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Of each prompt token but the first, given those before it."""

    logprobs: npt.NDArray[np.float32]
    # [len(prompt) - 1, TOP], best first.
    top_token_ids: npt.NDArray[np.int64]
    top_logprobs: npt.NDArray[np.float32]


def write_checkpoints(factory: pytest.TempPathFactory) -> dict[str, Path]:
    """name -> folder with weights, config and a byte-level tokenizer with a chat template."""
    root = made_once(factory, "checkpoints", _write_checkpoints)
    return {name: root / name for name in MODELS}


def _write_checkpoints(root: Path) -> None:
    _run("checkpoint", str(root), "0", *MODELS)
    for name in MODELS:
        byte_level_bpe(_TOKENIZER_VOCAB).save(str(root / name / "tokenizer.json"))
        (root / name / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "bos_token": "<s>",
                    "eos_token": "</s>",
                    "chat_template": CHAT_TEMPLATE,
                    "tokenizer_class": "PreTrainedTokenizerFast",
                }
            )
        )


def ragged_prompts(count: int, *, vocab_size: int, tokens_max: int, seed: int) -> list[list[int]]:
    """Prompts of very different lengths, the shortest of one token; none contains a special id."""
    rng = random.Random(seed)
    lengths = [1, tokens_max, *(rng.randint(1, tokens_max) for _ in range(count - 2))]
    return [[rng.randrange(6, vocab_size) for _ in range(length)] for length in lengths[:count]]


def answers(
    name: str,
    asked: Mapping[Path, Sequence[Sequence[int]]],
    *,
    max_tokens: int,
    factory: pytest.TempPathFactory,
) -> dict[Path, list[Answer]]:
    """What transformers says to each prompt alone, in float32."""
    told = made_once(factory, name, lambda to: _ask("answer", asked, to, max_tokens=max_tokens))
    return {
        folder: _read(_target(told, index), len(prompts))
        for index, (folder, prompts) in enumerate(asked.items())
    }


def explained(
    name: str,
    asked: Mapping[Path, Sequence[Sequence[int]]],
    *,
    factory: pytest.TempPathFactory,
) -> dict[Path, list[Explained]]:
    """How likely each prompt's own tokens are to transformers: one pass over each, in float32."""
    told = made_once(factory, name, lambda to: _ask("explain", asked, to, max_tokens=0))
    return {
        folder: _read_explained(_target(told, index), len(prompts))
        for index, (folder, prompts) in enumerate(asked.items())
    }


def _target(scratch: Path, index: int) -> Path:
    return scratch / f"answer-{index}.npz"


def _ask(
    what: str, asked: Mapping[Path, Sequence[Sequence[int]]], scratch: Path, *, max_tokens: int
) -> None:
    """Leaves the answers to each folder's prompts in `scratch`."""
    specs = []
    for index, (folder, prompts) in enumerate(asked.items()):
        question, target = scratch / f"question-{index}.json", _target(scratch, index)
        question.write_text(
            json.dumps({"prompts": list(map(list, prompts)), "max_tokens": max_tokens, "top": TOP})
        )
        specs.append({"folder": str(folder), "question": str(question), "target": str(target)})
    listing = scratch / "questions.json"
    listing.write_text(json.dumps(specs))
    _run(what, str(listing))


def _read_explained(path: Path, count: int) -> list[Explained]:
    with np.load(path) as arrays:
        return [
            Explained(
                logprobs=arrays[f"logprob_{index}"],
                top_token_ids=arrays[f"top_ids_{index}"],
                top_logprobs=arrays[f"top_logprobs_{index}"],
            )
            for index in range(count)
        ]


def _read(path: Path, count: int) -> list[Answer]:
    with np.load(path) as arrays:
        return [
            Answer(
                token_ids=tuple(arrays[f"tokens_{index}"].tolist()),
                logprobs=arrays[f"logprob_{index}"],
                top_token_ids=arrays[f"top_ids_{index}"],
                top_logprobs=arrays[f"top_logprobs_{index}"],
            )
            for index in range(count)
        ]


def _run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(_SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
