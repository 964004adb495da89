"""What a grammar is kept by is what a client sees: llguidance's tokens beside the gateway's."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from gateway.text.detokenizer import Detokenizer, Pieces
from service_kit.grammars import GrammarTokenizer
from tests.support import tokenizers as built

READABLE: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": built.byte_level_bpe,
    "sentencepiece": built.sentencepiece_bpe,
    "gemma": built.gemma_like_bpe,
    "unigram": built.metaspace_unigram,
}


def read(tokenizer: Tokenizer, folder: Path) -> GrammarTokenizer:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return GrammarTokenizer(path, tokenizer.get_vocab_size())


@pytest.mark.parametrize("kind", READABLE)
def test_a_client_sees_the_text_that_a_token_has_in_a_grammar(kind: str, tmp_path: Path) -> None:
    tokenizer = READABLE[kind]()
    tokens, pieces = read(tokenizer, tmp_path).tokens, Pieces(tokenizer)
    compared = 0
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokens.decode_bytes([token_id])
        # Those that no grammar but one that names them lets in; byte 255 is in no text.
        if tokens.is_special_token(token_id) or pieces.get(token_id) == b"\xff":
            continue
        shown = Detokenizer(pieces, keep_leading_space=True)
        assert shown.feed([token_id]) + shown.flush() == text.decode("utf-8", "replace")
        compared += 1
    assert compared > 80


def written(tokens: GrammarTokenizer, grammar: str) -> list[int]:
    """The tokens of the only output of a grammar, by its masks; fewer: it cannot be written."""
    matcher, token_ids = tokens.compiled(grammar), list[int]()
    mask = np.zeros((1, tokens.mask_words), np.uint32)
    while True:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        tokens.spell_out([matcher], mask)
        bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if not bits or tokens.end in bits:
            return token_ids
        token_ids.append(bits[0])
        assert matcher.consume_token(bits[0]), matcher.get_error()


@pytest.mark.parametrize("kind", READABLE)
def test_the_text_of_a_control_token_is_text(kind: str, tmp_path: Path) -> None:
    """And the token itself is where a grammar names it."""
    tokenizer = READABLE[kind]()
    tokens = read(tokenizer, tmp_path)
    user = tokenizer.token_to_id("<|user|>")
    assert written(tokens, 'start: "a" <|user|> "b"')[1:-1] == [user]
    for text in ("<|user|>", "a<|user|>b", "a</s>"):
        token_ids = written(tokens, f"start: {json.dumps(text)}")
        assert not any(tokens.tokens.is_special_token(each) for each in token_ids)
        # This one has no tokens for some of the characters.
        assert kind == "unigram" or tokens.tokens.decode_bytes(token_ids) == text.encode()


@pytest.mark.parametrize("kind", [built.word_piece, built.word_level])
def test_tokenizers_whose_tokens_have_no_text_of_their_own_are_refused(
    kind: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="can't determine decoder type"):
        read(kind(), tmp_path)


def reading(tokens: GrammarTokenizer, grammar: str, text: bytes) -> str:
    """Letter by letter: why it ends, and where; empty: it goes on."""
    matcher = tokens.compiled(grammar)
    for place, byte in enumerate(text):
        matcher.compute_logit_bias()
        if not matcher.consume_token(tokens.tokens.tokenize_bytes(bytes([byte]))[0]):
            return f"{place}: {matcher.get_error()}"
    return ""


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> GrammarTokenizer:
    return read(built.byte_level_bpe(), tmp_path_factory.mktemp("letters"))


@pytest.mark.parametrize(("times", "deep"), [(9, 3), (9, 4), (30, 2), (60, 2), (99, 4)])
def test_what_is_counted_in_counts_ends_before_a_row_is_long(
    letters: GrammarTokenizer, times: int, deep: int
) -> None:
    """The time of a row grows with its square: 540 ms for one letter, with rows of 10,000."""
    rules = [f"r{level}: r{level + 1}{{1,{times}}}" for level in range(deep)]
    grammar = "\n".join(["start: r0", *rules, f"r{deep}: /q/"])
    said = reading(letters, grammar, b"q" * 300)
    assert "items" in said
    assert int(said.partition(":")[0]) < 60


def test_many_texts_are_one_terminal_or_fewer_than_a_row_has(letters: GrammarTokenizer) -> None:
    texts = " | ".join(f'"cmd{index} "' for index in range(3000))
    assert not reading(letters, f"start: T+\nT: {texts}", b"cmd7 cmd2999 cmd12 ")
    assert "items" in reading(letters, f"start: {texts}", b"cmd7 ")
    assert not reading(
        letters, f"start: t+\nt: {' | '.join(texts.split(' | ')[:900])}", b"cmd7 " * 9
    )


def test_wide_objects_and_long_expressions_are_read_to_their_end(letters: GrammarTokenizer) -> None:
    names = {f"k{index}": {"type": "string"} for index in range(1000)}
    for is_open in (True, False):
        schema = {"type": "object", "properties": names, "additionalProperties": is_open}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        assert not reading(letters, grammar, b'{"k1": "a", "k7": "b", "k998": "c"')
    sums = 'start: e\ne: t (("+" | "-") t)*\nt: f (("*" | "/") f)*\nf: /[0-9]+/ | "(" e ")"'
    assert not reading(letters, sums, b"(1+2*(3-4)/5)*7-" * 60)
