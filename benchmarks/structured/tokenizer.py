"""A byte-level tokenizer of a real model's size, learnt from the text of Python's own library."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END: Final = "<|end|>"
TEXT_CHARS: Final = 12 << 20


def learnt_tokenizer(size: int) -> Tokenizer:
    """Byte-level BPE of at most `size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_library(), trainer)
    return tokenizer


def _library() -> Iterator[str]:
    left = TEXT_CHARS
    for path in sorted(Path(json.__file__).parents[1].glob("*/*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        if left < 0:
            return
        yield text
