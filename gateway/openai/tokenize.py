"""/tokenize and /detokenize: what they read, and what they answer."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Struct

from gateway.http.exchange import HttpExchange
from gateway.openai.chat import ChatMessageBody, chat_prompt
from gateway.openai.operation import READS, Api, Operation
from gateway.openai.request_body import FAIL_FAST, Ids, Options, RequestBody
from gateway.openai.usage import Count
from gateway.values.generation_request import GenerationRequest, Prompt, TextPrompt, TokenPrompt
from service_kit.errors import InvalidRequest

# Numbers written between two looks at the other requests: a few milliseconds.
PIECE: Final = 1 << 14


class TokenizeBody(RequestBody):
    """POST /tokenize: what a prompt becomes."""

    model: str | None = None
    prompt: str | None = None
    """This, or messages."""
    messages: Annotated[list[ChatMessageBody], FAIL_FAST] | None = None
    chat_template_kwargs: Options | None = None
    """Needs messages."""

    @property
    def aliases(self) -> Mapping[str, str]:
        return {"text": "prompt"}

    def request(self) -> GenerationRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "give either prompt or messages")
        if self.messages is None and self.chat_template_kwargs:
            raise InvalidRequest("chat_template_kwargs", "needs messages")
        prompt: Prompt = TextPrompt(text=self.prompt or "")
        if self.messages is not None:
            prompt = chat_prompt(self.messages, self.chat_template_kwargs)
        return GenerationRequest(prompt=prompt, body_hash=b"", model=self.model or "")


class DetokenizeBody(RequestBody):
    """POST /detokenize: the text of token ids."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None
    """Left out: true."""

    @property
    def aliases(self) -> Mapping[str, str]:
        return {"token_ids.ids": "tokens"}

    def request(self) -> GenerationRequest:
        return GenerationRequest(
            prompt=TokenPrompt(token_ids=tuple(self.tokens)),
            body_hash=b"",
            model=self.model or "",
            show_special_tokens=self.skip_special_tokens is False,
        )


class Tokens(Struct):
    count: Count
    max_model_len: Count
    tokens: list[Count]


class Text(Struct):
    prompt: str


async def tokenize(api: Api, exchange: HttpExchange, body: TokenizeBody) -> None:
    """`Tokens`, written piece by piece: other requests have their turn after each."""
    with body.aliased():
        ids = await api.generation_service.tokenize(body.request(), exchange.tenant)
    pieces = []
    for start in range(0, len(ids), PIECE):
        pieces.append(",".join(map(str, ids[start : start + PIECE])))
        await asyncio.sleep(0)
    context = api.generation_service.limits.context_tokens_max
    head = f'{{"count":{len(ids)},"max_model_len":{context},"tokens":['
    await exchange.send(200, f"{head}{','.join(pieces)}]}}".encode())


async def detokenize(api: Api, exchange: HttpExchange, body: DetokenizeBody) -> None:
    with body.aliased():
        text = await api.generation_service.detokenize(body.request())
    await exchange.send_json(200, Text(text))


OPERATIONS: Final = (
    Operation("POST", "/tokenize", "tokenize", tokenize, READS, (Tokens,), (), TokenizeBody),
    Operation("POST", "/detokenize", "detokenize", detokenize, READS, (Text,), (), DetokenizeBody),
)
