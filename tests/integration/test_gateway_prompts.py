"""Log-probabilities of prompts through both doors: a scripted scheduler and a real ledger."""

import json
from typing import Any

import httpx
import pytest

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import FINISH_REASON_LENGTH, SamplingParams
from tests.support.gateway_stack import MODEL, WAIT_S, Stack, text_of


@pytest.fixture
def stack_options() -> dict[str, Any]:
    return {"prompt_values_max": 40, "tokens_per_step": 2}


def sampling(k: int = 2, max_tokens: int = 4, **fields: Any) -> SamplingParams:
    return SamplingParams(prompt_logprobs=k, max_tokens=max_tokens, **fields)


def kinds(events: list[pb.GenerationEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def prompt_of(events: list[pb.GenerationEvent]) -> pb.PromptWithLogprobs:
    (prompt,) = (event.prompt for event in events if event.HasField("prompt"))
    return prompt


async def post(stack: Stack, path: str, **body: Any) -> httpx.Response:
    url = str(stack.gateway.openai.base_url) + path
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        return await client.post(url, json={"model": MODEL, **body})


async def complete(stack: Stack, **body: Any) -> Any:
    response = await post(stack, "completions", **body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_prompt_is_told_once_before_any_output(stack: Stack) -> None:
    ids = [11, 12, 13, 14]
    for n in (1, 3):
        events = await stack.generate(token_ids=pb.TokenIds(ids=ids), sampling=sampling(), n=n)
        assert kinds(events)[:3] == ["accepted", "prompt", "delta"]
        prompt = prompt_of(events)
        assert list(prompt.token_ids) == ids
        assert (prompt.logprobs.position, prompt.logprobs.token_count) == (1, 3)
        assert list(prompt.logprobs.logprobs) == [-1, -2, -3]
        assert list(prompt.logprobs.top_token_ids) == [12, 13, 13, 14, 14, 15]
        assert list(prompt.logprobs.top_logprobs) == [-1, -2, -2, -3, -3, -4]


async def test_a_prompt_of_one_token_is_told_without_values(stack: Stack) -> None:
    events = await stack.generate(token_ids=pb.TokenIds(ids=[11]), sampling=sampling())
    assert list(prompt_of(events).token_ids) == [11]
    assert prompt_of(events).logprobs.token_count == 0


async def test_nobody_who_did_not_ask_is_told(stack: Stack) -> None:
    events = await stack.generate(text="hi", sampling=SamplingParams(max_tokens=3, logprobs=1))
    assert "prompt" not in kinds(events)


async def test_without_output_only_the_prompt_is_told(stack: Stack) -> None:
    ids = pb.TokenIds(ids=[11, 12, 13])
    events = await stack.generate(token_ids=ids, sampling=sampling(max_tokens=0), request_id="a")
    assert kinds(events) == ["accepted", "prompt", "finished", "done"]
    assert (events[2].finished.reason, events[2].finished.output_tokens) == (
        FINISH_REASON_LENGTH,
        0,
    )
    assert events[3].done.usage.output_tokens == 0
    assert stack.scheduler.submits[-1].sampling.max_tokens == 1
    call = stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="a"))
    seen = await call
    assert seen.choices[0].output_tokens == seen.done.usage.output_tokens == 0


async def test_whoever_attaches_from_the_beginning_is_told_too(stack: Stack) -> None:
    ids = pb.TokenIds(ids=[11, 12, 13])
    first = await stack.generate(token_ids=ids, sampling=sampling(), request_id="a", n=2)
    for positions, is_told in (([], True), ([0, 0], True), ([2, 0], False), ([0, 2], False)):
        call = stack.gateway.inference.Attach(
            pb.AttachRequest(request_id="a", positions=positions), timeout=WAIT_S
        )
        events = [response.event async for response in call]
        assert ("prompt" in kinds(events)) is is_told
        if is_told:
            assert prompt_of(events) == prompt_of(first)
            assert kinds(events).index("prompt") < kinds(events).index("delta")


async def test_echo_with_logprobs_has_the_prompts_first(stack: Stack) -> None:
    card = stack.gateway.card
    ids = stack.gateway.ids("one two")
    body = await complete(stack, prompt=ids, max_tokens=2, echo=True, logprobs=1)
    (choice,) = body["choices"]
    names = [card.pieces.token_text(token_id) for token_id in ids]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("one two")
    assert logprobs["tokens"][: len(ids)] == names
    assert logprobs["token_logprobs"] == [
        None,
        *(-float(at) for at in range(1, len(ids))),
        *[-0.5] * 2,
    ]
    assert logprobs["top_logprobs"][:2] == [None, {names[1]: -1.0}]
    offsets = logprobs["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[len(ids)] == len("one two")
    assert body["usage"]["completion_tokens"] == 2


async def test_scoring_without_output(stack: Stack) -> None:
    """As evaluation harnesses ask: several prompts, no output, the text and its values."""
    body = await complete(
        stack, prompt=["one two", "three"], max_tokens=0, echo=True, logprobs=1, n=2
    )
    assert [choice["text"] for choice in body["choices"]] == ["one two"] * 2 + ["three"] * 2
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    for choice in body["choices"]:
        assert choice["logprobs"]["token_logprobs"][:2] == [None, -1.0]
        assert "prompt_logprobs" not in choice


async def test_a_stream_echoes_the_prompt_with_its_logprobs_in_one_chunk(stack: Stack) -> None:
    ids = stack.gateway.ids("one two")
    for n in (1, 2):
        asked = {"prompt": ids, "max_tokens": 2, "echo": True, "logprobs": 1, "n": n}
        response = await post(stack, "completions", stream=True, **asked)
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        whole = (await complete(stack, **asked))["choices"]
        for index in range(n):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert mine[0]["text"] == "one two"
            assert mine[0]["logprobs"]["token_logprobs"][0] is None
            joined: dict[str, list[Any]] = {}
            for chunk in mine:
                for key, values in (chunk["logprobs"] or {}).items():
                    joined.setdefault(key, []).extend(values)
            assert "".join(chunk["text"] for chunk in mine) == whole[index]["text"]
            assert joined == whole[index]["logprobs"]


async def test_both_wishes_at_once_get_what_each_asked_for(stack: Stack) -> None:
    body = await complete(
        stack, prompt=[11, 12, 13], max_tokens=1, echo=True, logprobs=1, prompt_logprobs=2
    )
    (choice,) = body["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [1, 1]
    assert [len(top) for top in choice["prompt_logprobs"][1:]] == [2, 2]
    assert choice["prompt_logprobs"][1]["12"]["rank"] == 1
    assert stack.scheduler.submits[-1].sampling.prompt_logprobs == 2


async def test_a_chat_has_its_prompt_beside_the_choices(stack: Stack) -> None:
    response = await post(
        stack,
        "chat/completions",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=1,
        prompt_logprobs=0,
    )
    body = response.json()
    assert response.status_code == 200, body
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert all(len(position) == 1 for position in body["prompt_logprobs"][1:])


@pytest.mark.parametrize(
    ("tokens", "k", "is_fine"), [(40, 0, True), (41, 0, False), (14, 2, False)]
)
async def test_the_values_of_a_prompt_are_bounded(
    stack: Stack, tokens: int, k: int, is_fine: bool
) -> None:
    body = {"prompt": [11] * tokens, "max_tokens": 1, "prompt_logprobs": k}
    response = await post(stack, "completions", **body)
    assert response.status_code == (200 if is_fine else 400)
    if not is_fine:
        error = response.json()["error"]
        assert error["param"] == "prompt_logprobs"
        rule = f"{tokens} prompt tokens times (prompt_logprobs + 1)"
        assert f"at most 40 values: {rule}, got {tokens * (k + 1)}" in error["message"]


async def test_the_text_of_an_explained_request_is_that_of_a_plain_one(stack: Stack) -> None:
    plain = await stack.generate(text="one two", sampling=SamplingParams(max_tokens=5))
    told = await stack.generate(text="one two", sampling=sampling(max_tokens=5))
    assert text_of(plain) == text_of(told)
