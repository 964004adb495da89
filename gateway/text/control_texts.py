"""Texts of control tokens inside what clients say: hidden from the template, found again after it.

What a client wrote is no control token, so its text is marked before the template puts real ones
around it, and everything between the marks is tokenized as usual. Pure.
"""

import os
import re
from collections.abc import Sequence


class ControlTexts:
    """The control tokens of one model, by their text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._index = {text: index for index, text in enumerate(texts)}
        self._texts = tuple(texts)
        self._any = re.compile(_any_of(texts)) if texts else None
        # Only this process knows it, so no client can write a mark.
        nonce = os.urandom(8).hex()
        self._open = f"\ue000{nonce}:"
        self._mark = re.compile(f"{self._open}(\\d+)\ue001")

    def hide(self, text: str) -> str:
        """A client's text with a mark for each control token's text."""
        if self._any is None:
            return text
        return self._any.sub(lambda match: f"{self._open}{self._index[match[0]]}\ue001", text)

    def split(self, rendered: str) -> list[str]:
        """Text, control token's text, text, …: what was hidden is at the odd places."""
        pieces = self._mark.split(rendered)
        pieces[1::2] = [self._texts[int(index)] for index in pieces[1::2]]
        return pieces


def _any_of(texts: Sequence[str]) -> str:
    """A pattern for the longest of these texts, which reads each character once.

    Alternatives one after the other would be tried one after the other, at every `<` of a text.
    """
    rests: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
    if not rests:
        return ""
    heads = "|".join(re.escape(head) + _any_of(rest) for head, rest in rests.items())
    return f"(?:{heads})?" if "" in texts else f"(?:{heads})" if len(rests) > 1 else heads
