"""A checked request as the ledger keeps it: what is said once its prompt's ids are known. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gateway.requests import structured_outputs
from gateway.requests.validation import (
    UINT64_MAX,
    Limits,
    PromptTooLong,
    TooMany,
    can_be_done,
)
from gateway.tenants import Tenant
from gateway.text.model_card import SamplingDefaults
from gateway.values.generation_request import GenerationRequest
from kaiten.v1.common_pb2 import SamplingParams, TokenSequence
from kaiten.v1.ledger_pb2 import RenderOptions, SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from service_kit.errors import InvalidRequest, TooLong

TOP_P_MIN: Final = 1e-30
REPETITION_PENALTY_MIN: Final = 1e-30
ROW_FIELDS: Final = frozenset(RowSampling.DESCRIPTOR.fields_by_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What `to_record` must know of the model beyond its limits."""

    name: str
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults


def to_record(
    request: GenerationRequest,
    prompt_ids: Sequence[int],
    *,
    limits: Limits,
    model: Model,
    tenant: Tenant,
    seed: int,
    grammar: str = "",
) -> SubmitRecord:
    """Its durable form. `seed`: if the client gave none; `grammar`: compiled."""
    room = limits.context_tokens_max - len(prompt_ids)
    if not prompt_ids:
        raise InvalidRequest(request.prompt.field, "must give at least one token")
    if room < 1:
        raise PromptTooLong(request.prompt.field, limits.context_tokens_max - 1, len(prompt_ids))
    explained = prompt_ids if request.sampling.HasField("prompt_logprobs") else ()
    _check_prompt_values(len(explained), request.sampling.prompt_logprobs, limits)
    timeout_ms = 0 if request.timeout_s is None else max(1, math.ceil(request.timeout_s * 1000))
    return SubmitRecord(
        id=f"{tenant.name}:{request.request_id}",
        tenant=tenant.name,
        tenant_tokens_max=tenant.running_tokens_max or 0,
        n=request.n or 1,
        prompt_token_ids=prompt_ids,
        sampling=_row_sampling(request, room, limits, model, seed, grammar),
        timeout_ms=min(timeout_ms, UINT64_MAX),
        worker_wait_ms=0 if request.awaits_workers else math.ceil(limits.worker_wait_s * 1000),
        traceparent=request.traceparent,
        priority=request.priority,
        render=RenderOptions(
            stop=request.stop,
            include_stop=request.include_stop,
            show_special_tokens=request.show_special_tokens,
            prompt_token_ids=explained,
            hide_output=request.sampling.HasField("max_tokens")
            and request.sampling.max_tokens == 0,
            keep_leading_space=bool(grammar),
        ),
    )


def _check_prompt_values(tokens: int, prompt_logprobs: int, limits: Limits) -> None:
    values = tokens * (prompt_logprobs + 1)
    if values > limits.prompt_values_max:
        unit = f"values: {tokens} prompt tokens times (prompt_logprobs + 1)"
        raise TooMany("sampling.prompt_logprobs", limits.prompt_values_max, values, unit)


def _row_sampling(
    request: GenerationRequest, room: int, limits: Limits, model: Model, seed: int, grammar: str
) -> RowSampling:
    """What was asked for over the model's own defaults. A field of the same name is copied."""
    asked = request.sampling
    max_tokens = min(room, request.default_max_tokens or room)
    if asked.HasField("max_tokens"):
        max_tokens = asked.max_tokens
    if max_tokens > room:
        raise TooLong("sampling.max_tokens", room, max_tokens)
    if asked.min_tokens > max_tokens:
        rule = f"must be at most max_tokens, which is {max_tokens}, got {asked.min_tokens}"
        raise InvalidRequest("sampling.min_tokens", rule)
    eos = () if asked.ignore_eos else model.eos_token_ids
    stops = dict.fromkeys((*eos, *asked.stop_token_ids))
    words = dict.fromkeys(tuple(word.token_ids) for word in asked.bad_words)
    structured_outputs.check_end(grammar, bool(stops))
    _check_something_is_left(asked, words, stops if asked.min_tokens else (), limits)
    fields: dict[str, Any] = asdict(model.defaults) | {"seed": seed, "logprobs": -1}
    fields |= {each.name: value for each, value in asked.ListFields() if each.name in ROW_FIELDS}
    # The model's own default may ask for what its workers cannot do.
    can_be_done("repetition_penalty", fields["repetition_penalty"], limits)
    fields |= {
        # Keeping the whole vocabulary is keeping all.
        "top_k": fields["top_k"] if fields["top_k"] < limits.vocab_size else 0,
        # In single precision a tiny number would become 0, which for a penalty says: none.
        "top_p": max(fields["top_p"], TOP_P_MIN),
        "repetition_penalty": max(fields["repetition_penalty"], REPETITION_PENALTY_MIN),
        # The token after a prompt comes with the prompt's last logits; `hide_output` keeps it back.
        "max_tokens": max(max_tokens, 1),
        "stop_token_ids": stops,
        "allowed_token_ids": dict.fromkeys(asked.allowed_token_ids),
        "bad_words": [TokenSequence(token_ids=word) for word in words],
        "grammar": grammar,
    }
    return RowSampling(**fields)


def _check_something_is_left(
    asked: SamplingParams,
    words: Iterable[Sequence[int]],
    stops: Iterable[int],
    limits: Limits,
) -> None:
    """What is forbidden at the first token must not be all that is allowed.

    Bad words of several tokens can still use up a narrow choice later; the worker then says so.
    """
    forbidden = {*stops, *(word[0] for word in words if len(word) == 1)}
    if asked.allowed_token_ids and forbidden.issuperset(asked.allowed_token_ids):
        rule = "must hold a token that bad_words and min_tokens leave"
        raise InvalidRequest("sampling.allowed_token_ids", rule)
    if len(forbidden) >= limits.vocab_size:
        rule = f"must leave one of the vocabulary's {limits.vocab_size} tokens"
        raise InvalidRequest("sampling.bad_words", rule)
