"""How a request's tokens are shown: the pieces of text they are, and as what they are read."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from gateway.requests.reading import reading
from gateway.requests.stream import Choice, Presentation, checked_choices, new_choices
from gateway.text.detokenizer import Pieces
from gateway.text.model_card import ModelCard
from kaiten.v1.ledger_pb2 import RenderOptions

PIECES_MAX: Final = 4


class Presenter:
    """Of one model."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        # They are those of the model's own marks, with tools or without.
        self._pieces_showing = lru_cache(PIECES_MAX)(
            lambda shown: Pieces(card.tokenizer, shown=shown)
        )

    def _pieces(self, render: RenderOptions) -> Pieces:
        if render.show_special_tokens:
            return self._card.pieces_with_special
        shown = render.shown_token_ids
        return self._pieces_showing(frozenset(shown)) if shown else self._card.pieces

    def presentation(self, render: RenderOptions, request_id: str) -> Presentation:
        return Presentation(
            pieces=self._pieces(render),
            render=render,
            reading=reading(self._card, render, request_id),
        )

    def choices(
        self,
        presentation: Presentation,
        sequence_id: int,
        n: int,
        positions: Sequence[int] = (),
        *,
        cursors: Sequence[bytes] = (),
        with_cursors: bool,
    ) -> Sequence[Choice]:
        """Digests cost a microsecond per token: only for those who asked."""
        if cursors or (with_cursors and not positions):
            return checked_choices(presentation, sequence_id, n, cursors, with_cursors=with_cursors)
        return new_choices(presentation, n, positions)
