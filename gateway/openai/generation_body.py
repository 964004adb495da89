"""What the bodies of generating endpoints take, and their way to a request.

A field that is called as in SamplingParams is sampled by; it needs no other line here.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

from gateway.http.json_body import cut
from gateway.openai.fields.structured_outputs import (
    OTHER_NAMES,
    OtherNames,
    ResponseFormat,
    ResponseTextFormat,
    StructuredOutputsBody,
    of_form,
)
from gateway.openai.parts import Echo, Format
from gateway.openai.request_body import Biases, IdLists, Ids, RequestBody, Texts
from gateway.requests import structured_outputs
from gateway.requests.validation import Limits, sampling_from
from gateway.tenants import PRIORITY_MAX
from gateway.text.detokenizer import Pieces
from gateway.values.generation_request import GenerationRequest, Prompt
from kaiten.v1.common_pb2 import SamplingParams, StructuredOutputs
from service_kit.errors import InvalidRequest

SAMPLING_FIELDS: Final = tuple(SamplingParams.DESCRIPTOR.fields_by_name)
# Few enough digits that one string has one meaning and none costs time.
TOKEN_ID: Final = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """With include_usage each chunk has its choice's usage so far."""


class PromptCacheOptions(RequestBody):
    mode: str | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None
    prewarm: Literal[False] | None = None
    """true would be to compute nothing else."""


class SamplingBody(RequestBody):
    """How any endpoint samples, vendor extras included."""

    model: str | None = None
    """Left out or empty: the only model. Another one is answered with 404."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1: all."""
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    """At most as many as there may be."""
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    """By token id, as a string: JSON has no other keys."""
    allowed_token_ids: Ids | None = None
    """Empty: all. One must be left by bad_words_token_ids of one token and, with min_tokens, by
    the tokens that stop."""
    bad_words_token_ids: IdLists | None = None
    """Something of the vocabulary must be left."""
    structured_outputs: StructuredOutputsBody | None = None
    """As in vLLM: what the whole output must be. Needs a token that ends it, and no min_tokens."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    service_tier: Literal["auto", "default", "fast", "flex", "priority", "scale"] | None = None
    """flex: behind all others, and giving way to them, as lines of batches do. No other changes
    anything."""
    prompt_cache_options: PromptCacheOptions | None = None
    """Taken and not looked at: the prefix cache is always on, and keeps what it has room for."""
    priority: int | None = None
    """As other servers have it: lower runs first. A tenant may have a bound of its own."""

    def request(self, prompt: Prompt, limits: Limits, **given: Any) -> GenerationRequest:
        """What all ask alike. `given`: sampling fields that they read in their ways."""
        sampling, wrong = sampling_from(self._sampling() | given, limits)
        return GenerationRequest(
            prompt=prompt,
            body_hash=b"",
            model=self.model or "",
            sampling=sampling,
            sampling_wrong=wrong,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            include_stop=bool(self.include_stop_str_in_output),
            show_special_tokens=self.skip_special_tokens is False,
            priority=-self._priority,
        )

    @property
    def is_flex(self) -> bool:
        return self._priority == PRIORITY_MAX

    @property
    def _priority(self) -> int:
        if self.priority is None:
            return PRIORITY_MAX if self.service_tier == "flex" else 0
        return self.priority

    def _sampling(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if hasattr(self, name)}
        # -1 means "all" to other servers' clients.
        given["top_k"] = 0 if self.top_k == -1 else self.top_k
        given["logit_bias"] = _biases(self.logit_bias or {})
        given["bad_words"] = self.bad_words_token_ids
        given["structured_outputs"] = self._structured_outputs()
        return given

    @property
    def output_format(self) -> tuple[str, ResponseFormat | ResponseTextFormat | None]:
        """OpenAI's way to say what the output must be, and the field's name."""
        return "", None

    def constraints(self) -> dict[str, StructuredOutputs]:
        """What the output must be, by the name of the field that says so."""
        name, output_format = self.output_format
        asked = None if output_format is None else output_format.wanted(name)
        own = None if self.structured_outputs is None else self.structured_outputs.wanted()
        given = {name: asked, "structured_outputs": own}
        return {name: wanted for name, wanted in given.items() if wanted is not None}

    def _structured_outputs(self) -> StructuredOutputs | None:
        given = self.constraints()
        if len(given) > 1:
            first, second, *_ = given
            raise InvalidRequest(first, f"must not be given together with {second}")
        return next(iter(given.values()), None)

    @property
    def aliases(self) -> Mapping[str, str]:
        name = self.output_format[0] if self.structured_outputs is None else ""
        own = {structured_outputs.FIELD: name} if name else {}
        return {"request_id": "Idempotency-Key", **own}


class GenerationBody(SamplingBody, OtherNames):
    """What chat and completions take."""

    FORMAT: ClassVar[Format]

    n: int | None = None
    prompt_logprobs: int | None = None
    """As in vLLM: of the prompt's tokens, with this many likeliest ones. Not told in streams, and
    bounded in all: prompt tokens times (prompt_logprobs + 1)."""
    max_tokens: int | None = None
    """With the prompt's tokens at most the context. Left out: to its end. 0 scores a prompt whose
    log-probabilities are asked for, and is refused for others."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Needs stream."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """In log-probabilities tokens are called `token_id:7`."""
    response_format: ResponseFormat | None = None

    @property
    def output_format(self) -> tuple[str, ResponseFormat | None]:
        return "response_format", self.response_format

    def constraints(self) -> dict[str, StructuredOutputs]:
        said = self.said_elsewhere().items()
        others = {name: of_form(OTHER_NAMES[name], value, name) for name, value in said}
        return super().constraints() | others

    @property
    def aliases(self) -> Mapping[str, str]:
        name = next(iter(self.said_elsewhere()), "")
        return {**super().aliases, **({structured_outputs.FIELD: name} if name else {})}

    @property
    def names_call(self) -> bool:
        """The function to be called is chosen by its name: then, as OpenAI has it, a call is no
        reason to end."""
        return False

    @abstractmethod
    def requests(self, limits: Limits, prompts_max: int) -> list[GenerationRequest]:
        """One GenerationRequest per prompt."""

    def request(self, prompt: Prompt, limits: Limits, **given: Any) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            rule = "is not told in streams; leave stream out, or take echo with logprobs"
            raise InvalidRequest("prompt_logprobs", rule)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "must be left out where stream is not true")
        return replace(
            super().request(prompt, limits, **given),
            n=self.n,
            return_token_ids=bool(self.return_token_ids),
        )

    def echoed(self, prompt: Prompt, pieces: Pieces) -> Echo:
        """What the answer shows of this prompt of its."""
        return Echo()


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    wrong = next((key for key in biases if not TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise InvalidRequest("logit_bias", f"keys must be token ids, got {cut(wrong)!r}")
    return tuple((int(key), bias) for key, bias in biases.items())
