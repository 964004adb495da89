"""A child of `template_process`: renders what it is asked.

Control tokens' texts are looked for here too: that is work for every character.
"""

from collections.abc import Mapping
from typing import Any, Final

from gateway.children.child import Refused, serve
from gateway.text.chat_template import ChatTemplate, TemplateFailed
from gateway.text.control_texts import ControlTexts
from gateway.text.template_refusal import Messages, refused_at

MEMORY_BYTES_MAX: Final = 512 << 20


class Renderer:
    """What a child does with a question."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._template = ChatTemplate(setup["source"], setup["names"])
        self._controls = ControlTexts(setup["control_texts"])
        self._text_bytes_max: int = setup["text_bytes_max"]

    def __call__(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        messages, options = self._hide(question["messages"]), self._hide(question["options"])

        def render(some: Messages) -> str:
            goes_on = question["goes_on"] and len(some) == len(messages)
            return self._template.render(some, goes_on, **options)

        try:
            pieces = self._pieces(render(messages))
        except TemplateFailed as error:
            raise Refused(f"says: {error}", refused_at(render, messages, error)) from error
        # A control token's text is a token at least, and each is work and memory for who asked.
        return {"pieces": pieces if len(pieces) // 2 <= question["controls_max"] else None}

    def _pieces(self, rendered: str) -> list[str]:
        pieces = self._controls.split(rendered)
        size_bytes = sum(len(piece.encode()) for piece in pieces)
        if size_bytes > self._text_bytes_max:
            limit = f"at most {self._text_bytes_max} bytes, got {size_bytes}"
            raise TemplateFailed(f"the rendered prompt must have {limit}", is_of_work=True)
        return pieces

    def _hide(self, value: Any) -> Any:
        """In all texts of it, keys of a client's objects among them."""
        if isinstance(value, str):
            return self._controls.hide(value)
        if isinstance(value, dict):
            return {self._controls.hide(key): self._hide(item) for key, item in value.items()}
        return [*map(self._hide, value)] if isinstance(value, list) else value


if __name__ == "__main__":
    serve(Renderer, MEMORY_BYTES_MAX)
