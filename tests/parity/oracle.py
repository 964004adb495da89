"""Checkpoints with random weights, and what transformers answers to prompts on them.

    told = oracle.ask(factory)      folders, a tokenizer included, and the answers to all questions

One process writes and answers everything, once per run of the tests: importing transformers costs
as much as most of the answers.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from _pytest.mark import ParameterSet

from tests.parity.published import PUBLISHED
from tests.support import warm_python
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
    "mistral-window",
    "qwen2-gqa-tied",
    "qwen2-mha",
    "qwen2-rope-yarn",
    "qwen3-gqa-tied",
    "qwen3-wide-head",
    "qwen3-bias",
)
# Of layers that attend to windows and to everything.
WINDOWED: Final = ("gemma3-windows", "qwen2-windows")
# Of a published checkpoint's config.json each; those that are asked in every run, and the others.
DAILY: Final = (
    "gemma-2b", "gemma2-tight", "gemma3-1b", "granite-3.0-2b", "olmo2-7b", "phi4-mini",
    "smollm3-3b", *WINDOWED,
)  # fmt: skip
NIGHTLY: Final = tuple(name for name in PUBLISHED if name not in DAILY)
ALL: Final = (*MODELS, *PUBLISHED)
# Of each family one is asked by a crowd.
ONE_PER_FAMILY: Final = (
    "llama-rope-llama3",
    "mistral-window",
    "qwen2-gqa-tied",
    "qwen3-gqa-tied",
    "olmo2-7b",
    "gemma3-1b",
    "gemma-7b",
    "gemma2-9b",
    "granite-3.3-8b",
    "phi3-medium-4k",
    "smollm3-3b-base",
)
# What prompts are explained by is not of a family: of the windows, and of a long crowd, too.
EXPLAINING: Final = tuple(
    name for name in ONE_PER_FAMILY if name not in ("qwen2-gqa-tied", "qwen3-gqa-tied", "olmo2-7b")
)
# Of new families one is asked by more at once than any other test asks, in every run; all of them
# when `slow` is.
MANY_AT_ONCE: Final = "gemma3-1b"
EOS: Final = 2
TOP: Final = 5
CROWD_MAX_TOKENS: Final = 24
RAGGED_MAX_TOKENS: Final = 12
# Of the tokenizer; below every model's vocabulary, so that some model ids have no text.
_TOKENIZER_VOCAB: Final = 380


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """By name of the model; the answers in the order of the prompts."""

    folders: dict[str, Path]
    crowd: dict[str, list[Answer]]
    ragged: dict[str, list[Answer]]
    explained: dict[str, list[Explained]]


def ragged_prompts(count: int, *, vocab_size: int, tokens_max: int, seed: int) -> list[list[int]]:
    """Prompts of very different lengths, the shortest of one token; none contains a special id."""
    rng = random.Random(seed)
    lengths = [1, tokens_max, *(rng.randint(1, tokens_max) for _ in range(count - 2))]
    return [[rng.randrange(6, vocab_size) for _ in range(length)] for length in lengths[:count]]


# All models have at least 380 tokens. Three times the rows that a worker has here: all but the
# first join rows that go on.
CROWD: Final = ragged_prompts(24, vocab_size=380, tokens_max=60, seed=11)
_MANY: Final = [*CROWD, *ragged_prompts(40, vocab_size=380, tokens_max=60, seed=29)]
RAGGED: Final = ragged_prompts(11, vocab_size=380, tokens_max=120, seed=3)
_LONG: Final = ragged_prompts(16, vocab_size=380, tokens_max=120, seed=17)
# Some twice: the second time they would be found in the prefix cache.
EXPLAINED: Final = [*_LONG, *_LONG[1:4]]


def crowd_of(name: str) -> list[list[int]]:
    """Of one of ONE_PER_FAMILY or WINDOWED."""
    if name in WINDOWED:
        return CROWD
    return _MANY if name in NIGHTLY or name == MANY_AT_ONCE else CROWD


def is_clear(top_logprobs: npt.NDArray[np.float32], error_max: float) -> npt.NDArray[np.bool_]:
    """[n, TOP]: whose id must be the same, as neither neighbour is so near that they may swap.

    Of the last none can say, as the next one was not told.
    """
    gaps = np.diff(top_logprobs, axis=1) < -error_max
    clear = np.zeros(top_logprobs.shape, np.bool_)
    clear[:, :-1] = gaps
    clear[:, 1:-1] &= gaps[:, :-1]
    return clear


def each(
    names: Sequence[str], *values: Sequence[object], daily: Sequence[str] = ()
) -> list[ParameterSet]:
    """Parameters of a test, of each name; those of NIGHTLY are asked when `slow` is.

    With `daily` so are all but these.
    """
    rows = list(zip(names, *values, strict=True))
    slow = {row[0] for row in rows if row[0] in NIGHTLY or (daily and row[0] not in daily)}
    return [pytest.param(*row, marks=[pytest.mark.slow] if row[0] in slow else []) for row in rows]


def ask(factory: pytest.TempPathFactory, name: str | None = None) -> Told:
    """Greedy answers to each prompt alone, and how likely prompts are, in float32.

    Of every model that is asked in the same runs as `name`.
    """
    names = NIGHTLY if name in NIGHTLY else (*MODELS, *DAILY)
    label = "oracle-nightly" if name in NIGHTLY else "oracle"
    return _told(made_once(factory, label, partial(_write_all, names)), names)


def ask_ragged(factory: pytest.TempPathFactory, label: str, names: tuple[str, ...]) -> Told:
    """Of these models, and of their answers the ragged ones only."""
    return _told(made_once(factory, label, partial(_write_all, names, is_brief=True)), names, True)


@cache
def _told(root: Path, names: tuple[str, ...], is_brief: bool = False) -> Told:
    crowds, explained = ([], []) if is_brief else _asked_more(names)
    return Told(
        folders={name: root / name for name in names},
        crowd={n: _read(root / f"crowd-{n}.npz", len(crowd_of(n))) for n in crowds},
        ragged={n: _read(root / f"ragged-{n}.npz", len(RAGGED)) for n in names},
        explained={
            n: _read_explained(root / f"explained-{n}.npz", len(EXPLAINED)) for n in explained
        },
    )


def _asked_more(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which of these are asked by a crowd, and which explain prompts."""
    crowds = [n for n in names if n in (*ONE_PER_FAMILY, *WINDOWED)]
    return crowds, [n for n in names if n in EXPLAINING]


def _write_all(names: Sequence[str], root: Path, *, is_brief: bool = False) -> None:
    """Weights, configs and answers by transformers; tokenizers with a chat template by us."""
    crowds, explained = ([], []) if is_brief else _asked_more(names)
    questions = [
        *(_question("crowd", name, crowd_of(name), CROWD_MAX_TOKENS) for name in crowds),
        *(_question("ragged", name, RAGGED, RAGGED_MAX_TOKENS) for name in names),
        *(_question("explained", name, EXPLAINED, 0) for name in explained),
    ]
    listing = root / "questions.json"
    listing.write_text(
        json.dumps({"models": names, "published": PUBLISHED, "top": TOP, "questions": questions})
    )
    program = "-m", "tests.parity.oracle_process", str(listing)
    done = warm_python.run(*program, imports=warm_python.TRANSFORMERS)
    assert done.code == 0, done.err[-4000:]
    for name in names:
        _write_tokenizer(root / name)


def _question(
    what: str, model: str, prompts: list[list[int]], max_tokens: int
) -> dict[str, object]:
    """Without tokens to generate, the prompts are explained."""
    target = f"{what}-{model}.npz"
    return {"model": model, "prompts": prompts, "max_tokens": max_tokens, "target": target}


def _write_tokenizer(folder: Path) -> None:
    byte_level_bpe(_TOKENIZER_VOCAB).save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


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
