"""Token ids to text, one token at a time, so that the pieces add up to the whole.

Every token has a byte string: what it adds to the output. The bytes are joined and decoded as UTF-8
incrementally; only the bytes of an unfinished character are held back, and what can never become a
character turns into U+FFFD at once. A token's bytes are found once and cached:

* byte-level tokenizers: by GPT-2's table of printable stand-ins for bytes
* everything else: by asking the tokenizer what a token adds after another one. That is exact, since
  the decoders let in (`PER_TOKEN`) look at one token at a time, or at whether it is the first.

One deliberate difference to `Tokenizer.decode`: with byte fallback it turns *every* byte of a run
of byte tokens into U+FFFD when any of them is wrong, so it can only speak when the run has ended.
Here the characters around the wrong byte survive and nothing waits. Valid text is equal.
"""

import asyncio
import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from service_kit.errors import ConfigError

PER_TOKEN: Final = frozenset(
    {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
)
BYTE_TOKEN: Final = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
# How many ids to try as the neighbour that shows what a token adds.
ANCHORS_TRIED_MAX: Final = 4096
# Ids between two looks at the other requests: a few milliseconds.
TURN: Final = 1 << 14


class Pieces:
    """What each token of one tokenizer adds to the text. Shared by all streams; grows by use.

    `show_special`: control tokens are text like any other; or only those that are `shown`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, show_special: bool = False, shown: Collection[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        # The decoder's own state, not the tokenizer's: that one would write out the vocabulary.
        decoder = tokenizer.decoder
        steps = _decoder_steps(None if decoder is None else json.loads(decoder.__getstate__()))
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids: Final = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self._hidden_ids: Final = (
            frozenset() if show_special else self._special_ids.difference(shown)
        )
        self._is_byte_level = "ByteLevel" in steps
        self._has_byte_tokens = "ByteFallback" in steps
        self._anchor, self._anchor_text = (0, "") if self._is_byte_level else self._find_anchor()
        self._cache: dict[int, bytes] = {}

    def get(self, token_id: int) -> bytes:
        """What the token adds after another one. Empty for hidden and unknown ids."""
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._look_up(token_id)
        return piece

    def first(self, token_id: int) -> bytes:
        """What the token gives as the first of an output: some decoders drop a leading space."""
        if self._is_byte_level or token_id in self._hidden_ids:
            return self.get(token_id)
        byte = self._byte_of(token_id)
        if byte is not None and byte != b" ":
            return byte
        return self._decode([token_id]).encode()

    def join(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of a run of tokens that is not at the start."""
        get = self.get
        return b"".join([get(token_id) for token_id in token_ids])

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones included, for log-probabilities."""
        return (
            self._tokenizer.id_to_token(token_id) or ""
            if token_id in self._special_ids
            else (self.get(token_id).decode("utf-8", "replace"))
        )

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._hidden_ids:
            return b""
        if self._is_byte_level:
            return _byte_level_bytes(token)
        byte = self._byte_of(token_id)
        if byte is not None:
            return byte
        return self._decode([self._anchor, token_id])[len(self._anchor_text) :].encode()

    def _byte_of(self, token_id: int) -> bytes | None:
        if not self._has_byte_tokens:
            return None
        match = BYTE_TOKEN.match(self._tokenizer.id_to_token(token_id) or "")
        return bytes.fromhex(match[1]) if match else None

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Control tokens that are hidden never come here."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _find_anchor(self) -> tuple[int, str]:
        for token_id in range(min(self._tokenizer.get_vocab_size(), ANCHORS_TRIED_MAX)):
            if token_id in self._special_ids or self._byte_of(token_id) is not None:
                continue
            text = self._decode([token_id])
            twice = self._decode([token_id, token_id])
            if text.strip() and twice.startswith(text) and len(twice) > len(text):
                return token_id, text
        raise ConfigError("tokenizer.json has no token that shows as text")


class Detokenizer:
    """The text of one output. `feed` gives what became certain, `flush` what was left."""

    __slots__ = ("_decode", "_decoder", "_is_start", "_pieces")

    def __init__(self, pieces: Pieces, *, keep_leading_space: bool = False) -> None:
        """`keep_leading_space`: also where the tokenizer's decoder drops it."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = self._decoder.decode
        self._is_start = not keep_leading_space

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text these tokens complete. The same whether fed one by one or all at once."""
        if self._is_start:
            return self._decode(self._feed_start(token_ids))
        if len(token_ids) == 1:
            return self._decode(self._pieces.get(token_ids[0]))
        return self._decode(self._pieces.join(token_ids))

    def flush(self) -> str:
        """The end: an unfinished character becomes U+FFFD, it is not dropped in silence."""
        return self._decode(b"", True)

    def copied(self) -> "Detokenizer":
        """Another one, which goes on from here."""
        copy = Detokenizer(self._pieces)
        copy.restore(self.state())
        return copy

    def state(self) -> tuple[tuple[bytes, int], bool]:
        """For `restore`: as if nothing had been fed since."""
        return self._decoder.getstate(), self._is_start

    def restore(self, state: tuple[tuple[bytes, int], bool]) -> None:
        self._decoder.setstate(state[0])
        self._is_start = state[1]

    def _feed_start(self, token_ids: Sequence[int]) -> bytes:
        head = b""
        for index, token_id in enumerate(token_ids):
            head += self._pieces.first(token_id)
            # A token that shows only elsewhere was the first: its space is what got dropped.
            if self._pieces.get(token_id):
                self._is_start = False
                return head + self._pieces.join(token_ids[index + 1 :])
        return head


def decode(pieces: Pieces, token_ids: Sequence[int]) -> str:
    """The whole text of an output, by the same rules as the stream."""
    detokenizer = Detokenizer(pieces)
    return detokenizer.feed(token_ids) + detokenizer.flush()


async def decode_in_turns(pieces: Pieces, token_ids: Sequence[int]) -> str:
    """As `decode`, with a chance for everybody else now and then: there may be a million."""
    detokenizer = Detokenizer(pieces)
    texts = []
    for start in range(0, len(token_ids), TURN):
        texts.append(detokenizer.feed(token_ids[start : start + TURN]))
        await asyncio.sleep(0)
    return "".join(texts) + detokenizer.flush()


def _decoder_steps(decoder: Mapping[str, Any] | None) -> frozenset[str]:
    """The kinds of decoder in use. ConfigError for one whose output a later token can change."""
    if decoder is None:
        return frozenset()
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = frozenset(str(step["type"]) for step in steps)
    unknown = sorted(kinds - PER_TOKEN)
    if unknown:
        raise ConfigError(
            f"tokenizer.json uses the decoder {unknown[0]}, which cannot be streamed; "
            f"supported are {', '.join(sorted(PER_TOKEN))}"
        )
    strips_end = any(step["type"] == "Strip" and step["stop"] for step in steps)
    if strips_end and "Fuse" in kinds:
        raise ConfigError("tokenizer.json strips the end of its output, which cannot be streamed")
    return kinds


def _stand_ins() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_STAND_INS: Final = _stand_ins()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes a token stands for; one that is not written in stand-ins is itself."""
    try:
        return bytes([_STAND_INS[character] for character in token])
    except KeyError:
        return token.encode()
