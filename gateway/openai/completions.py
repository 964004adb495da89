"""/v1/completions: what it reads, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.openai.generate import generating
from gateway.openai.generation_body import GenerationBody
from gateway.openai.logprobs import PromptLogprobs, TokenLogprob
from gateway.openai.parts import Chunk, Echo, Fields, Format, Head, Part, Reason, TokenIds
from gateway.openai.request_body import IdLists, Ids, Texts
from gateway.openai.usage import Count, Timing, Usage
from gateway.requests.validation import Limits, TooMany
from gateway.text.detokenizer import Pieces, decode
from gateway.values import request_ids
from gateway.values.generation_request import GenerationRequest, Prompt, TextPrompt, TokenPrompt
from service_kit.errors import InvalidRequest

# Of a body that says no max_tokens, as OpenAI and vLLM have it: a base model never stops.
COMPLETION_TOKENS: Final = 16


class CompletionLogprobs(Struct):
    """A column per kind."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[Count]


class CompletionChoice(Struct):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionReply(Head, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage
    kaiten: Timing


class CompletionChunk(Chunk, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


def _chunk_choice(part: Part) -> CompletionChoice | None:
    return None if part.is_first and not part.text else _choice(part)


def _reply(head: Fields, wholes: Sequence[Part], ends: Fields) -> CompletionReply:
    return CompletionReply(**head, choices=[_choice(each) for each in wholes], **ends)


def _choice(part: Part) -> CompletionChoice:
    return CompletionChoice(
        index=part.choice,
        text=part.text,
        logprobs=None if part.logprobs is None else columns(part.logprobs),
        finish_reason=part.reason,
        token_ids=part.token_ids,
        prompt_logprobs=part.prompt_logprobs,
    )


def columns(tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
    """Of tokens that look the same the likeliest counts: they are ordered."""
    return CompletionLogprobs(
        [each.text for each in tokens],
        [each.logprob for each in tokens],
        [
            None if each.top is None else {text: logprob for text, _, logprob in reversed(each.top)}
            for each in tokens
        ],
        [each.offset for each in tokens],
    )


COMPLETION: Final = Format(request_ids.COMPLETION, CompletionChunk, _chunk_choice, _reply)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    FORMAT = COMPLETION
    identity = COMPLETION.id_prefix.encode()
    hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "here it is max_tokens"),
        **dict.fromkeys(("messages", "reasoning_effort"), "it is for POST /v1/chat/completions"),
        "input": "here it is prompt",
        "top_logprobs": "here it is logprobs, a number",
    }

    prompt: str | Ids | Texts | IdLists
    """Must become at least one token, which an empty text does only where the tokenizer adds one,
    and leave room for an output token. Texts are bounded in bytes of UTF-8."""
    max_tokens: int | None = None
    """With the prompt's tokens at most the context. Left out: 16, or fewer where the context ends
    before. 0 scores a prompt whose log-probabilities are asked for, and is refused for others."""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    """Only what n is."""
    add_special_tokens: bool | None = None
    """false: texts without what the tokenizer puts around them, such as BOS. Left out: true."""

    @property
    def aliases(self) -> Mapping[str, str]:
        return {**super().aliases, "text": "prompt"}

    def requests(self, limits: Limits, prompts_max: int) -> list[GenerationRequest]:
        prompts = _prompts(self.prompt, adds_specials=self.add_special_tokens is not False)
        if not prompts:
            raise InvalidRequest("prompt", "must not be empty")
        if len(prompts) > prompts_max:
            raise TooMany("prompt", prompts_max, len(prompts), "prompts")
        self._check_choosing()
        # Likeliest tokens beside each of the prompt's own, where it comes before the text.
        echoed, asked = self.logprobs if self.echo else None, self.prompt_logprobs
        # A negative one stays, to be refused.
        is_more = echoed is not None and (asked is None or 0 <= asked < echoed)
        given = {"prompt_logprobs": echoed} if is_more else {}
        requests = [self.request(prompt, limits, **given) for prompt in prompts]
        return [replace(request, default_max_tokens=COMPLETION_TOKENS) for request in requests]

    def echoed(self, prompt: Prompt, pieces: Pieces) -> Echo:
        """The prompt's text, for whoever wants to see it again."""
        if not self.echo:
            return Echo()
        if isinstance(prompt, TextPrompt):
            return Echo(prompt.text, self.logprobs)
        assert isinstance(prompt, TokenPrompt)
        return Echo(decode(pieces, prompt.token_ids), self.logprobs)

    def _check_choosing(self) -> None:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            rule = f"must be at least n, which is {n}, got {self.best_of}"
            raise InvalidRequest("best_of", rule)
        if self.best_of is not None and self.best_of > n:
            rule = "larger than n is not supported; ask for n with logprobs and choose yourself"
            raise InvalidRequest("best_of", rule)


def _prompts(
    prompt: str | list[int] | list[str] | list[list[int]], *, adds_specials: bool
) -> list[Prompt]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]  # type: ignore[assignment]
    return [
        TextPrompt(text=item, adds_specials=adds_specials)
        if isinstance(item, str)
        else TokenPrompt(token_ids=tuple(item))  # type: ignore[arg-type]
        for item in prompt
    ]


OPERATIONS: Final = (
    generating("/v1/completions", "complete", CompletionReply, CompletionBody, CompletionChunk),
)
