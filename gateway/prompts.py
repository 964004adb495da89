"""From a prompt to token ids: chat template, then tokenizer, never for long on the event loop."""

import asyncio
import re
import secrets
from collections.abc import Sequence
from typing import Final

from gateway.asks import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from gateway.model_card import ModelCard
from gateway.template_process import TemplateProcess
from service_kit.errors import InvalidRequest

# Shorter text is tokenized on the spot: it takes less time than handing it to a thread.
INLINE_CHARS_MAX: Final = 2048


def is_long(prompt: Prompt) -> bool:
    """Whether making ids of it is work."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) > INLINE_CHARS_MAX
    if isinstance(prompt, ChatPrompt):
        return sum(len(message.content) for message in prompt.messages) > INLINE_CHARS_MAX
    return False


class Prompter:
    """Turns prompts into ids. At most `concurrent_max` long texts are tokenized at once."""

    def __init__(
        self, card: ModelCard, template: TemplateProcess | None, *, concurrent_max: int = 2
    ) -> None:
        self._card = card
        self._template = template
        self._slots = asyncio.Semaphore(concurrent_max)
        # Only this process knows it, so no client can write a marker.
        self._nonce = secrets.token_hex(8)
        self._special = _any_of(card.special_texts)
        self._marker = re.compile(f"\ue000{self._nonce}:(\\d+)\ue001")

    async def token_ids(self, prompt: Prompt) -> Sequence[int]:
        """The ids of a checked prompt."""
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        if isinstance(prompt, TextPrompt):
            return await self._encode(prompt.text, has_specials=True)
        return await self._encode_chat(prompt)

    async def _encode_chat(self, prompt: ChatPrompt) -> Sequence[int]:
        if self._template is None:
            raise InvalidRequest(prompt.field, "this model has no chat template; send a text")
        rendered = await self._template.render(
            [{"role": item.role, "content": self._hide(item.content)} for item in prompt.messages],
            {
                name: self._hide(value) if isinstance(value, str) else value
                for name, value in prompt.options
            },
        )
        # Without markers, which is always but under attack, this is one piece.
        token_ids: list[int] = []
        for index, piece in enumerate(self._marker.split(rendered)):
            if index % 2 == 0:
                token_ids += await self._encode(piece, has_specials=False)
            else:
                token_ids += await self._encode_literally(self._card.special_texts[int(piece)])
        return token_ids

    def _hide(self, content: str) -> str:
        """A client's text with control tokens marked, so that they come out as plain text."""
        if self._special is None or not self._special.search(content):
            return content
        texts = self._card.special_texts
        return self._special.sub(
            lambda match: f"\ue000{self._nonce}:{texts.index(match[0])}\ue001", content
        )

    async def _encode_literally(self, text: str) -> list[int]:
        """A control token's text as ordinary characters: no part of it is looked up whole."""
        token_ids: list[int] = []
        for character in text:
            token_ids += await self._encode(character, has_specials=False)
        return token_ids

    async def _encode(self, text: str, *, has_specials: bool) -> list[int]:
        """`has_specials`: add what the tokenizer puts around a text, such as BOS."""
        tokenizer = self._card.tokenizer
        if len(text) <= INLINE_CHARS_MAX:
            return list(tokenizer.encode(text, add_special_tokens=has_specials).ids)
        async with self._slots:
            # Of all its calls only the batch ones let go of the interpreter's lock.
            [encoding] = await asyncio.to_thread(
                tokenizer.encode_batch_fast, [text], add_special_tokens=has_specials
            )
        return list(encoding.ids)


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, texts))) if texts else None
