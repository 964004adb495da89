"""The text of one choice, and the same in parts: answer, reasoning, tool calls.

What has been told after the tokens [0, p) follows from those tokens alone, as the text does.
"""

from collections.abc import Sequence

from gateway.text.choice_text import ChoiceText, Fed
from gateway.text.detokenizer import Detokenizer
from gateway.text.tools.parser import OutputParser, Piece


class ParsedText:
    """As ChoiceText; what is fed comes back with its pieces."""

    __slots__ = ("_parser", "_reasoning_tokens", "_text")

    def __init__(self, text: ChoiceText, parser: OutputParser) -> None:
        self._text = text
        self._parser = parser
        # Up to the token that ended the reasoning; 0: it has not ended, or there is none.
        self._reasoning_tokens = 0

    @property
    def output_tokens(self) -> int:
        return self._text.output_tokens

    @property
    def has_calls(self) -> bool:
        return self._parser.has_calls

    @property
    def reasoning_tokens(self) -> int:
        """Of the part before the answer, its marks included."""
        return self.output_tokens if self._parser.is_in_reasoning else self._reasoning_tokens

    def detokenizer(self) -> Detokenizer:
        """As of ChoiceText."""
        return self._text.detokenizer()

    def feed(self, token_ids: Sequence[int]) -> Fed:
        """What became certain. `is_stopped` by a stop string, or by the only call that is wanted:
        nothing may follow."""
        texts: list[str] = []
        pieces: list[Piece] = []
        count, is_stopped = 0, False
        while count < len(token_ids) and not is_stopped:
            # One by one where it must be known by which token something ended.
            end = count + 1 if self._counts else len(token_ids)
            fed = self._text.feed(token_ids[count:end])
            count += fed.token_count
            texts.append(fed.text)
            pieces += self._parse(fed.text, is_last=fed.is_stopped)
            is_stopped = fed.is_stopped or self._parser.is_over
        return Fed("".join(texts), count, is_stopped, pieces)

    def feed_last(self, token_id: int) -> Fed:
        if self._parser.is_single_call:
            # Whoever saw the call end has ended the output with this token.
            state, parser, count = self._text.state(), self._parser.copied(), self._reasoning_tokens
            fed = self.feed((token_id,))
            if fed.is_stopped:
                return fed
            self._text.restore(state)
            self._parser, self._reasoning_tokens = parser, count
        fed = self._text.feed_last(token_id)
        return fed._replace(pieces=self._parse(fed.text, is_last=True))

    def flush(self) -> Fed:
        fed = self._text.flush()
        return fed._replace(pieces=self._parse(fed.text, is_last=True))

    @property
    def _counts(self) -> bool:
        return not self._parser.has_begun or self._parser.is_single_call

    def _parse(self, text: str, *, is_last: bool) -> list[Piece]:
        parser = self._parser
        had_ended = parser.has_begun
        pieces = parser.feed(text)
        if parser.has_begun and parser.has_reasoning and not had_ended:
            self._reasoning_tokens = self.output_tokens
        return pieces + parser.flush() if is_last else pieces
