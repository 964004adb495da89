"""What a grammar is kept by is what a client sees: llguidance's tokens beside the gateway's."""

from collections.abc import Callable
from pathlib import Path

import pytest
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


@pytest.mark.parametrize("kind", [built.word_piece, built.word_level])
def test_tokenizers_whose_tokens_have_no_text_of_their_own_are_refused(
    kind: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="can't determine decoder type"):
        read(kind(), tmp_path)
