"""/tokenize and /detokenize: what they read, and what they answer."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Struct

from gateway.http.exchange import HttpExchange
from gateway.openai.chat import ChatMessageBody, ConversationBody
from gateway.openai.operation import READS, Api, Operation
from gateway.openai.request_body import ELSEWHERE, FAIL_FAST, Ids, RequestBody
from gateway.openai.usage import Count
from gateway.values.generation_request import GenerationRequest, Prompt, TextPrompt, TokenPrompt
from service_kit.errors import InvalidRequest

# Numbers written between two looks at the other requests: a few milliseconds.
PIECE: Final = 1 << 14
# Which say how messages become a prompt.
OF_MESSAGES: Final = tuple(ConversationBody.model_fields)


class TokenizeBody(ConversationBody):
    """POST /tokenize: what a prompt becomes. What is said of messages needs them."""

    model: str | None = None
    prompt: str | None = None
    """This, or messages."""
    add_special_tokens: bool | None = None
    """Of a prompt, as in completions. Of messages only false: the chat template writes them."""
    messages: Annotated[list[ChatMessageBody], FAIL_FAST] | None = None

    @property
    def aliases(self) -> Mapping[str, str]:
        return {"text": "prompt"}

    def request(self) -> GenerationRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "give either prompt or messages")
        prompt: Prompt
        if self.messages is None:
            if given := next((name for name in OF_MESSAGES if getattr(self, name)), None):
                raise InvalidRequest(given, "needs messages")
            adds_specials = self.add_special_tokens is not False
            prompt = TextPrompt(text=self.prompt or "", adds_specials=adds_specials)
        else:
            if self.add_special_tokens:
                raise InvalidRequest("add_special_tokens", ELSEWHERE["add_special_tokens"])
            prompt = self.chat_prompt(self.messages)
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
        text = await api.generation_service.detokenize(
            body.request(), exchange.tenant, TokenPrompt.field
        )
    await exchange.send_json(200, Text(text))


OPERATIONS: Final = (
    Operation("POST", "/tokenize", "tokenize", tokenize, READS, (Tokens,), (), TokenizeBody),
    Operation("POST", "/detokenize", "detokenize", detokenize, READS, (Text,), (), DetokenizeBody),
)
