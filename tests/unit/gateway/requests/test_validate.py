"""Requests are judged before anything is allocated: whatever comes in, a record or a sentence."""

import json
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.grpc.convert import ask_from_proto
from gateway.http.json_body import JsonBody
from gateway.openai.chat import ChatBody
from gateway.openai.completions import CompletionBody
from gateway.openai.request_body import parse
from gateway.requests.submit_record import ROW_FIELDS, Model, to_record
from gateway.requests.validation import (
    NUMBERS,
    POSITIVES,
    Limits,
    PromptTooLong,
    check,
    id_lists,
    integers,
    sampling_from,
)
from gateway.tenants import Tenant
from gateway.text.model_card import SamplingDefaults
from gateway.values.generation_request import GenerationRequest, TextPrompt, TokenPrompt
from kaiten.client.request import GenerateOptions, request_from
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams, TokenBias, TokenSequence
from kaiten.v1.ledger_pb2 import SubmitRecord
from service_kit.errors import InvalidRequest, NotFound, TooLong

LIMITS = Limits(vocab_size=100, context_tokens_max=32, text_bytes_max=1000)
TENANT = Tenant(name="t", running_tokens_max=500)
MODEL = Model(name="m", eos_token_ids=(2, 3), defaults=SamplingDefaults(temperature=0.5, top_k=9))


def test_what_no_worker_can_do_is_refused_by_field() -> None:
    can_nothing = replace(LIMITS, features=frozenset())
    asks: dict[str, tuple[Any, Any]] = {
        "logprobs": (0, None),
        "prompt_logprobs": (0, None),
        "repetition_penalty": (1.1, 1.0),
        "presence_penalty": (0.1, 0.0),
        "frequency_penalty": (-0.1, 0.0),
        "logit_bias": (((1, 1.0),), ()),
        "allowed_token_ids": ((1,), ()),
        "bad_words": (((1,),), ()),
    }
    for name, (wanted, neutral) in asks.items():
        wants = sampling_ask(**{name: wanted})
        check(wants, LIMITS, MODEL.name)
        with pytest.raises(
            InvalidRequest, match=rf"^sampling\.{name}: no worker of this cell can "
        ):
            check(sampling_ask(can_nothing, **{name: wanted}), can_nothing, MODEL.name)
        check(sampling_ask(can_nothing, **{name: neutral}), can_nothing, MODEL.name)


def test_a_models_own_penalty_needs_a_worker_that_can() -> None:
    limits = replace(LIMITS, features=frozenset())
    defaults = SamplingDefaults(temperature=0.5, top_k=9, repetition_penalty=1.2)
    model = replace(MODEL, defaults=defaults)
    rest: dict[str, Any] = {"limits": limits, "model": model, "tenant": TENANT, "seed": 7}
    with pytest.raises(InvalidRequest, match=r"^sampling\.repetition_penalty: no worker of this"):
        to_record(ask(), (1, 2), **rest)
    plain = sampling_ask(repetition_penalty=1.0)
    assert to_record(plain, (1, 2), **rest).sampling.repetition_penalty == 1.0


def record_of(ask: GenerationRequest, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> SubmitRecord:
    check(ask, LIMITS, MODEL.name)
    return to_record(ask, prompt_ids, limits=LIMITS, model=MODEL, tenant=TENANT, seed=77)


def ask(**fields: Any) -> GenerationRequest:
    base: dict[str, Any] = {"prompt": TextPrompt(text="x"), "body_hash": b"", "request_id": "r"}
    return GenerationRequest(**(base | fields))


def sampling_ask(limits: Limits = LIMITS, **given: Any) -> GenerationRequest:
    sampling, wrong = sampling_from(given, limits)
    return ask(sampling=sampling, sampling_wrong=wrong)


def test_unset_fields_mean_the_models_defaults() -> None:
    record = record_of(ask())
    assert (record.id, record.tenant, record.n, record.timeout_ms) == ("t:r", "t", 1, 0)
    sampling = record.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 9, 77)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (29, 0, -1)
    assert list(sampling.stop_token_ids) == [2, 3]


def test_explicit_fields_win_even_when_they_are_zero() -> None:
    sampling = record_of(sampling_ask(temperature=0.0, top_k=0, seed=0, logprobs=0)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.logprobs) == (0, 0, 0, 0)


def test_a_tiny_top_p_does_not_become_zero_on_the_wire() -> None:
    assert record_of(sampling_ask(top_p=1e-300)).sampling.top_p > 0


def test_ignoring_eos_leaves_the_clients_own_stop_ids() -> None:
    asked = sampling_ask(ignore_eos=True, stop_token_ids=(7, 7, 2))
    assert list(record_of(asked).sampling.stop_token_ids) == [7, 2]


@pytest.mark.parametrize(("count", "is_fine"), [(31, True), (32, False), (33, False)])
def test_a_prompt_must_leave_room_for_one_token(count: int, is_fine: bool) -> None:
    ids = tuple([1] * count)
    for prompt in (TokenPrompt(token_ids=ids), TextPrompt(text="x")):
        if is_fine:
            assert record_of(ask(prompt=prompt), ids).sampling.max_tokens == 32 - count
        else:
            with pytest.raises(PromptTooLong) as caught:
                record_of(ask(prompt=prompt), ids)
            assert (caught.value.limit, caught.value.got) == (31, count)


@pytest.mark.parametrize(
    ("timeout_s", "timeout_ms"), [(None, 0), (0.0001, 1), (1.5, 1500), (1e300, 2**64 - 1)]
)
def test_deadlines_in_milliseconds(timeout_s: float | None, timeout_ms: int) -> None:
    assert record_of(ask(timeout_s=timeout_s)).timeout_ms == timeout_ms


@pytest.mark.parametrize("token_id", [-1, 100, 101, 2**31, 2**63])
def test_ids_out_of_the_vocabulary(token_id: int) -> None:
    record_of(ask(prompt=TokenPrompt(token_ids=(0, 99))))
    with pytest.raises(InvalidRequest, match=rf"\[0, 100\), got {token_id}"):
        record_of(ask(prompt=TokenPrompt(token_ids=(1, token_id))))


@pytest.mark.parametrize("size", [999, 1000, 1001])
def test_the_text_cap_counts_bytes(size: int) -> None:
    text = "é" * (size // 2) + "x" * (size % 2)
    if size <= 1000:
        check(ask(prompt=TextPrompt(text=text)), LIMITS, "m")
    else:
        with pytest.raises(TooLong, match="at most 1000 bytes, got 1001"):
            check(ask(prompt=TextPrompt(text=text)), LIMITS, "m")


def test_another_model_is_not_found() -> None:
    record_of(ask(model="m"))
    with pytest.raises(NotFound):
        record_of(ask(model="M"))


floats = st.floats(width=32) | st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf])
uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
small = st.integers(0, 40)
samplings = st.builds(
    SamplingParams,
    temperature=st.none() | floats,
    top_p=st.none() | floats,
    min_p=st.none() | floats,
    top_k=st.none() | uint32,
    seed=st.none() | uint64,
    max_tokens=st.none() | small | uint32,
    min_tokens=st.none() | small,
    ignore_eos=st.none() | st.booleans(),
    logprobs=st.none() | small | uint32,
    stop_token_ids=st.lists(small | uint32, max_size=3),
    repetition_penalty=st.none() | floats,
    presence_penalty=st.none() | floats,
    frequency_penalty=st.none() | floats,
    logit_bias=st.lists(st.builds(TokenBias, token_id=small | uint32, bias=floats), max_size=3),
    allowed_token_ids=st.lists(small | uint32, max_size=3),
    bad_words=st.lists(
        st.builds(TokenSequence, token_ids=st.lists(small | uint32, max_size=3)), max_size=3
    ),
)
texts = st.text(max_size=10)
inputs: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries({"text": texts}),
    st.fixed_dictionaries(
        {"token_ids": st.builds(pb.TokenIds, ids=st.lists(small | uint32, max_size=40))}
    ),
    st.fixed_dictionaries(
        {
            "conversation": st.builds(
                pb.Conversation,
                messages=st.lists(st.builds(pb.ChatMessage, role=texts, content=texts), max_size=3),
            )
        }
    ),
)


@given(
    prompt=inputs,
    sampling=samplings,
    n=st.none() | uint32 | small,
    stop=st.lists(texts, max_size=18),
    request_id=st.sampled_from(["", "ok", "not ok", "é"]),
    model=st.sampled_from(["", "m", "x"]),
)
def test_any_grpc_request_gives_a_legal_record_or_a_sentence(
    prompt: dict[str, Any],
    sampling: SamplingParams,
    n: int | None,
    stop: list[str],
    request_id: str,
    model: str,
) -> None:
    message = pb.GenerateRequest(
        sampling=sampling, n=n, stop=stop, request_id=request_id, model=model, **prompt
    )
    try:
        record = record_of(ask_from_proto(message))
    except (InvalidRequest, NotFound):
        return
    row = record.sampling
    assert 1 <= record.n <= LIMITS.choices_max
    assert 0 <= row.temperature <= 2
    assert 0 < row.top_p <= 1
    assert 0 <= row.min_p <= 1
    assert row.top_k < LIMITS.vocab_size
    assert 1 <= row.max_tokens <= LIMITS.context_tokens_max - 3
    assert row.min_tokens <= row.max_tokens
    assert -1 <= row.logprobs <= LIMITS.logprobs_max
    assert all(token_id < LIMITS.vocab_size for token_id in row.stop_token_ids)
    assert 0 < row.repetition_penalty <= 2
    assert abs(row.presence_penalty) <= 2
    assert abs(row.frequency_penalty) <= 2
    assert all(abs(each.bias) <= 100 for each in row.logit_bias)
    named = [*row.allowed_token_ids, *(each.token_id for each in row.logit_bias)]
    named += [token_id for word in row.bad_words for token_id in word.token_ids]
    assert all(token_id < LIMITS.vocab_size for token_id in named)
    assert len(record.render.stop) <= LIMITS.stops_max


FIELDS = [*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "user", "echo", "what"]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)


@given(body=bodies, is_chat=st.booleans(), raw=st.none() | st.binary(max_size=20))
def test_any_http_body_gives_a_legal_record_or_a_sentence(
    body: dict[str, Any], is_chat: bool, raw: bytes | None
) -> None:
    base: dict[str, Any] = {"model": "m", "prompt": "x"}
    if is_chat:
        base = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    content = json.dumps(base | body).encode() if raw is None else raw
    # Anything else than these two would be a fault of ours.
    with suppress(InvalidRequest, NotFound):
        parsed: ChatBody | CompletionBody
        sent = JsonBody.of(content)
        parsed = parse(ChatBody, sent) if is_chat else parse(CompletionBody, sent)
        for one in parsed.requests(LIMITS, prompts_max=4):
            assert record_of(replace(one, request_id="r")).n >= 1


BIAS = tuple((token_id, 1.0) for token_id in range(99))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"repetition_penalty": 0.0}, "more than 0 and at most 2, got 0"),
        ({"repetition_penalty": 2.001}, "more than 0 and at most 2, got 2.00"),
        ({"repetition_penalty": math.nan}, "more than 0 and at most 2, got nan"),
        ({"repetition_penalty": -1.0}, "more than 0 and at most 2, got -1"),
        ({"presence_penalty": -2.001}, r"in \[-2, 2\]"),
        ({"presence_penalty": math.nan}, r"in \[-2, 2\], got nan"),
        ({"frequency_penalty": math.inf}, r"in \[-2, 2\], got inf"),
        ({"logit_bias": ((5, 100.5),)}, r"logit_bias: must be a number in \[-100, 100\]"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias: .* got nan"),
        ({"logit_bias": ((100, 1.0),)}, r"logit_bias: token ids must be in \[0, 100\), got 100"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "must not name a token twice"),
        ({"logit_bias": BIAS * 11}, "at most 1024 ids, got 1089"),
        ({"allowed_token_ids": (1, 100)}, "allowed_token_ids: .* got 100"),
        ({"allowed_token_ids": (1,) * 16385}, "at most 16384 ids, got 16385"),
        ({"bad_words": ((1,),) * 65}, "at most 64 sequences, got 65"),
        ({"bad_words": ((1,) * 33,)}, "at most 32 ids, got 33"),
        ({"bad_words": ((),)}, "empty sequence"),
        ({"bad_words": ((1, -1),)}, "got -1"),
        ({"allowed_token_ids": (7, 8), "bad_words": ((7,), (8,))}, "that bad_words and min_tokens"),
        ({"allowed_token_ids": (2, 3), "min_tokens": 1}, "that bad_words and min_tokens leave"),
    ],
)
def test_wishes_about_logits_that_no_worker_could_grant(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        record_of(sampling_ask(**asked))


def test_bad_words_must_leave_a_token_of_a_small_vocabulary() -> None:
    limits = Limits(vocab_size=4, context_tokens_max=32)
    asked = sampling_ask(bad_words=((0,), (1,)), min_tokens=1)
    with pytest.raises(InvalidRequest, match="must leave one of the vocabulary's 4 tokens"):
        to_record(asked, (1,), limits=limits, model=MODEL, tenant=TENANT, seed=1)


def test_the_record_carries_its_tenant_and_what_it_may_have_running() -> None:
    record = record_of(ask())
    assert (record.id, record.tenant, record.tenant_tokens_max) == ("t:r", "t", 500)


def test_an_output_of_a_grammar_keeps_its_leading_space() -> None:
    rest: dict[str, Any] = {"limits": LIMITS, "model": MODEL, "tenant": TENANT, "seed": 7}
    kept = [to_record(ask(), (1,), grammar=each, **rest) for each in ("", "start: / a/")]
    assert [each.render.keep_leading_space for each in kept] == [False, True]


def test_wishes_about_logits_reach_the_record() -> None:
    asked = sampling_ask(
        repetition_penalty=1e-300,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((99, -100.0), (0, 100.0)),
        allowed_token_ids=(5, 2, 5),
        bad_words=((2,), (5, 5), (2,)),
        ignore_eos=True,
    )
    row = record_of(asked).sampling
    assert row.repetition_penalty > 0
    assert (row.presence_penalty, row.frequency_penalty) == (-2.0, 2.0)
    assert [(each.token_id, each.bias) for each in row.logit_bias] == [(99, -100.0), (0, 100.0)]
    assert list(row.allowed_token_ids) == [5, 2]
    assert [list(word.token_ids) for word in row.bad_words] == [[2], [5, 5]]


def test_a_request_without_wishes_has_neutral_ones() -> None:
    row = record_of(ask()).sampling
    assert (row.repetition_penalty, row.presence_penalty, row.frequency_penalty) == (1.0, 0.0, 0.0)
    assert not [*row.logit_bias, *row.allowed_token_ids, *row.bad_words]


def test_the_models_own_repetition_penalty_is_the_default() -> None:
    model = Model(name="m", eos_token_ids=(), defaults=SamplingDefaults(repetition_penalty=1.25))
    rows = [
        to_record(each, (1,), limits=LIMITS, model=model, tenant=TENANT, seed=1).sampling
        for each in (ask(), sampling_ask(repetition_penalty=1.0))
    ]
    assert [row.repetition_penalty for row in rows] == [1.25, 1.0]


WISHES: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {7: 2.5, 0: -100.0},
    "allowed_token_ids": [7, 0, 9],
    "bad_words": [[7, 0], [9]],
}


def test_both_protocols_and_the_client_ask_for_the_same() -> None:
    asked = sampling_ask(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((7, 2.5), (0, -100.0)),
        allowed_token_ids=(7, 0, 9),
        bad_words=((7, 0), (9,)),
    )
    message = request_from("x", WISHES)  # type: ignore[arg-type]
    assert ask_from_proto(message).sampling == asked.sampling
    words = {"bad_words_token_ids": WISHES["bad_words"], "model": "m", "prompt": "x"}
    body = json.dumps({key: value for key, value in WISHES.items() if key != "bad_words"} | words)
    parsed_body = parse(CompletionBody, JsonBody.of(body.encode()))
    (parsed,) = parsed_body.requests(LIMITS, prompts_max=1)
    assert (parsed.sampling, parsed.default_max_tokens) == (asked.sampling, 16)


def test_every_sampling_field_of_the_proto_has_its_places() -> None:
    """Both doors, the client, a bound and the worker's row: none of them was forgotten."""
    named = {"bad_words_token_ids": "bad_words"}
    for body in (CompletionBody, ChatBody):
        read = {named.get(name, name) for name in body.model_fields}
        assert set(SamplingParams.DESCRIPTOR.fields_by_name) <= read
    fields = set(SamplingParams.DESCRIPTOR.fields_by_name)
    assert fields <= set(GenerateOptions.__annotations__)
    bounded = {*NUMBERS, *POSITIVES, *integers(LIMITS), *id_lists(LIMITS)}
    assert fields - bounded == {"ignore_eos", "logit_bias", "bad_words", "structured_outputs"}
    assert fields - ROW_FIELDS == {"ignore_eos", "structured_outputs"}


def test_a_repeat_may_ask_for_another_presentation_only() -> None:
    message = pb.GenerateRequest(text="x", n=2)
    same = pb.GenerateRequest(text="x", n=2, request_id="r", return_token_ids=True)
    other = pb.GenerateRequest(text="x", n=3)
    hashes = [ask_from_proto(m).body_hash for m in (message, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def explained(count: int, **fields: Any) -> SubmitRecord:
    prompt = TokenPrompt(token_ids=(1,) * count)
    return record_of(replace(sampling_ask(**fields), prompt=prompt), (1,) * count)


def test_a_prompt_is_explained_only_when_that_is_asked() -> None:
    plain, told = explained(3), explained(3, prompt_logprobs=0)
    assert not plain.sampling.HasField("prompt_logprobs")
    assert not plain.render.prompt_token_ids
    assert told.sampling.prompt_logprobs == 0
    assert list(told.render.prompt_token_ids) == [1, 1, 1]


def test_no_output_may_be_asked_for_with_the_prompts_values_only() -> None:
    record = explained(3, prompt_logprobs=1, max_tokens=0)
    assert (record.sampling.max_tokens, record.render.hide_output) == (1, True)
    assert not explained(3, prompt_logprobs=1, max_tokens=1).render.hide_output
    with pytest.raises(InvalidRequest, match=r"max_tokens: must be in \[1, 4294967295\], got 0"):
        explained(3, max_tokens=0)
    with pytest.raises(InvalidRequest, match="at most max_tokens, which is 0, got 1"):
        explained(3, prompt_logprobs=1, max_tokens=0, min_tokens=1)


@pytest.mark.parametrize(("k", "most"), [(0, 24), (1, 12), (5, 4)])
def test_the_values_of_a_prompt_are_counted(k: int, most: int) -> None:
    limits = replace(LIMITS, prompt_values_max=24)
    for count in (most, most + 1):
        asked = sampling_ask(prompt_logprobs=k)
        given: Any = {"limits": limits, "model": MODEL, "tenant": TENANT, "seed": 1}
        if count == most:
            to_record(asked, (1,) * count, **given)
            continue
        with pytest.raises(TooLong, match="at most 24 values") as caught:
            to_record(asked, (1,) * count, **given)
        assert (caught.value.limit, caught.value.got) == (24, count * (k + 1))
