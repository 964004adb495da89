"""Deltas add up to the full decode, under every kind of tokenizer, however tokens are grouped."""

import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.text.detokenizer import Detokenizer, Pieces, decode
from service_kit.errors import ConfigError
from tests.support import tokenizers as built
from tests.support.cpu_cost import costs_at_most

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": built.byte_level_bpe,
    "sentencepiece": built.sentencepiece_bpe,
    "gemma": built.gemma_like_bpe,
    "unigram": built.metaspace_unigram,
    "word_piece": built.word_piece,
    "word_level": built.word_level,
}
ids = st.lists(st.integers(0, 520), max_size=40)


def stream(pieces: Pieces, token_ids: Sequence[int], group: int = 1) -> list[str]:
    detokenizer = Detokenizer(pieces)
    texts = [
        detokenizer.feed(token_ids[begin : begin + group])
        for begin in range(0, len(token_ids), group)
    ]
    return [*texts, detokenizer.flush()]


def oracle(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str | None:
    """Tokenizer.decode, or None where it gives up whole runs of byte tokens (see the module)."""
    tokens = [tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
    if "ByteFallback" in tokenizer.to_str():
        special = set(built.SPECIALS)
        # Special and unknown tokens vanish before bytes are joined.
        written = "".join(token for token in tokens if token and token not in special)
        for run in re.findall(r"(?:<0x[0-9A-F]{2}>)+", written):
            try:
                bytes.fromhex(re.sub(r"[<>]|0x", "", run)).decode()
            except UnicodeDecodeError:
                return None
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


@pytest.mark.parametrize("kind", KINDS)
@given(token_ids=ids, group=st.integers(1, 7))
def test_deltas_add_up_to_the_full_decode(kind: str, token_ids: list[int], group: int) -> None:
    tokenizer = KINDS[kind]()
    pieces = Pieces(tokenizer)
    whole = "".join(stream(pieces, token_ids, group))
    assert whole == decode(pieces, token_ids)
    expected = oracle(tokenizer, token_ids)
    if expected is not None:
        assert whole == expected


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=30) | st.sampled_from(built.CORPUS))
def test_encoded_text_decodes_as_the_tokenizer_says(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    token_ids = tokenizer.encode(text).ids
    assert "".join(stream(Pieces(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@given(token_ids=ids, cut=st.integers(0, 40))
def test_what_is_shown_depends_only_on_the_tokens_before(token_ids: list[int], cut: int) -> None:
    pieces = Pieces(built.byte_level_bpe())
    one_by_one, at_once = Detokenizer(pieces), Detokenizer(pieces)
    singly = "".join(one_by_one.feed((token_id,)) for token_id in token_ids[:cut])
    assert singly == at_once.feed(token_ids[:cut])


def test_only_an_unfinished_character_is_held_back() -> None:
    tokenizer = built.gemma_like_bpe()
    token_ids = [built.token_id(tokenizer, f"<0x{byte:02X}>") for byte in "é😀a".encode()]
    assert stream(Pieces(tokenizer), token_ids) == ["", "é", "", "", "", "😀", "a", ""]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"a\xff\x80b", "a��b"),
        (b"\xe2\x82b", "�b"),
        (b"\xe2\x82", "�"),
        ("€".encode() + b"\xff" + "é".encode(), "€�é"),
        (b"\xf0\x9f\x98", "�"),
    ],
)
def test_wrong_bytes_become_one_replacement_and_the_rest_goes_on(raw: bytes, expected: str) -> None:
    tokenizer = built.sentencepiece_bpe()
    token_ids = [built.token_id(tokenizer, f"<0x{byte:02X}>") for byte in raw]
    assert "".join(stream(Pieces(tokenizer), token_ids)) == expected
    assert raw.decode("utf-8", "replace") == expected


def test_a_leading_space_is_dropped_once_and_only_at_the_start() -> None:
    tokenizer = built.sentencepiece_bpe()
    pieces = Pieces(tokenizer)
    space, byte_space = built.token_id(tokenizer, "▁"), built.token_id(tokenizer, "<0x20>")
    bos = built.token_id(tokenizer, "<s>")
    for token_ids in ([space, space], [bos, byte_space, space], [space, byte_space]):
        assert "".join(stream(pieces, token_ids)) == " "
    assert Detokenizer(pieces, keep_leading_space=True).feed([bos, space, space]) == "  "


def test_ids_beyond_the_tokenizer_show_nothing() -> None:
    assert decode(Pieces(built.byte_level_bpe()), [10**6, 2**31]) == ""


def test_a_decoder_that_needs_the_future_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b</w>": 1}, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    with pytest.raises(ConfigError, match="BPEDecoder, which cannot be streamed"):
        Pieces(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(ConfigError, match="strips the end"):
        Pieces(tokenizer)


def test_a_token_costs_little() -> None:
    """As much late in a text as early; how much that is, the guard keeps."""
    tokenizer = built.byte_level_bpe()
    pieces = Pieces(tokenizer)
    token_ids = tokenizer.encode("".join(built.CORPUS)).ids * 2
    costs_at_most(
        2,
        work=lambda: stream(pieces, token_ids * 32),
        yardstick=lambda: [stream(pieces, token_ids) for _ in range(32)],
    )
