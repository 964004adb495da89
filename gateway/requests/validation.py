"""Judge a request by every field that needs no tokenizer: a wrong request costs microseconds. Pure.

Errors name the field, the rule and the limit.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gateway.requests import structured_outputs
from gateway.tenants import PRIORITY_MAX
from gateway.values.generation_request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from kaiten.v1.common_pb2 import (
    FEATURE_LOGITS_PROCESSORS,
    FEATURE_LOGPROBS,
    FEATURE_PROMPT_LOGPROBS,
    FEATURE_STRUCTURED_OUTPUTS,
    Feature,
    SamplingParams,
    TokenBias,
    TokenSequence,
)
from service_kit.errors import InvalidRequest, NotFound, SeveralInvalid, TooLong

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# As OpenAI has it. It may stand in a line of the prompt that a template writes: no line ends.
NAME: Final = re.compile(r"[^\s<|\\/>]{1,64}")
Rule = Callable[[], None]
# No prompt that fits has more: the longest tokens, of spaces, are about as long. What is longer is
# refused before it is tokenized, which takes memory and time in proportion.
TOKEN_BYTES_MAX: Final = 128
UINT32_MAX: Final = 2**32 - 1
UINT64_MAX: Final = 2**64 - 1
# OpenAI's seed is a signed 64-bit number: the negative ones are the upper half of ours.
SEED_MIN: Final = -(2**63)
BIAS_MAX: Final = 100.0
# A template may make control tokens of any other.
ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
# Of SamplingParams: the lowest and the highest, and the highest of what must be more than 0.
# These, `integers` and Limits are also what the OpenAPI document says.
NUMBERS: Final = {
    "temperature": (0.0, 2.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
POSITIVES: Final = {"top_p": 1.0, "repetition_penalty": 2.0}
# Of SamplingParams: what asks for a feature that not every worker has, unless it says this.
FEATURES: Final[Mapping[str, tuple[Feature, object]]] = {
    "logprobs": (FEATURE_LOGPROBS, None),
    "prompt_logprobs": (FEATURE_PROMPT_LOGPROBS, None),
    "repetition_penalty": (FEATURE_LOGITS_PROCESSORS, 1.0),
    "presence_penalty": (FEATURE_LOGITS_PROCESSORS, 0.0),
    "frequency_penalty": (FEATURE_LOGITS_PROCESSORS, 0.0),
    "logit_bias": (FEATURE_LOGITS_PROCESSORS, None),
    "allowed_token_ids": (FEATURE_LOGITS_PROCESSORS, None),
    "bad_words": (FEATURE_LOGITS_PROCESSORS, None),
    "structured_outputs": (FEATURE_STRUCTURED_OUTPUTS, None),
}
ABILITIES: Final[Mapping[Feature, str]] = {
    FEATURE_LOGPROBS: "give log-probabilities",
    FEATURE_PROMPT_LOGPROBS: "give log-probabilities of a prompt",
    FEATURE_LOGITS_PROCESSORS: "change logits before it samples",
    FEATURE_STRUCTURED_OUTPUTS: "keep to a grammar",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this gateway lets in. The first two are the model's and the cell's own."""

    vocab_size: int
    context_tokens_max: int
    # What some worker of the cell can do; others than the cell's own limits know of all.
    features: frozenset[Feature] = frozenset(ABILITIES)
    # While no worker is there; 0: for any time.
    worker_wait_s: float = 0.0
    choices_max: int = 16
    stops_max: int = 16
    stop_chars_max: int = 256
    stop_token_ids_max: int = 256
    logprobs_max: int = 20
    # Prompt tokens times (prompt_logprobs + 1).
    prompt_values_max: int = 1 << 15
    biases_max: int = 1024
    allowed_token_ids_max: int = 16384
    bad_words_max: int = 64
    bad_word_tokens_max: int = 32
    text_bytes_max: int = 4 << 20
    grammar_bytes_max: int = 64 << 10
    body_values_max: int = 1 << 18
    messages_max: int = 4096
    roles: frozenset[str] = frozenset(ROLES)
    template_options: frozenset[str] = frozenset()


class TooMany(TooLong):
    """The sentence says what was counted."""

    def __init__(self, field: str, limit: int, got: int, unit: str) -> None:
        super().__init__(field, limit, got)
        self.rule = f"must have at most {limit} {unit}, got {got}"
        self.args = (f"{field}: {self.rule}",)


class PromptTooLong(TooLong):
    """More tokens than the context holds."""

    def __init__(self, field: str, limit: int, got: int) -> None:
        super().__init__(field, limit, got)
        self.rule = (
            f"the prompt has {got} tokens; at most {limit} leave room for an output token "
            f"in this model's context"
        )
        self.args = (f"{field}: {self.rule}",)


class TextTooLong(PromptTooLong):
    """So long that it need not be tokenized to know that the context cannot hold it."""

    def __init__(self, field: str, limit: int, got: int) -> None:
        super().__init__(field, limit, got)
        self.rule = f"the prompt has {got} bytes; no more than {limit} can fit this model's context"
        self.args = (f"{field}: {self.rule}",)


class FarTooLong(PromptTooLong):
    """So many tokens that they were not all counted."""

    def __init__(self, field: str, limit: int, got: int) -> None:
        super().__init__(field, limit, got)
        self.rule = (
            f"the prompt has more than {got} tokens; at most {limit} leave room for an output "
            f"token in this model's context"
        )
        self.args = (f"{field}: {self.rule}",)


def check(
    request: GenerationRequest, limits: Limits, model_name: str, *, priority_max: int = PRIORITY_MAX
) -> None:
    """Raise everything wrong with a request. No number in it makes this allocate anything."""
    check_request_id(request.request_id)
    check_model(request.model, model_name)
    wrong = _broken(
        (
            partial(_integer, "n", request.n, 1, limits.choices_max),
            partial(_check_priority, request.priority, priority_max),
        )
    )
    if request.sampling_wrong is None:
        wrong += _broken(_sampling_rules(_values(request.sampling), limits))
    else:
        wrong += request.sampling_wrong
    wrong += _broken(
        (partial(_check_stops, request.stop, limits), partial(_check_prompt, request, limits))
    )
    if len(wrong) > 1:
        raise SeveralInvalid(wrong)
    if wrong:
        raise wrong[0]


def sampling_from(
    given: Mapping[str, Any], limits: Limits
) -> tuple[SamplingParams, list[InvalidRequest]]:
    """Values by the names of SamplingParams as such a message, and what is wrong with them.

    The message has what is right: it cannot hold a number that is far out of its bounds. None and
    empty mean that a field is not set; `logit_bias` is pairs of token id and bias."""
    values = {name: value for name, value in given.items() if value not in (None, (), [])}
    wrong = _broken(_sampling_rules(values, limits))
    for error in wrong:
        values.pop(error.field.removeprefix("sampling."), None)
    if "seed" in values:
        values["seed"] %= UINT64_MAX + 1
    biases, words = values.pop("logit_bias", ()), values.pop("bad_words", ())
    params = SamplingParams(
        **values,
        logit_bias=[TokenBias(token_id=each, bias=bias) for each, bias in biases],
        bad_words=[TokenSequence(token_ids=word) for word in words],
    )
    return params, wrong


def _values(params: SamplingParams) -> dict[str, Any]:
    """What `sampling_from` would make the same message of."""
    values: dict[str, Any] = {field.name: value for field, value in params.ListFields()}
    if params.logit_bias:
        values["logit_bias"] = [(each.token_id, each.bias) for each in params.logit_bias]
    if params.bad_words:
        values["bad_words"] = [word.token_ids for word in params.bad_words]
    return values


def _broken(rules: Iterable[Rule]) -> list[InvalidRequest]:
    """Each rule looks at one field, so that a client hears of all its mistakes at once."""
    wrong = []
    for rule in rules:
        try:
            rule()
        except InvalidRequest as error:
            wrong.append(error)
    return wrong


def check_model(name: str, served: str) -> None:
    """Empty means: the only one. NotFound."""
    if name not in ("", served):
        raise NotFound(f"model {name[:128]!r}")


def check_request_id(request_id: str) -> None:
    """Empty means: mint one."""
    if request_id and not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request_id", f"must match {REQUEST_ID.pattern}")


def _check_priority(priority: int, most: int) -> None:
    # Which was given is not told: over HTTP its sign was the other one.
    if abs(priority) > PRIORITY_MAX:
        raise InvalidRequest("priority", f"must be in [{-PRIORITY_MAX}, {PRIORITY_MAX}]")
    if priority > most:
        raise InvalidRequest("priority", "is more urgent than this tenant may ask for")


def _sampling_rules(values: Mapping[str, Any], limits: Limits) -> Iterator[Rule]:
    for name, (lowest, highest) in NUMBERS.items():
        yield partial(_number, f"sampling.{name}", values.get(name), lowest, highest)
    for name, highest in POSITIVES.items():
        yield partial(_positive, f"sampling.{name}", values.get(name), highest)
    bounds = integers(limits)
    if "prompt_logprobs" not in values:
        # Without output there is nothing to tell but the prompt's log-probabilities.
        bounds["max_tokens"] = (1, UINT32_MAX)
    for name, (least, most) in bounds.items():
        yield partial(_integer, f"sampling.{name}", values.get(name), least, most)
    for name in FEATURES:
        yield partial(can_be_done, name, values.get(name), limits)
    for name, count in id_lists(limits).items():
        yield partial(_token_ids, f"sampling.{name}", values.get(name, ()), count, limits)
    yield partial(structured_outputs.check, values, limits.grammar_bytes_max)
    yield partial(_check_biases, values.get("logit_bias", ()), limits)
    yield partial(_check_bad_words, values.get("bad_words", ()), limits)


def can_be_done(name: str, value: object, limits: Limits) -> None:
    feature, nothing = FEATURES[name]
    if value is not None and value != nothing and feature not in limits.features:
        raise InvalidRequest(f"sampling.{name}", f"no worker of this cell can {ABILITIES[feature]}")


def integers(limits: Limits) -> dict[str, tuple[int, int]]:
    """The least and the most of each whole number in SamplingParams."""
    logprobs_max = min(limits.logprobs_max, limits.vocab_size)
    return {
        "top_k": (0, UINT32_MAX),
        "seed": (SEED_MIN, UINT64_MAX),
        "max_tokens": (0, UINT32_MAX),
        "min_tokens": (0, UINT32_MAX),
        "logprobs": (0, logprobs_max),
        "prompt_logprobs": (0, logprobs_max),
    }


def id_lists(limits: Limits) -> dict[str, int]:
    """How many token ids each list of them in SamplingParams may have."""
    return {
        "stop_token_ids": limits.stop_token_ids_max,
        "allowed_token_ids": limits.allowed_token_ids_max,
    }


def _check_biases(biases: Sequence[tuple[int, float]], limits: Limits) -> None:
    biased = [token_id for token_id, _ in biases]
    _token_ids("sampling.logit_bias", biased, limits.biases_max, limits)
    if len(set(biased)) < len(biased):
        raise InvalidRequest("sampling.logit_bias", "must not name a token twice")
    for _, bias in biases:
        _number("sampling.logit_bias", bias, -BIAS_MAX, BIAS_MAX)


def _check_bad_words(words: Sequence[Sequence[int]], limits: Limits) -> None:
    if len(words) > limits.bad_words_max:
        raise TooMany("sampling.bad_words", limits.bad_words_max, len(words), "sequences")
    for word in words:
        if not word:
            raise InvalidRequest("sampling.bad_words", "must not hold an empty sequence")
        _token_ids("sampling.bad_words", word, limits.bad_word_tokens_max, limits)


def _check_stops(stops: Sequence[str], limits: Limits) -> None:
    if len(stops) > limits.stops_max:
        raise TooMany("stop", limits.stops_max, len(stops), "strings")
    for stop in stops:
        if not stop:
            raise InvalidRequest("stop", "must not hold an empty string")
        if len(stop) > limits.stop_chars_max:
            raise TooMany("stop", limits.stop_chars_max, len(stop), "characters each")
        _encodable("stop", stop)


def _check_prompt(request: GenerationRequest, limits: Limits) -> None:
    prompt = request.prompt
    if isinstance(prompt, TokenPrompt):
        if not prompt.token_ids:
            raise InvalidRequest(prompt.field, "must give at least one token")
        if len(prompt.token_ids) >= limits.context_tokens_max:
            limit = limits.context_tokens_max - 1
            raise PromptTooLong(prompt.field, limit, len(prompt.token_ids))
        _in_vocabulary(prompt.field, prompt.token_ids, limits.vocab_size)
    elif isinstance(prompt, TextPrompt):
        _check_text(prompt.field, (prompt.text,), limits)
    else:
        check_chat(prompt, limits)


def check_chat(prompt: ChatPrompt, limits: Limits) -> None:
    """InvalidRequest: its turns are none, or too many."""
    if not prompt.messages:
        raise InvalidRequest(prompt.field, "must hold at least one message")
    if len(prompt.messages) > limits.messages_max:
        raise TooMany(prompt.field, limits.messages_max, len(prompt.messages), "messages")
    for index, message in enumerate(prompt.messages):
        if message.role not in limits.roles:
            known = ", ".join(sorted(limits.roles))
            rule = f"must be one of {known}; got {message.role[:64]!r}"
            raise InvalidRequest(f"{prompt.place(index)}.role", rule)
        if message.name and not NAME.fullmatch(message.name):
            rule = f"must match {NAME.pattern}; got {message.name[:64]!r}"
            raise InvalidRequest(f"{prompt.place(index)}.name", rule)
    _check_text(prompt.field, prompt.texts(), limits)
    for name, _ in prompt.options:
        check_option("conversation.template_options", name, limits)


def check_option(field: str, name: str, limits: Limits) -> None:
    """InvalidRequest unless chat templates may be given a value of that name."""
    if name not in limits.template_options:
        known = ", ".join(sorted(limits.template_options)) or "none"
        raise InvalidRequest(field, f"{name[:64]!r} is not among the allowed names: {known}")


def _check_text(field: str, texts: Iterable[str], limits: Limits) -> None:
    """The cap comes before the tokenizer: its time and memory grow with the text."""
    size_bytes = 0
    for text in texts:
        size_bytes += len(text)
        if size_bytes <= limits.text_bytes_max:
            size_bytes += len(_encodable(field, text)) - len(text)
    if size_bytes > limits.text_bytes_max:
        raise TooMany(field, limits.text_bytes_max, size_bytes, "bytes")
    if size_bytes > limits.context_tokens_max * TOKEN_BYTES_MAX:
        raise TextTooLong(field, limits.context_tokens_max * TOKEN_BYTES_MAX, size_bytes)


def _encodable(field: str, text: str) -> bytes:
    """JSON can carry half a surrogate pair, which is no character."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "must be valid Unicode text, has a lone surrogate") from None


def check_token_ids(field: str, token_ids: Sequence[int], most: int, limits: Limits) -> None:
    """InvalidRequest: they are none, too many or not of the vocabulary."""
    if not token_ids:
        raise InvalidRequest(field, "must give at least one token")
    _token_ids(field, token_ids, most, limits)


def _token_ids(field: str, token_ids: Sequence[int], most: int, limits: Limits) -> None:
    """A bounded list of the vocabulary's ids."""
    if len(token_ids) > most:
        raise TooMany(field, most, len(token_ids), "ids")
    _in_vocabulary(field, token_ids, limits.vocab_size)


def _in_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(field, f"token ids must be in [0, {vocab_size}), got {wrong}")


def _integer(field: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise InvalidRequest(field, f"must be in [{least}, {most}], got {value}")


def _number(field: str, value: float | None, least: float, most: float) -> None:
    """NaN fails every comparison, so it fails this one."""
    if value is not None and not least <= value <= most:
        raise InvalidRequest(field, f"must be a number in [{least:g}, {most:g}], got {value}")


def _positive(field: str, value: float | None, most: float) -> None:
    if value is not None and not 0.0 < value <= most:
        raise InvalidRequest(field, f"must be more than 0 and at most {most:g}, got {value}")
