"""From a prompt to token ids: chat template, then tokenizer, never for long on the event loop."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from gateway.children.pool import WorkRefused
from gateway.children.tenant_slots import TenantSlots
from gateway.requests.validation import FarTooLong
from gateway.text.model_card import ModelCard
from gateway.text.template_process import TemplateProcess
from gateway.values.generation_request import (
    ChatPrompt,
    Message,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Tool,
)
from service_kit.errors import InvalidRequest

# Shorter text is tokenized on the spot: it takes less time than handing it to a thread.
INLINE_CHARS_MAX: Final = 2048
# Tokenizing takes some 200 bytes of memory per token, and a token may be one byte of text.
COUNTED_CHARS: Final = 1 << 14
# A text cut anywhere has a few tokens more for each cut; never twice as many. And who only wants to
# know how many there are may be told of more than a context holds.
COUNTED_CONTEXTS: Final = 4


def is_long(prompt: Prompt) -> bool:
    """Whether making ids of it is work."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) > INLINE_CHARS_MAX
    if isinstance(prompt, ChatPrompt):
        return sum(map(len, prompt.texts())) > INLINE_CHARS_MAX
    return False


class Prompter:
    """Turns prompts into ids. At most `concurrent_max` long texts are tokenized at once."""

    def __init__(
        self, card: ModelCard, template: TemplateProcess | None, *, concurrent_max: int = 3
    ) -> None:
        self._card = card
        self._template = template
        self._slots = TenantSlots(concurrent_max)
        # A moment each: nobody waits long for a turn, and one tenant alone has all children.
        count = 1 if template is None else template.count
        self._renderings = TenantSlots(count, spared=0)
        self._control_ids = {text: self._literally(text) for text in card.special_texts}

    async def token_ids(self, prompt: Prompt, tenant: str, context_tokens: int) -> Sequence[int]:
        """The ids of a checked prompt. A tenant's long texts wait for each other first.

        PromptTooLong when there are far more than a context holds; then they were not all made.
        """
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        text = _Text(prompt.field, tenant, context_tokens)
        if isinstance(prompt, TextPrompt):
            return await self._encode(prompt.text, text, has_specials=prompt.adds_specials)
        return await self._encode_chat(prompt, text)

    async def _encode_chat(self, prompt: ChatPrompt, text: "_Text") -> Sequence[int]:
        if self._template is None:
            raise InvalidRequest(prompt.field, "this model has no chat template; send a text")
        most = COUNTED_CONTEXTS * text.context_tokens
        own: dict[str, Any] = {"add_generation_prompt": prompt.opens_turn and not prompt.goes_on}
        if prompt.tools:
            own["tools"] = [*map(_tool, prompt.tools)]
        turns = [_turn(message) for message in prompt.messages]
        try:
            async with self._renderings.place(text.tenant):
                pieces = await self._template.render(
                    turns, dict(prompt.options) | own, goes_on=prompt.goes_on, controls_max=most
                )
        except WorkRefused as error:
            place = prompt.field if error.at is None else prompt.place(error.at)
            raise InvalidRequest(place, error.rule) from None
        if pieces is None:
            raise FarTooLong(text.field, text.context_tokens - 1, most)
        # Without control tokens' texts, which is always but under attack, this is one piece.
        token_ids: list[int] = []
        chars = 0
        for index, piece in enumerate(pieces):
            if index % 2:
                token_ids += self._control_ids[piece]
            elif piece:
                token_ids += await self._encode(piece, text, has_specials=False)
            chars += len(piece)
            if chars > INLINE_CHARS_MAX:
                chars = 0
                await asyncio.sleep(0)
                if len(token_ids) > most:
                    raise FarTooLong(text.field, text.context_tokens - 1, most)
        return token_ids

    def _literally(self, text: str) -> list[int]:
        """A control token's text as ordinary characters: no part of it is looked up whole."""
        token_ids: list[int] = []
        for character in text:
            token_ids += self._card.tokenizer.encode(character, add_special_tokens=False).ids
        return token_ids

    async def _encode(self, text: str, of: "_Text", *, has_specials: bool) -> list[int]:
        """`has_specials`: add what the tokenizer puts around a text, such as BOS."""
        if len(text) <= INLINE_CHARS_MAX:
            return list(self._card.tokenizer.encode(text, add_special_tokens=has_specials).ids)
        async with self._slots.place(of.tenant):
            if len(text) > max(COUNTED_CHARS, COUNTED_CONTEXTS * of.context_tokens):
                await self._refuse_far_too_many(text, of)
            return await self._encode_away(text, has_specials=has_specials)

    async def _refuse_far_too_many(self, text: str, of: "_Text") -> None:
        """Part by part, until there are far too many or all is counted."""
        count, most = 0, COUNTED_CONTEXTS * of.context_tokens
        for start in range(0, len(text), COUNTED_CHARS):
            part = text[start : start + COUNTED_CHARS]
            count += len(await self._encode_away(part, has_specials=False))
            if count > most:
                raise FarTooLong(of.field, of.context_tokens - 1, most)

    async def _encode_away(self, text: str, *, has_specials: bool) -> list[int]:
        # Of all its calls only the batch ones let go of the interpreter's lock.
        [encoding] = await asyncio.to_thread(
            self._card.tokenizer.encode_batch_fast, [text], add_special_tokens=has_specials
        )
        return list(encoding.ids)


def _turn(message: Message) -> dict[str, Any]:
    """As templates read it: they ask whether there is a name."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": from_json(call.arguments)},
        }
        for call in message.tool_calls
    ]
    more = {
        "name": message.name,
        "reasoning_content": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
    }
    # A turn that was cut off while it thought has said nothing; only one that calls has no content.
    content = message.content if calls else message.content or ""
    turn = {"role": message.role, "content": content}
    return turn | {key: value for key, value in more.items() if value}


def _tool(tool: Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    parameters = {"parameters": from_json(tool.parameters)}
    return {"type": "function", "function": {"name": tool.name} | described | parameters}


@dataclass(frozen=True, slots=True)
class _Text:
    """Whose text, under which name, and how many tokens a context has."""

    field: str
    tenant: str
    context_tokens: int
