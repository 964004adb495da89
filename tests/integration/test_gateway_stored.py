"""Coming back to a request: by position and by cursor, over both doors, live and finished."""

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.ledger_pb2 import SubmitRecord
from tests.support.gateway_stack import Stack, text_of, until

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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_background_request_is_found_again(
    stack: Stack, http: httpx.AsyncClient, path: str
) -> None:
    stack.says(TEXT)
    stack.scheduler.is_open.clear()
    body: dict[str, Any] = {"background": True, "n": 2}
    is_chat = "chat" in path
    body |= {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    reply = await http.post(path, json=body)
    assert reply.status_code == 202
    assert reply.json()["status"] == "queued"
    url = f"/v1/requests/{reply.json()['id']}"
    assert (await http.get(url)).json()["status"] == "in_progress"
    (entry,) = await stack.scheduler.ledger.inbox_all()
    stack.scheduler.cell.waiting_sequence_ids.append(entry.sequence_id)
    record = stack.gateway.service.front.readiness.watch
    await until(lambda: bool(record.record and record.record.waiting_sequence_ids), "the queue")
    seen = (await http.get(url)).json()
    assert (seen["status"], seen["queue"]["position"]) == ("queued", 1)
    del stack.scheduler.cell.waiting_sequence_ids[:]
    stack.scheduler.is_open.set()
    streamed = chunks_of((await http.get(url, headers={"accept": "text/event-stream"})).text)
    texts = ["", ""]
    positions = [0, 0]
    for chunk in streamed[:-1]:
        choice = chunk["choices"][0]
        given = choice["delta"].get("content", "") if is_chat else choice["text"]
        texts[choice["index"]] += given
        positions[choice["index"]] = choice.get("position", positions[choice["index"]])
    assert texts == [TEXT, TEXT]
    assert streamed[-1]["usage"]["completion_tokens"] == sum(positions) + len(texts), (
        "the stop tokens"
    )
    whole = (await http.get(url)).json()
    assert whole["status"] == "completed"
    assert [choice["text"] for choice in whole["choices"]] == [TEXT, TEXT]
    assert whole["kaiten"]["decode_ms"] == 0.003
    assert stack.scheduler.cancels == []


async def test_starting_after_gives_what_the_client_does_not_have(
    stack: Stack, http: httpx.AsyncClient
) -> None:
    stack.scheduler.step_s = 0.005
    stack.says(TEXT)
    options = {"include_position": True}
    body = {"prompt": "x", "stream": True, "stream_options": options, "background": True}
    reply = await http.post("/v1/completions", json=body)
    chunks = [chunk for chunk in chunks_of(reply.text) if "position" in chunk["choices"][0]]
    had = ""
    for chunk in chunks:
        had += chunk["choices"][0]["text"]
        after = chunk["choices"][0]["position"]
        url = f"/v1/requests/{chunk['id']}?stream=true&starting_after={after}"
        rest = chunks_of((await http.get(url)).text)
        assert had + "".join(c["choices"][0]["text"] for c in rest if c["choices"]) == TEXT
    for wrong in ("x", "-1", "1,,2", "9" * 11, "1,2"):
        reply = await http.get(f"/v1/requests/{chunks[0]['id']}?stream=1&starting_after={wrong}")
        assert reply.status_code == 400, wrong


async def test_a_stream_is_left_and_taken_up_again(stack: Stack, http: httpx.AsyncClient) -> None:
    def words(_record: SubmitRecord, _choice: int) -> Any:
        return iter((*stack.gateway.ids(TEXT), stack.gateway.card.eos_token_ids[0]))

    stack.scheduler.script = words
    stack.scheduler.is_open.clear()
    body = {"prompt": "x", "stream": True, "background": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        request_id = await asyncio.wait_for(first_id(stack), 60)
    stack.scheduler.is_open.set()
    chunks = chunks_of((await http.get(f"/v1/requests/{request_id}?stream=true")).text)
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == TEXT
    assert stack.scheduler.cancels == []


async def first_id(stack: Stack) -> str:
    """The id of the first request that the ledger has."""
    while True:
        for entry in await stack.ledger.inbox_all():
            assert isinstance(entry.record, SubmitRecord)
            return entry.record.id.partition(":")[2]
        await asyncio.sleep(0.01)


async def cancelled(stack: Stack, count: int) -> None:
    """The scheduler has heard of so many cancels, and nothing is live."""
    await until(lambda: len(stack.scheduler.cancels) >= count, "the cancel")
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    assert len(stack.scheduler.cancels) == count


async def test_cancel_and_delete(stack: Stack, http: httpx.AsyncClient) -> None:
    for index, (method, suffix) in enumerate((("DELETE", ""), ("POST", "/cancel"))):
        body = {"prompt": "x", "background": True, "ignore_eos": True}
        stack.scheduler.is_open.clear()
        await until(lambda: stack.scheduler.is_parked, "a scheduler that stands still")
        url = f"/v1/requests/{(await http.post('/v1/completions', json=body)).json()['id']}"
        assert (await http.request(method, url + suffix)).json()["was_live"] is True
        stack.scheduler.is_open.set()
        await cancelled(stack, index + 1)
        assert (await http.request(method, url + suffix)).json()["was_live"] is False
        seen = (await http.get(url)).json()
        assert seen["status"] == "cancelled"
    for method, suffix in (("DELETE", ""), ("POST", "/cancel"), ("GET", "")):
        reply = await http.request(method, f"/v1/requests/nobody{suffix}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


async def test_a_failed_request_says_so(stack: Stack, http: httpx.AsyncClient) -> None:
    stack.says("cut", then_stop=False)
    body = {"prompt": "x", "background": True}
    url = f"/v1/requests/{(await http.post('/v1/completions', json=body)).json()['id']}"
    await until(lambda: bool(stack.scheduler.submits), "the submit")
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    seen = (await http.get(url)).json()
    assert seen["status"] == "failed"
    assert seen["choices"][0]["text"] == "cut"
    assert seen["choices"][0]["error"] == "the script ended"


async def test_a_live_request_tells_its_place_in_the_queue(
    stack: Stack, http: httpx.AsyncClient
) -> None:
    stack.scheduler.is_open.clear()
    request = pb.GenerateRequest(text="x", request_id="q", sampling=SamplingParams(max_tokens=50))
    call = stack.gateway.inference.Generate(request, timeout=60)
    await anext(aiter(call))
    stack.scheduler.cell.running = 3
    (entry,) = await stack.scheduler.ledger.inbox_all()
    stack.scheduler.cell.waiting_sequence_ids.extend([77, entry.sequence_id])
    watch = stack.gateway.service.front.readiness.watch
    await until(lambda: bool(watch.record and watch.record.waiting_sequence_ids), "the queue")
    seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="q"))
    assert seen.state == pb.RequestState.REQUEST_STATE_LIVE
    assert seen.queue_position == 2
    assert seen.queue_reason == "1 requests go first; 3 run now"
    full = {"tenant": "default", "tokens_running": 90, "tokens_max": 100, "tokens_next": 51}
    stack.scheduler.cell.full_tenants.add(**full)
    await until(lambda: bool(watch.record and watch.record.full_tenants), "a full tenant")
    seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="q"))
    reason = "tenant default has 90 of 100 running tokens, its next request needs 51"
    assert seen.queue_reason == reason
    stored = (await http.get("/v1/requests/q")).json()
    assert stored["queue"] == {"position": 2, "reason": reason}
    stack.scheduler.cell.workers_ready = 0
    await until(lambda: bool(watch.record and not watch.record.workers_ready), "no worker")
    seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="q"))
    assert seen.queue_reason == "no worker is ready"
    del stack.scheduler.cell.waiting_sequence_ids[:]
    await until(lambda: bool(watch.record and not watch.record.waiting_sequence_ids), "it runs")
    seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="q"))
    assert not seen.HasField("queue_position")
    call.cancel()
