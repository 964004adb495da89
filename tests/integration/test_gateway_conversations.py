"""Responses that go on with a conversation: whatever is lost, late or in the way."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from ledger.batches.conversations import KeptConversation
from ledger.scripts import CONVERSATION_KEEP
from ledger.servers.connections import Command
from tests.support.gateway_stack import Stack, until


@pytest.mark.parametrize(
    ("asked", "looks", "leaves"),
    [
        ({}, "at nothing", "expired"),
        ({"stream": True}, "at nothing", "expired"),
        # Of its end nobody has heard.
        ({"background": True}, "at nothing", "deleted"),
        ({"background": True}, "at it", "expired"),
        ({"background": True}, "at its stream", "expired"),
        ({"background": True}, "too late to cancel it", "expired"),
    ],
)
async def test_what_a_response_said_stays_in_its_conversation(
    stack: Stack, http: httpx.AsyncClient, redis_url: str, asked: Any, looks: str, leaves: str
) -> None:
    """Though nobody looked at the conversation between its end and its own."""
    stack.says("Hi")
    talk = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
    body = {"input": "x", "conversation": talk.rpartition("/")[2], **asked}
    named = {"idempotency-key": "it"}
    assert (await http.post("/v1/responses", json=body, headers=named)).status_code == 200
    await until(lambda: bool(stack.scheduler.submits), "the submit")
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    if looks == "too late to cancel it":
        told = (await http.post("/v1/responses/resp_it/cancel")).json()
        assert told["status"] == "completed"
    elif looks != "at nothing":
        query = {"stream": "true"} if looks == "at its stream" else {}
        assert (await http.get("/v1/responses/resp_it", params=query)).status_code == 200
    if leaves == "deleted":
        await http.delete("/v1/responses/resp_it")
    else:
        keys, (record,) = stack.ledger.keys, stack.scheduler.submits
        async with Redis.from_url(redis_url) as store:
            assert await store.delete(keys.request(record.id), keys.result(record.id)) == 2
    assert (await http.get("/v1/responses/resp_it")).status_code == 404
    items = (await http.get(f"{talk}/items")).json()["data"]
    assert [each["content"][0]["text"] for each in items] == ["Hi", "x"]


@pytest.mark.parametrize("asked", [{}, {"stream": True}], ids=str)
async def test_it_stays_though_its_gateway_drains(
    stack: Stack, http: httpx.AsyncClient, redis_url: str, asked: Any
) -> None:
    """Which lets nobody in any more, itself neither."""
    stack.says("Hi")
    stack.scheduler.is_open.clear()
    readiness = stack.gateway.service.generation_service.readiness
    talk = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
    body = {"input": "x", "conversation": talk.rpartition("/")[2], **asked}
    asking = asyncio.create_task(http.post("/v1/responses", json=body))
    await until(
        lambda: bool(stack.gateway.service.generation_service.door.active), "it is accepted"
    )
    readiness.drain()
    stack.scheduler.is_open.set()
    assert (await asking).status_code == 200
    keys, (record,) = stack.ledger.keys, stack.scheduler.submits
    async with Redis.from_url(redis_url) as store:
        assert await store.delete(keys.request(record.id), keys.result(record.id)) == 2
    readiness.is_draining = False
    items = (await http.get(f"{talk}/items")).json()["data"]
    assert [each["content"][0]["text"] for each in items] == ["Hi", "x"]


async def test_the_same_response_asked_for_twice_at_once_goes_on_with_its_conversation(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes second finds that it is a part of it, and ends nothing."""
    stack.says("Hi")
    talk = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
    body = {"input": "x", "conversation": talk.rpartition("/")[2], "background": True}
    named = {"idempotency-key": "it"}
    conversations = stack.gateway.service.link.ledger.conversations
    change = conversations.change

    async def second(*args: Any) -> KeptConversation | None:
        monkeypatch.setattr(conversations, "change", change)
        assert (await http.post("/v1/responses", json=body, headers=named)).status_code == 200
        return await change(*args)

    monkeypatch.setattr(conversations, "change", second)
    assert (await http.post("/v1/responses", json=body, headers=named)).status_code == 200
    await until(lambda: bool(stack.scheduler.submits), "the submit")
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    assert (await http.get("/v1/responses/resp_it")).json()["status"] == "completed"
    items = (await http.get(f"{talk}/items")).json()["data"]
    assert [each["content"][0]["text"] for each in items] == ["Hi", "x"]


async def test_items_are_added_once_though_the_store_was_not_heard(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And somebody else changes the conversation before it is asked again."""
    talk = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
    connections = stack.gateway.service.link.ledger._store._connections
    heard = connections.roundtrip

    async def lose(commands: Sequence[Command], **rest: Any) -> list[Any]:
        replies = await heard(commands, **rest)
        if commands[0][:2] == ("EVALSHA", CONVERSATION_KEEP.sha):
            monkeypatch.setattr(connections, "roundtrip", heard)
            await http.post(talk, json={"metadata": {"by": "another"}})
            raise ConnectionError("lost on its way")
        return replies

    monkeypatch.setattr(connections, "roundtrip", lose)
    item = {"role": "user", "content": "once"}
    assert (await http.post(f"{talk}/items", json={"items": [item]})).status_code == 200
    assert (await http.get(talk)).json()["metadata"] == {"by": "another"}
    assert len((await http.get(f"{talk}/items")).json()["data"]) == 1
