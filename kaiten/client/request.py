"""From the arguments of `generate` to a GenerateRequest."""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypedDict, cast

from kaiten.client.errors import InvalidRequestError
from kaiten.v1 import common_pb2, inference_service_pb2
from kaiten.v1.common_pb2 import SamplingParams, StructuredOutputs

# A text, token ids as they are, or a conversation for the chat template.
Input: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]


class GenerateOptions(TypedDict, total=False):
    """Everything but the text prompt. An unset sampling field means the model's own default."""

    # Instead of a text prompt: token ids as they are, or a conversation for the chat template.
    token_ids: Sequence[int]
    messages: Sequence[Mapping[str, str]]
    model: str
    # For idempotency and for `attach`; minted when missing.
    request_id: str
    n: int
    stop: Sequence[str]
    return_token_ids: bool
    # Leaving does not cancel: come back with `attach`.
    keep_running: bool
    # Larger runs first where the policy looks at it.
    priority: int
    # The text ends with what stopped it.
    include_stop: bool
    # Control tokens that the model produced are text.
    show_special_tokens: bool
    # Of the whole request, from submit to the last token. Travels with it.
    timeout_s: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int]
    logprobs: int | None
    # Of the prompt's own tokens, with this many likeliest ones: in the completion's `prompt`.
    # max_tokens may then be 0.
    prompt_logprobs: int | None
    # Divides positive and multiplies negative logits of every token of prompt and output; 1: none.
    repetition_penalty: float | None
    # Subtracted once, and for every time, from the logit of a token of the output.
    presence_penalty: float | None
    frequency_penalty: float | None
    # Token id -> what is added to its logit.
    logit_bias: Mapping[int, float] | None
    # Nothing else is ever sampled.
    allowed_token_ids: Sequence[int] | None
    # Token sequences that the output never contains.
    bad_words: Sequence[Sequence[int]] | None
    # What the whole output must be: one of json (a schema, or its text), json_object (true), regex,
    # choice (texts) and grammar (Lark or GBNF); disable_any_whitespace besides.
    structured_outputs: Mapping[str, object] | None


SAMPLING = frozenset(field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields)
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids")
PLAIN = (
    "model",
    "n",
    "return_token_ids",
    "keep_running",
    "priority",
    "include_stop",
    "show_special_tokens",
)


def request_of_many(one: Input, options: GenerateOptions) -> inference_service_pb2.GenerateRequest:
    """The message for one prompt of many that share their options."""
    for name in ("token_ids", "messages", "request_id"):
        if name in options:
            raise InvalidRequestError(f"{name} is of one request, not of many", fields=(name,))
    if isinstance(one, str):
        return request_from(one, options)
    is_conversation = bool(one) and isinstance(one[0], Mapping)
    asked = {**options, "messages" if is_conversation else "token_ids": one}
    return request_from(None, cast(GenerateOptions, asked))


def request_from(
    prompt: str | None, options: GenerateOptions
) -> inference_service_pb2.GenerateRequest:
    """The message; it always has a request_id, so that repeating it is harmless."""
    given = {key: value for key, value in options.items() if value is not None}
    inputs = [prompt, given.pop("token_ids", None), given.pop("messages", None)]
    if sum(each is not None for each in inputs) != 1:
        raise InvalidRequestError(
            "give exactly one of prompt, token_ids and messages",
            fields=("prompt", "token_ids", "messages"),
        )
    given.pop("timeout_s", None)
    request = inference_service_pb2.GenerateRequest(
        request_id=str(given.pop("request_id", "") or uuid.uuid4().hex)
    )
    try:
        _set_input(request, *inputs)
        _set_options(request, given)
    except (TypeError, ValueError) as error:
        # protobuf refuses what a field cannot hold: a negative count, text for a number.
        raise InvalidRequestError(str(error)) from error
    return request


def _set_input(
    request: inference_service_pb2.GenerateRequest,
    prompt: object,
    token_ids: object,
    messages: object,
) -> None:
    if prompt is not None:
        request.text = prompt  # type: ignore[assignment]  # protobuf checks the type
    elif token_ids is not None:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(token_ids)  # type: ignore[arg-type]
    else:
        assert isinstance(messages, Sequence)
        request.conversation.messages.extend(
            inference_service_pb2.ChatMessage(**message) for message in messages
        )
        request.conversation.SetInParent()


def _set_options(
    request: inference_service_pb2.GenerateRequest, given: Mapping[str, object]
) -> None:
    for key, value in given.items():
        if key in PLAIN:
            setattr(request, key, value)
        elif key == "stop":
            request.stop.extend([value] if isinstance(value, str) else value)  # type: ignore[arg-type]
        elif key in TOKEN_LISTS:
            getattr(request.sampling, key).extend(value)
        elif key in _SETTERS:
            _SETTERS[key](request.sampling, value)
        elif key in SAMPLING:
            setattr(request.sampling, key, value)
        else:
            raise TypeError(f"generate() has no option {key!r}")


def _set_biases(sampling: SamplingParams, given: Any) -> None:
    for token_id, bias in dict(given).items():
        sampling.logit_bias.add(token_id=token_id, bias=bias)


def _set_bad_words(sampling: SamplingParams, given: Any) -> None:
    for word in given:
        sampling.bad_words.add(token_ids=word)


def _set_structured(sampling: SamplingParams, given: Any) -> None:
    message = sampling.structured_outputs
    for key, value in dict(given).items():
        if key == "choice":
            message.choice.texts.extend(value)
        elif key == "json" and not isinstance(value, str):
            message.json = json.dumps(value, ensure_ascii=False)
        elif key in StructuredOutputs.DESCRIPTOR.fields_by_name:
            setattr(message, key, value)
        else:
            raise TypeError(f"structured_outputs has no {key!r}")


_SETTERS: Final[Mapping[str, Callable[[SamplingParams, Any], None]]] = {
    "logit_bias": _set_biases,
    "bad_words": _set_bad_words,
    "structured_outputs": _set_structured,
}
