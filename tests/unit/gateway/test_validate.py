"""Requests are judged before anything is allocated: whatever comes in, a record or a sentence."""

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.asks import Ask, SamplingAsk, TextPrompt, TokenPrompt
from gateway.model_card import SamplingDefaults
from gateway.openai_models import ChatBody, CompletionBody, hash_of, parse
from gateway.validate import Limits, Model, PromptTooLong, check, to_record
from gateway.wire import EMPTY_LISTS, NEUTRAL_SCALARS, SAMPLING_SCALARS, ask_from_proto
from protos.kaiten.v1 import inference_service_pb2 as pb
from protos.kaiten.v1.common_pb2 import SamplingParams
from protos.kaiten.v1.ledger_pb2 import SubmitRecord
from service_kit.errors import InvalidRequest, NotFound, TooLong

LIMITS = Limits(vocab_size=100, context_tokens_max=32, text_bytes_max=1000)
MODEL = Model(name="m", eos_token_ids=(2, 3), defaults=SamplingDefaults(temperature=0.5, top_k=9))


def record_of(ask: Ask, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> SubmitRecord:
    check(ask, LIMITS, MODEL.name)
    return to_record(ask, prompt_ids, limits=LIMITS, model=MODEL, tenant="t", seed=77)


def ask(**fields: Any) -> Ask:
    base: dict[str, Any] = {"prompt": TextPrompt(text="x"), "body_hash": b"", "request_id": "r"}
    return Ask(**(base | fields))


def test_unset_fields_mean_the_models_defaults() -> None:
    record = record_of(ask())
    assert (record.id, record.tenant, record.n, record.timeout_ms) == ("t:r", "t", 1, 0)
    sampling = record.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 9, 77)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (29, 0, -1)
    assert list(sampling.stop_token_ids) == [2, 3]


def test_explicit_fields_win_even_when_they_are_zero() -> None:
    sampling = record_of(
        ask(sampling=SamplingAsk(temperature=0.0, top_k=0, seed=0, logprobs=0))
    ).sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.logprobs) == (0, 0, 0, 0)


def test_a_tiny_top_p_does_not_become_zero_on_the_wire() -> None:
    assert record_of(ask(sampling=SamplingAsk(top_p=1e-300))).sampling.top_p > 0


def test_ignoring_eos_leaves_the_clients_own_stop_ids() -> None:
    asked = SamplingAsk(ignore_eos=True, stop_token_ids=(7, 7, 2))
    assert list(record_of(ask(sampling=asked)).sampling.stop_token_ids) == [7, 2]


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
        parsed = parse(ChatBody if is_chat else CompletionBody, content)
        for one in parsed.asks(hash_of(content), "", prompts_max=4):
            assert record_of(one).n >= 1


@pytest.mark.parametrize(
    ("wished", "is_fine"),
    [
        (SamplingParams(repetition_penalty=1.0, presence_penalty=0.0), True),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(presence_penalty=math.nan), False),
        (SamplingParams(frequency_penalty=-1.0), False),
        (SamplingParams(logit_bias=[{"token_id": 1, "bias": 1.0}]), False),
        (SamplingParams(allowed_token_ids=[1]), False),
        (SamplingParams(bad_words=[{"token_ids": [1]}]), False),
    ],
)
def test_what_no_worker_computes_yet_is_refused(wished: SamplingParams, is_fine: bool) -> None:
    message = pb.GenerateRequest(text="x", sampling=wished)
    if is_fine:
        assert ask_from_proto(message).sampling == SamplingAsk()
    else:
        with pytest.raises(InvalidRequest, match="not supported"):
            ask_from_proto(message)


def test_every_sampling_field_of_the_proto_is_read_or_refused() -> None:
    handled = {*SAMPLING_SCALARS, *NEUTRAL_SCALARS, *EMPTY_LISTS, "stop_token_ids"}
    assert handled == set(SamplingParams.DESCRIPTOR.fields_by_name)


def test_a_repeat_may_ask_for_another_presentation_only() -> None:
    message = pb.GenerateRequest(text="x", n=2)
    same = pb.GenerateRequest(text="x", n=2, request_id="r", return_token_ids=True)
    other = pb.GenerateRequest(text="x", n=3)
    hashes = [ask_from_proto(m).body_hash for m in (message, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]
