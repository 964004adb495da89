"""Many requests in one call, every mistake at once, and deadlines that say where the time went."""

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from gateway.grpc import inference
from gateway.grpc.convert import ask_from_proto
from gateway.requests.generation_service import GenerationService
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import FinishReason, SamplingParams
from tests.support.gateway_stack import WAIT_S, Stack, detail, text_of, until

CALL_S, DEADLINE_S, GRACE_S = 60.0, 2.5, 3.75


@pytest.fixture
def stack_options() -> dict[str, Any]:
    return {"sse_ping_s": 0.05, "prompts_max": 4}


async def batch(stack: Stack, *requests: pb.GenerateRequest) -> list[pb.GenerateBatchResponse]:
    call = stack.gateway.inference.GenerateBatch(
        pb.GenerateBatchRequest(requests=requests), timeout=WAIT_S
    )
    return [response async for response in call]


async def test_a_batch_is_many_requests_and_a_wrong_one_harms_no_other(stack: Stack) -> None:
    stack.says("fine")
    wrong = pb.GenerateRequest(text="x", n=0, sampling=SamplingParams(temperature=9))
    responses = await batch(
        stack,
        pb.GenerateRequest(text="a", request_id="first"),
        wrong,
        pb.GenerateRequest(token_ids={"ids": []}),
        pb.GenerateRequest(text="b", n=2, return_token_ids=True),
    )
    for which, choices in ((0, 1), (3, 2)):
        events = [r.event for r in responses if r.index == which]
        assert [events[0].WhichOneof("event"), events[-1].WhichOneof("event")] == [
            "accepted",
            "done",
        ]
        assert [text_of(events, choice) for choice in range(choices)] == ["fine"] * choices
        has_ids = any(event.delta.token_ids for event in events)
        assert has_ids is (which == 3)
    errors = {r.index: r.error for r in responses if r.HasField("error")}
    assert set(errors) == {1, 2}
    assert errors[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert [each.field for each in errors[1].fields] == ["n", "sampling.temperature"]
    assert [each.field for each in errors[2].fields] == ["token_ids.ids"]
    assert [list(r.prompt_token_ids) for r in stack.scheduler.submits] == [
        stack.gateway.ids("a"),
        stack.gateway.ids("b"),
    ]


async def test_leaving_a_batch_cancels_all_of_it(stack: Stack) -> None:
    # The one that goes on does so for longer than three cancels take.
    stack.scheduler.step_s = 0.05
    endless = SamplingParams(ignore_eos=True)
    requests = [
        pb.GenerateRequest(text="x", sampling=endless, keep_running=index == 0)
        for index in range(4)
    ]
    call = stack.gateway.inference.GenerateBatch(
        pb.GenerateBatchRequest(requests=requests), timeout=WAIT_S
    )
    seen: set[int] = set()
    async for response in call:
        seen.add(response.index)
        if len(seen) == 4:
            break
    call.cancel()
    await until(lambda: len(stack.scheduler.cancels) == 3, "three cancels")
    await until(lambda: not stack.gateway.service.generation_service.door.active, "nobody followed")
    await until(lambda: stack.scheduler.live_count == 1, "three ends")


async def test_batches_have_bounds(stack: Stack) -> None:
    for requests in ([], [pb.GenerateRequest(text="x")] * 5):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await batch(stack, *requests)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert stack.scheduler.submits == []


async def test_every_wrong_field_is_named_at_once(stack: Stack, http: httpx.AsyncClient) -> None:
    sampling = SamplingParams(temperature=3, top_p=0, max_tokens=0, stop_token_ids=[10**6])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(text="", n=99, stop=[""], sampling=sampling)
    fields = [violation.field for violation in detail(caught.value, BadRequest).field_violations]
    assert fields == [
        "n",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "sampling.stop_token_ids",
        "stop",
    ]
    body = {"prompt": "x", "temperature": 3, "top_p": 0, "stop": [""]}
    error = (await http.post("/v1/completions", json=body)).json()["error"]
    assert error["param"] == "temperature"
    for name in ("temperature: ", "top_p: ", "stop: "):
        assert name in error["message"]


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_deadline_names_the_phase_before_the_clients_own_clock_ends_the_call(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    # Most of the time: here a busy machine may hold up whoever says where it went.
    monkeypatch.setattr(inference, "FAREWELL_SHARE", 1 - DEADLINE_S / CALL_S)
    monkeypatch.setattr(inference, "FAREWELL_S_MAX", CALL_S)
    monkeypatch.setattr(
        inference,
        "ask_from_proto",
        lambda *args, **rest: ask_from_proto(*args, **rest | {"grace_s": GRACE_S}),
    )
    if phase == "decode":
        stack.scheduler.step_s = 0.3
    else:
        stack.scheduler.is_open.clear()
        await until(lambda: stack.scheduler.is_parked, "a scheduler that stands still")
    if phase == "prefill":
        stack.scheduler.cell.running = 1
        watch = stack.gateway.service.generation_service.readiness.watch
        await until(lambda: bool(watch.record and watch.record.running), "a running request")
    request = pb.GenerateRequest(text="x", sampling=SamplingParams(ignore_eos=True))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stack.gateway.inference.Generate(request, timeout=CALL_S):
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details() == f"deadline exceeded in phase {phase!r}"
    assert dict(detail(caught.value, ErrorInfo).metadata) == {"phase": phase}
    stack.scheduler.is_open.set()
    await until(lambda: len(stack.scheduler.cancels) == 1, "the cancel")
    [record] = stack.scheduler.submits
    assert 0 < record.timeout_ms < 1000 * CALL_S


async def test_what_the_scheduler_ended_names_the_phase_too(stack: Stack) -> None:
    stack.scheduler.is_open.clear()
    call = stack.gateway.inference.Generate(
        pb.GenerateRequest(text="x", request_id="d"), timeout=WAIT_S
    )
    await anext(aiter(call))
    late = FinishReason.FINISH_REASON_DEADLINE_EXCEEDED
    await stack.ledger.cancel("default:d", reason=late)
    stack.scheduler.is_open.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    again = stack.gateway.inference.Attach(pb.AttachRequest(request_id="d"), timeout=WAIT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in again:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_deadline_holds_while_a_request_is_made_ready(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind others' chat templates and grammars."""

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(GenerationService, "_record", never)
    reply = await http.post(
        "/v1/completions", json={"prompt": "x"}, headers={"x-request-timeout-s": "0.05"}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert stack.scheduler.submits == []
