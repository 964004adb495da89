"""Coming back to a request: by position and by cursor, over both doors, live and finished."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.ledger_pb2 import SubmitRecord
from ledger import Submitted
from tests.support.gateway_stack import WAIT_S, Stack, running_gateway, text_of, until

TEXT = "a 😀 b 日本 c STO d"


def chunks_of(text: str) -> list[dict[str, Any]]:
    events = [event for event in text.split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


async def attach(stack: Stack, request_id: str, **fields: Any) -> list[pb.GenerationEvent]:
    request = pb.AttachRequest(request_id=request_id, **fields)
    call = stack.gateway.inference.Attach(request, timeout=60)
    return [response.event async for response in call]


def deltas_of(events: list[pb.GenerationEvent]) -> list[pb.Delta]:
    return [event.delta for event in events if event.HasField("delta")]


async def test_every_cursor_continues_exactly_where_it_was_made(stack: Stack) -> None:
    stack.scheduler.step_s = 0.005
    stack.says(TEXT)
    events = await stack.generate(text="x", request_id="c", stop=["STOP"], return_cursors=True)
    deltas = deltas_of(events)
    assert all(delta.cursor for delta in deltas)
    assert len({delta.cursor for delta in deltas if delta.token_count}) > 3
    had = ""
    for delta in deltas:
        had += delta.text
        rest = await attach(stack, "c", cursors=[delta.cursor], return_cursors=True)
        assert had + text_of(rest) == TEXT
        if deltas_of(rest):
            assert deltas_of(rest)[-1].cursor == deltas[-1].cursor
    assert not deltas_of(await attach(stack, "c"))[0].cursor


def stops_at(stack: Stack, *positions: int) -> None:
    """From now on no output ends by itself, and the scheduler waits before each of these."""

    def script(record: SubmitRecord, _choice: int) -> Iterator[int]:
        for position in itertools.count():
            if position in positions:
                stack.scheduler.is_open.clear()
            yield record.prompt_token_ids[0]

    stack.scheduler.script = script


@pytest.mark.parametrize(
    "comes_back",
    [
        pb.GenerateRequest(text="x"),
        pb.AttachRequest(),
        pb.GenerateRequest(text="x", keep_running=True),
        pb.AttachRequest(keep_running=True),
    ],
)
async def test_who_has_left_ends_nothing_that_somebody_came_back_to(
    stack: Stack, tmp_path: Path, redis_url: str, cell: str, comes_back: Any
) -> None:
    """That a connection broke may be noticed long after its client is at another gateway."""
    comes_back.request_id = "c"
    stops_at(stack, 4, 20)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    request = pb.GenerateRequest(text="x", request_id="c", sampling=sampling)
    if isinstance(comes_back, pb.GenerateRequest):
        comes_back.sampling.CopyFrom(sampling)
    service = stack.gateway.service.generation_service
    async with running_gateway(tmp_path / "model", redis_url, cell) as other:
        there = other.service.generation_service
        await until(lambda: not there.readiness.problem, "readiness")
        left = stack.gateway.inference.Generate(request, timeout=WAIT_S)
        assert (await left.read()).event.HasField("accepted")
        await until(lambda: stack.scheduler.is_parked, "it is half-way")
        is_attach = isinstance(comes_back, pb.AttachRequest)
        ask = other.inference.Attach if is_attach else other.inference.Generate
        back = ask(comes_back, timeout=WAIT_S)
        assert (await back.read()).event.HasField("accepted")
        left.cancel()
        await until(lambda: not service.door.active, "it is noticed")
        await asyncio.wait_for(service.releases.settled(), WAIT_S)
        stack.scheduler.is_open.set()
        position = 0
        while position < 10:
            event = (await back.read()).event
            assert not event.HasField("finished")
            # What several steps brought comes as one to a reader that is behind.
            position = event.delta.position + event.delta.token_count
        await until(lambda: stack.scheduler.is_parked, "it has come further")
        assert stack.scheduler.cancels == []
        # Who came back is the one whom it is for.
        back.cancel()
        await until(lambda: not there.door.active, "it is noticed there")
        await asyncio.wait_for(there.releases.settled(), WAIT_S)
        stack.scheduler.is_open.set()
        await until(lambda: stack.scheduler.live_count == 0, "the end")
        assert len(stack.scheduler.cancels) == (not comes_back.keep_running)


@pytest.mark.parametrize("is_noticed_at_once", [True, False])
async def test_who_has_left_ends_nothing_that_was_accepted_for_another(
    stack: Stack,
    tmp_path: Path,
    redis_url: str,
    cell: str,
    monkeypatch: pytest.MonkeyPatch,
    is_noticed_at_once: bool,
) -> None:
    """The store hears of whoever asked first when it has accepted it for whoever asked last."""
    ledger, service = stack.gateway.service.link.ledger, stack.gateway.service.generation_service
    submit, is_asked, may_submit = ledger.submit, asyncio.Event(), asyncio.Event()

    async def late(*args: Any, **rest: Any) -> Submitted:
        is_asked.set()
        await may_submit.wait()
        return await submit(*args, **rest)

    monkeypatch.setattr(ledger, "submit", late)
    stops_at(stack, 4)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    request = pb.GenerateRequest(text="x", request_id="c", sampling=sampling)
    async with running_gateway(tmp_path / "model", redis_url, cell) as other:
        there = other.service.generation_service
        await until(lambda: not there.readiness.problem, "readiness")
        left = stack.gateway.inference.Generate(request, timeout=WAIT_S)
        await asyncio.wait_for(is_asked.wait(), WAIT_S)
        if is_noticed_at_once:
            left.cancel()
            await until(lambda: bool(service.releases._adopted), "it is noticed")
        back = other.inference.Generate(request, timeout=WAIT_S)
        assert (await back.read()).event.HasField("accepted")
        may_submit.set()
        if not is_noticed_at_once:
            assert (await left.read()).event.HasField("accepted")
            left.cancel()
        await until(lambda: not (service.releases._adopted or service.door.active), "it is heard")
        await asyncio.wait_for(service.releases.settled(), WAIT_S)
        await until(lambda: stack.scheduler.is_parked, "it is half-way")
        stack.scheduler.is_open.set()
        while not (await back.read()).event.HasField("finished"):
            pass
    assert stack.scheduler.cancels == []


@pytest.mark.parametrize("first_to_go", [0, 1])
async def test_it_ends_with_the_last_who_waits(
    stack: Stack, tmp_path: Path, redis_url: str, cell: str, first_to_go: int
) -> None:
    """At whichever gateway, and whoever came last; not with one that sends its clients on."""
    stops_at(stack, 4)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    request = pb.GenerateRequest(text="x", request_id="c", sampling=sampling)
    async with (
        running_gateway(tmp_path / "model", redis_url, cell) as other,
        running_gateway(tmp_path / "model", redis_url, cell) as closing,
    ):
        doors, calls = (stack.gateway, other, closing), []
        for door in doors:
            service = door.service.generation_service
            await until(lambda each=service: not each.readiness.problem, "readiness")  # type: ignore[misc]
            calls.append(door.inference.Generate(request, timeout=WAIT_S))
            assert (await calls[-1].read()).event.HasField("accepted")
        closing.service.generation_service.close()
        await until(lambda: not service.door.active, "they are sent on")
        await asyncio.wait_for(service.releases.settled(), WAIT_S)
        for number, which in enumerate((first_to_go, 1 - first_to_go)):
            await until(lambda: stack.scheduler.is_parked, "it waits")
            assert (await stack.ledger.find("default:c")).is_finished is False
            assert len(await stack.ledger.inbox_all()) == 1, number
            service = doors[which].service.generation_service
            calls[which].cancel()
            await until(lambda each=service: not each.door.active, "it is noticed")  # type: ignore[misc]
            await asyncio.wait_for(service.releases.settled(), WAIT_S)
        stack.scheduler.is_open.set()
        await until(lambda: bool(stack.scheduler.cancels), "it is cancelled")


@pytest.mark.parametrize("comes_to_nothing", ["it has no cursor", "it leaves"])
async def test_who_came_back_for_nothing_keeps_nothing_running(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, comes_to_nothing: str
) -> None:
    """Refused, or gone before the store was heard: nobody waits for the request by that."""
    stops_at(stack, 4)
    ledger, service = stack.gateway.service.link.ledger, stack.gateway.service.generation_service
    wait, is_known, is_heard = ledger.wait, asyncio.Event(), asyncio.Event()

    async def late(id: str, waiter: str) -> None:
        await wait(id, waiter)
        is_known.set()
        await is_heard.wait()

    monkeypatch.setattr(ledger, "wait", late)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    request = pb.GenerateRequest(text="x", request_id="c", sampling=sampling)
    call = stack.gateway.inference.Generate(request, timeout=WAIT_S)
    assert (await call.read()).event.HasField("accepted")
    await until(lambda: stack.scheduler.is_parked, "it is half-way")
    if comes_to_nothing == "it leaves":
        back = stack.gateway.inference.Attach(pb.AttachRequest(request_id="c"), timeout=WAIT_S)
        await is_known.wait()
        back.cancel()
        # Of the two only the first is followed.
        await until(lambda: service.door._opening == 0, "it is noticed")
    is_heard.set()
    if comes_to_nothing == "it has no cursor":
        with pytest.raises(grpc.aio.AioRpcError, match="must have 12 bytes"):
            await attach(stack, "c", cursors=[b"x"])
    call.cancel()
    await until(lambda: not service.door.active, "it is noticed")
    await asyncio.wait_for(service.releases.settled(), WAIT_S)
    stack.scheduler.is_open.set()
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    assert len(stack.scheduler.cancels) == 1


async def test_a_forged_cursor_is_data_loss_and_ends_nothing(stack: Stack) -> None:
    stack.scheduler.step_s = 0.01
    request = pb.GenerateRequest(
        text="hello", request_id="live", return_cursors=True, keep_running=True
    )
    call = stack.gateway.inference.Generate(request, timeout=60)
    cursor = b""
    async for response in call:
        if response.event.HasField("delta") and response.event.delta.position > 2:
            cursor = response.event.delta.cursor
            break
    forged = [
        cursor[:-1] + bytes([cursor[-1] ^ 1]),
        (1).to_bytes(4, "little") + cursor[4:],
        (2**31).to_bytes(4, "little") + cursor[4:],
    ]
    stack.scheduler.is_open.clear()
    for wrong in forged[:2]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attach(stack, "live", cursors=[wrong])
        assert caught.value.code() == grpc.StatusCode.DATA_LOSS
    for wrong in (b"x", cursor + b"x"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attach(stack, "live", cursors=[wrong])
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await attach(stack, "live", cursors=[cursor], positions=[1])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert stack.scheduler.cancels == []
    assert stack.scheduler.live_count == 1
    stack.scheduler.is_open.set()
    await stack.gateway.inference.Cancel(pb.CancelRequest(request_id="live"))
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    # Beyond the end of what there is: the output never had that token.
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await attach(stack, "live", cursors=[forged[2]])
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS


async def test_a_cursor_of_another_choice_or_request_is_data_loss(stack: Stack) -> None:
    stack.says("same words")
    first = await stack.generate(text="x", request_id="one", n=2, return_cursors=True)
    await stack.generate(text="x", request_id="two")
    cursors = {delta.choice: delta.cursor for delta in deltas_of(first)}
    assert cursors[0] != cursors[1]
    for request_id, given in (("two", [cursors[0]]), ("one", [cursors[1]])):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attach(stack, request_id, cursors=given)
        assert caught.value.code() == grpc.StatusCode.DATA_LOSS
    await attach(stack, "one", cursors=[cursors[0], cursors[1]])


async def test_a_failed_response_says_so(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("cut", then_stop=False)
    body = {"input": "x", "background": True}
    url = f"/v1/responses/{(await http.post('/v1/responses', json=body)).json()['id']}"
    await until(lambda: bool(stack.scheduler.submits), "the submit")
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    seen = (await http.get(url)).json()
    assert seen["status"] == "failed"
    assert seen["output"][0]["content"][0]["text"] == "cut"
    assert seen["error"]["message"] == "the script ended"


async def test_a_live_request_tells_its_place_in_the_queue(
    stack: Stack, http: httpx.AsyncClient
) -> None:
    stack.scheduler.is_open.clear()
    body = {"input": "x", "background": True, "max_output_tokens": 50}
    begun = await http.post("/v1/responses", json=body, headers={"idempotency-key": "q"})
    assert begun.json()["status"] == "queued"
    stack.scheduler.cell.running = 3
    (entry,) = await stack.scheduler.ledger.inbox_all()
    stack.scheduler.cell.waiting_sequence_ids.extend([77, entry.sequence_id])
    watch = stack.gateway.service.generation_service.readiness.watch
    await until(lambda: bool(watch.record and watch.record.waiting_sequence_ids), "the queue")
    seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="q"))
    assert seen.state == pb.RequestState.REQUEST_STATE_LIVE
    assert seen.queue_position == 2
    assert seen.queue_reason == "1 request goes first; 3 run now"
    full = {"tenant": "default", "tokens_running": 90, "tokens_max": 100, "tokens_next": 51}
    stack.scheduler.cell.full_tenants.add(**full)
    await until(lambda: bool(watch.record and watch.record.full_tenants), "a full tenant")
    seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="q"))
    reason = "tenant default has 90 of 100 running tokens, its next request needs 51"
    assert seen.queue_reason == reason
    response = (await http.get("/v1/responses/resp_q")).json()
    assert response["status"] == "queued"
    assert response["queue"] == {"position": 2, "reason": reason}
    stack.scheduler.cell.workers_ready, stack.scheduler.cell.problem = 0, "it is draining"
    await until(lambda: bool(watch.record and not watch.record.workers_ready), "no worker")
    seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="q"))
    assert seen.queue_reason == "no worker is ready: it is draining"
    del stack.scheduler.cell.waiting_sequence_ids[:]
    await until(lambda: bool(watch.record and not watch.record.waiting_sequence_ids), "it runs")
    seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="q"))
    assert not seen.HasField("queue_position")
    response = (await http.get("/v1/responses/resp_q")).json()
    assert (response["status"], response["queue"]) == ("in_progress", None)
    stack.scheduler.is_open.set()
