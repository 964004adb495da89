"""The text of one choice: tokens in, shown text out, stop strings applied. Pure.

What has been shown after the tokens [0, p) is a function of those tokens alone, never of how they
were grouped. So any gateway can take over at any position: it feeds [0, p) and drops the text.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.text.detokenizer import Detokenizer, Pieces
from gateway.text.stop_strings import StopMatcher
from gateway.text.tools.parser import Piece

# Of the detokenizer; what the stop strings hold back; output tokens.
State = tuple[tuple[tuple[bytes, int], bool], str, int]


class Fed(NamedTuple):
    """`token_count` of the tokens given were used; fewer than given only if `is_stopped`."""

    text: str
    token_count: int
    is_stopped: bool
    # The same in parts, where the output is parsed.
    pieces: Sequence[Piece] | None = None


class ChoiceText:
    """Invariant: `output_tokens` counts the tokens fed, up to the one that completed a stop."""

    __slots__ = ("_detokenizer", "_include_stop", "_matcher", "output_tokens")

    def __init__(
        self,
        pieces: Pieces,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        keep_leading_space: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(pieces, keep_leading_space=keep_leading_space)
        self._matcher = StopMatcher(stops, include_stop=include_stop) if stops else None
        self._include_stop = include_stop
        self.output_tokens = 0

    def detokenizer(self) -> Detokenizer:
        """The text that tokens add from here on, stop strings or not."""
        return self._detokenizer.copied()

    def feed(self, token_ids: Sequence[int]) -> Fed:
        """The text that became certain. After `is_stopped` nothing may follow."""
        if self._matcher is None:
            self.output_tokens += len(token_ids)
            return Fed(self._detokenizer.feed(token_ids), len(token_ids), False)
        return self._feed_matching(self._matcher, token_ids)

    def feed_last(self, token_id: int) -> Fed:
        """The token that ended the output with STOP, and the flush.

        Either it completes a stop string (which another gateway has matched and cancelled, say), or
        it is a stop token: counted, but no text unless that was asked for.
        """
        if self._include_stop:
            fed = self.feed((token_id,))
            if fed.is_stopped:
                return fed
            tail = self.flush()
            return Fed(fed.text + tail.text, 1, tail.is_stopped)
        if self._matcher is not None:
            before = self._detokenizer.state(), self._matcher.held
            fed = self._feed_matching(self._matcher, (token_id,))
            if fed.is_stopped:
                return fed
            self._detokenizer.restore(before[0])
            self._matcher.held = before[1]
        else:
            self.output_tokens += 1
        return self.flush()._replace(token_count=1)

    def flush(self) -> Fed:
        """The end of the output. An unfinished character can still complete a stop string."""
        tail = self._detokenizer.flush()
        if self._matcher is None:
            return Fed(tail, 0, False)
        match = self._matcher.feed(tail)
        shown = match.shown + ("" if match.is_stopped else self._matcher.flush())
        return Fed(shown, 0, match.is_stopped)

    def state(self) -> State:
        """For `restore`."""
        held = "" if self._matcher is None else self._matcher.held
        return self._detokenizer.state(), held, self.output_tokens

    def restore(self, state: State) -> None:
        """As if what was fed since had not been."""
        detokenizer, held, self.output_tokens = state
        self._detokenizer.restore(detokenizer)
        if self._matcher is not None:
            self._matcher.held = held

    def _feed_matching(self, matcher: StopMatcher, token_ids: Sequence[int]) -> Fed:
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            text = self._detokenizer.feed((token_id,))
            if not text:
                continue
            match = matcher.feed(text)
            shown.append(match.shown)
            if match.is_stopped:
                self.output_tokens += index + 1
                return Fed("".join(shown), index + 1, True)
        self.output_tokens += len(token_ids)
        return Fed("".join(shown), len(token_ids), False)
