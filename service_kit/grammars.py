"""Grammars as both ends read them: a gateway tries what it lets in, a worker samples by it.

Not imported with the rest: it needs llguidance, which only these two have.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# As it travels: Lark, or llguidance's own JSON.
GRAMMAR_BYTES_MAX: Final = 64 << 10
REASON_CHARS_MAX: Final = 300
# Tokens in a word of a mask.
BITS: Final = 32
# A bit for each token.
Mask: TypeAlias = npt.NDArray[np.uint32]


# Compiling takes a tenth of a second at most, and the mask of one token mostly 30 ms: sizes are
# counted and not the time, so that what is let in anywhere is computed everywhere. All but what is
# slow at every token, as what is ambiguous without end (`start: start start | "a"`): MASK_S_MEAN.
def _limits(*, row_items: int, step_items: int) -> LLParserLimits:
    return LLParserLimits(
        max_grammar_size=10_000,
        # An item of a row is compared with the others, and with those where it began: what is read
        # grows with the square.
        max_items_in_row=row_items,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=step_items,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


# Texts beside each other are many items only as rules of their own: a terminal may have thousands.
LIMITS: Final = _limits(row_items=1_000, step_items=5_000)
# An object of 1,000 optional properties goes on after its bracket in four ways each, and all are
# soon read. Hundreds of open objects beside each other are not: gateways let no such in.
SCHEMA_LIMITS: Final = _limits(row_items=5_000, step_items=50_000)

# What llguidance puts where it would show the state of the parser, and the client's texts in it.
_NO_DETAILS: Final = "<non-verbose/>"
# CPU seconds that a row's tokens and masks may take in the mean, and beyond it in all, or it ends:
# its batch waits for it. A large grammar has a slow mask now and then, and may.
MASK_S_MEAN: Final = 0.02
MASK_CREDIT_S: Final = 0.5
_END: Final = {
    "content": "<|end of output|>",
    "special": True,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}


class InvalidGrammar(ValueError):
    """What is wrong with it, for the client; of one line."""


class GrammarTokenizer:
    """Of a tokenizer.json, for a model of `vocab_size` tokens. ValueError: it cannot be used.

    It has a token more, `end`: where a mask has its bit the output is complete, whichever tokens of
    the model end it. No token of the model has that number, or it is one that says nothing.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        file = json.loads(path.read_text(encoding="utf-8"))
        vocabulary, added = file["model"]["vocab"], file.setdefault("added_tokens", [])
        ids = {each["id"] for each in added}
        ids.update(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
        self.end = max(len(vocabulary), 1 + max(ids))
        self.mask_words = -(-max(vocab_size, self.end + 1) // BITS)
        added.append(_END | {"id": self.end})
        _spell_out(file)
        size = max(vocab_size, self.end + 1)
        self.tokens = LLTokenizer(json.dumps(file), n_vocab=size, eos_token=self.end)
        special = [each for each in range(self.end) if self.tokens.is_special_token(each)]
        self._special = mask_of(special, self.mask_words)
        # They are few, and near each other.
        self._special_words = np.flatnonzero(self._special)

    def compiled(self, grammar: str) -> LLMatcher:
        """At its beginning. InvalidGrammar."""
        limits = SCHEMA_LIMITS if _is_schema(grammar) else LIMITS
        matcher = LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidGrammar(one_line(matcher.get_error()))
        return matcher

    def spell_out(self, matchers: Sequence[LLMatcher], masks: Mask) -> None:
        """A text that must come llguidance takes as a prompt's: where it is that of a control
        token, a mask has that alone, which the grammar then refuses. In its place the mask has the
        first of the tokens that write the text, or none if there are none.
        """
        special = masks[:, self._special_words] & self._special[self._special_words]
        for row in np.flatnonzero(special.any(axis=1)).tolist():
            text = matchers[row].compute_ff_bytes()
            # A control token that the grammar itself names is marked by a byte that is of no text.
            if text and not text.startswith(b"\xff"):
                token_ids = self.tokens.greedy_tokenize(text.decode("utf-8", "ignore"))[:1]
                writes = text.startswith(self.tokens.decode_bytes(token_ids))
                masks[row] = mask_of(token_ids if writes else (), self.mask_words)


def mask_of(token_ids: Sequence[int], words: int) -> Mask:
    """A mask of these tokens."""
    mask = np.zeros(words, np.uint32)
    set_bits(mask, np.array(token_ids, np.int64), is_set=True)
    return mask


def set_bits(mask: Mask, token_ids: npt.NDArray[np.int64], *, is_set: bool) -> None:
    ones = np.uint32(1) << (token_ids % BITS).astype(np.uint32)
    # Several of them may be of one word.
    if is_set:
        np.bitwise_or.at(mask, token_ids // BITS, ones)
    else:
        np.bitwise_and.at(mask, token_ids // BITS, ~ones)


def _is_schema(grammar: str) -> bool:
    """Whether it is JSON Schema and nothing else."""
    try:
        parts = json.loads(grammar)["grammars"]
        return all(part.get("json_schema") and not part.get("lark_grammar") for part in parts)
    # Lark is no JSON.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _spell_out(file: dict[str, Any]) -> None:
    """Of Unigram tokenizers, in the words of SentencePiece's, which llguidance reads."""
    decoder, vocabulary = file.get("decoder") or {}, file["model"]["vocab"]
    names = vocabulary if isinstance(vocabulary, dict) else (name for name, _ in vocabulary)
    # Where this decoder has byte tokens it shows their names.
    if decoder.get("type") == "Metaspace" and "<0x0A>" not in names:
        space = {"String": decoder["replacement"]}
        steps = [{"type": "Replace", "pattern": space, "content": " "}, {"type": "ByteFallback"}]
        file["decoder"] = {"type": "Sequence", "decoders": steps}


def one_line(reason: str) -> str:
    """What llguidance says, without the picture of the place that it draws below."""
    lines = [line.strip() for line in reason.splitlines() if line.strip(" ^|")]
    lines = [line for line in lines if line != _NO_DETAILS]
    return " ".join(lines)[:REASON_CHARS_MAX]
