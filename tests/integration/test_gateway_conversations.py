"""Responses that go on with a conversation: whatever is lost, late or in the way."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from gateway.openai.conversations import keeper
from gateway.openai.responses.stored import StoredResponse
from ledger.batches.conversations import KeptConversation
from ledger.scripts import CONVERSATION_DROP, CONVERSATION_KEEP, FILE_DROP, FORGET
from ledger.servers.connections import Command
from service_kit.errors import DataLoss, Unavailable
from tests.support.gateway_stack import WAIT_S, Stack, running_stack, until
from tests.support.store_server import own_store


@pytest.fixture(autouse=True)
def nobody_else_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At conversations whose response has ended: these tests are of who does it sooner."""
    monkeypatch.setattr(keeper, "LOOK_S", 3600.0)


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

    async def second(*args: Any, **rest: Any) -> KeptConversation | None:
        monkeypatch.setattr(conversations, "change", change)
        assert (await http.post("/v1/responses", json=body, headers=named)).status_code == 200
        return await change(*args, **rest)

    monkeypatch.setattr(conversations, "change", second)
    assert (await http.post("/v1/responses", json=body, headers=named)).status_code == 200
    await until(lambda: bool(stack.scheduler.submits), "the submit")
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    assert (await http.get("/v1/responses/resp_it")).json()["status"] == "completed"
    items = (await http.get(f"{talk}/items")).json()["data"]
    assert [each["content"][0]["text"] for each in items] == ["Hi", "x"]


@pytest.mark.parametrize("comes_between", [False, True])
async def test_a_response_whose_gateway_died_joins_its_conversation_as_that_was(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, comes_between: bool
) -> None:
    """Between the response's acceptance and its place in there. Its answer stands behind nothing
    that it has not seen.
    """
    stack.says("Hi")
    talk = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
    conversations = stack.gateway.service.link.ledger.conversations
    change = conversations.change

    async def dead(*_: Any, **_rest: Any) -> None:
        monkeypatch.setattr(conversations, "change", change)
        raise Unavailable("nobody lives to do it")

    monkeypatch.setattr(conversations, "change", dead)
    ask = partial(
        http.post,
        "/v1/responses",
        json={"input": "x", "conversation": talk.rpartition("/")[2]},
        headers={"idempotency-key": "it"},
    )
    assert (await ask()).status_code == 503
    if comes_between:
        item = {"role": "user", "content": "unseen"}
        assert (await http.post(f"{talk}/items", json={"items": [item]})).status_code == 200
    again = await ask()
    if comes_between:
        error = again.json()["error"]
        assert (again.status_code, error["param"]) == (400, "idempotency-key")
        assert "'resp_it', which is no part of the conversation" in error["message"]
    else:
        assert again.json()["status"] == "completed"
    said = await said_in(http, talk)
    assert said == (["unseen"] if comes_between else ["Hi", "x"])


async def test_a_response_that_came_to_nothing_says_why_though_the_store_was_not_heard(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone already when its gateway has it forgotten again."""
    talk = (await http.post("/v1/conversations", json={})).json()["id"]
    ledger = stack.gateway.service.link.ledger
    connections, change = ledger._store._connections, ledger.conversations.change
    heard = connections.roundtrip

    async def lose(commands: Sequence[Command], **rest: Any) -> list[Any]:
        replies = await heard(commands, **rest)
        if commands[0][:2] == ("EVALSHA", FORGET.sha) and replies[0] == [b"OK"]:
            raise ConnectionError("lost on its way")
        return replies

    async def contended(*_: Any, **_rest: Any) -> None:
        """Somebody else was first, once."""
        monkeypatch.setattr(ledger.conversations, "change", change)

    monkeypatch.setattr(connections, "roundtrip", lose)
    monkeypatch.setattr(ledger.conversations, "change", contended)
    reply = await http.post("/v1/responses", json={"input": "x", "conversation": talk})
    assert reply.status_code == 503
    assert "is being changed by others" in reply.json()["error"]["message"]


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


async def test_what_is_sent_again_under_its_key_is_made_once(
    stack: Stack, http: httpx.AsyncClient
) -> None:
    """The answer was lost; somebody else has changed and deleted something since."""
    post = partial(http.post, headers={"idempotency-key": "it"})
    asked: Any = {"items": [{"role": "user", "content": "first"}]}
    made = (await post("/v1/conversations", json=asked)).json()
    talk = f"/v1/conversations/{made['id']}"
    # The same key and bytes, for something else.
    added = (await post(f"{talk}/items", json=asked)).json()["data"]
    assert await said_in(http, talk) == ["first", "first"]
    await http.post(talk, json={"metadata": {"by": "another"}})
    again = (await post("/v1/conversations", json=asked)).json()
    assert again == made | {"metadata": {"by": "another"}}
    assert (await post(f"{talk}/items", json=asked)).json()["data"] == added
    assert await said_in(http, talk) == ["first", "first"]
    assert (await http.delete(f"{talk}/items/{added[0]['id']}")).status_code == 200
    assert (await post(f"{talk}/items", json=asked)).json()["data"] == added
    assert await said_in(http, talk) == ["first"]
    # Of another body, or without a key, it is another.
    other = (await post("/v1/conversations", json={})).json()["id"]
    unnamed = [(await http.post("/v1/conversations", json={})).json()["id"] for _ in range(2)]
    assert len({made["id"], other, *unnamed}) == 4
    refused = await http.post("/v1/conversations", json={}, headers={"idempotency-key": "a b"})
    assert refused.json()["error"]["param"] == "idempotency-key"


@pytest.mark.parametrize("loses", ["nothing", "the response", "the conversation"])
async def test_what_nobody_looks_at_gets_into_its_conversation_all_the_same(
    tmp_path: Path, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch, loses: str
) -> None:
    """Neither at the response nor at the conversation, before the one of them leaves."""
    monkeypatch.setattr(keeper, "LOOK_S", 0.02)
    async with (
        running_stack(tmp_path / "model", redis_url, cell) as stack,
        httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as http,
        Redis.from_url(redis_url) as store,
    ):
        stack.says("Hi")
        keys, conversations = stack.ledger.keys, stack.ledger.conversations
        stack.scheduler.is_open.clear()
        talk, _ = await begun(http, background=True)
        id = talk.rpartition("/")[2]
        assert await conversations.waiting() == [("default", id, "it")]
        request = keys.request("default:it"), keys.result("default:it")
        if loses == "the response":
            await store.delete(*request)
        elif loses == "the conversation":
            await store.delete(keys.conversation("default", id))
        stack.scheduler.is_open.set()
        async with asyncio.timeout(WAIT_S):
            while await conversations.waiting():  # noqa: ASYNC110 - it is in the store
                await asyncio.sleep(0.005)
        if loses == "nothing":
            assert await store.delete(*request) == 2
            assert await said_in(http, talk) == ["Hi", "x"]
        elif loses == "the response":
            assert await said_in(http, talk) == []


async def test_what_cannot_be_looked_at_keeps_no_other_from_its_conversation(
    tmp_path: Path, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "LOOK_S", 0.02)
    found = StoredResponse.find

    async def damaged(api: Any, tenant: Any, id: str) -> StoredResponse:
        if id == "resp_bad":
            raise DataLoss("its result cannot be read")
        return await found(api, tenant, id)

    monkeypatch.setattr(StoredResponse, "find", damaged)
    async with (
        running_stack(tmp_path / "model", redis_url, cell) as stack,
        httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as http,
    ):
        stack.says("Hi")
        stack.scheduler.is_open.clear()
        bad, _ = await begun(http, "bad", background=True)
        await begun(http, background=True)
        waiting = stack.ledger.conversations.waiting
        assert [each.request_id for each in await waiting()] == ["bad", "it"], "the worse first"
        stack.scheduler.is_open.set()
        async with asyncio.timeout(WAIT_S):
            while len(await waiting()) > 1:  # noqa: ASYNC110 - it is in the store
                await asyncio.sleep(0.005)
        assert await waiting() == [("default", bad.rpartition("/")[2], "bad")]


async def begun(
    http: httpx.AsyncClient, name: str = "it", **asked: Any
) -> tuple[str, httpx.Response]:
    """A conversation, and what answers a response in it of this name."""
    talk = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
    body = {"input": "x", "conversation": talk.rpartition("/")[2], **asked}
    named = {"idempotency-key": name}
    return talk, await http.post("/v1/responses", json=body, headers=named)


async def ended(stack: Stack) -> None:
    await until(lambda: bool(stack.scheduler.submits), "the submit")
    await until(lambda: stack.scheduler.live_count == 0, "the end")


async def said_in(http: httpx.AsyncClient, talk: str) -> list[str]:
    """The newest first."""
    items = (await http.get(f"{talk}/items")).json()["data"]
    return [each["content"][0]["text"] for each in items]


@pytest.mark.parametrize("hindrance", ["it drains", "no room", "both"])
async def test_what_has_ended_is_deleted_whatever_is_in_the_way(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, hindrance: str
) -> None:
    """And what it said stays in its conversation, which can be read, too."""
    stack.says("Hi")
    talk, _ = await begun(http, background=True)
    await ended(stack)
    store, readiness = stack.gateway.service.link.ledger._store, stack.gateway.service._readiness
    if hindrance != "it drains":
        monkeypatch.setattr(store, "limits", replace(store.limits, files_bytes_max=1))
    if hindrance != "no room":
        readiness.drain()
    assert (await http.delete("/v1/responses/resp_it")).status_code == 200
    assert (await http.get("/v1/responses/resp_it")).status_code == 404
    assert await said_in(http, talk) == ["Hi", "x"]


async def test_everything_is_deleted_in_a_full_store(tmp_path: Path, cell: str) -> None:
    """Which takes nothing in any more until something has left it."""
    with own_store(tmp_path / "store") as store:
        async with (
            running_stack(tmp_path / "model", store.url, cell) as stack,
            httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as http,
            Redis.from_url(store.url) as client,
        ):
            stack.says("Hi")
            stack.scheduler.is_open.clear()
            talk, _ = await begun(http, background=True)
            item = {"role": "user", "content": "more"}
            added = await http.post(f"{talk}/items", json={"items": [item]})
            form: Any = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}}
            file = (await http.post("/v1/files", **form)).json()["id"]
            stack.scheduler.is_open.set()
            await ended(stack)
            await client.config_set("maxmemory", "1")
            refused = await http.post(f"{talk}/items", json={"items": [item]})
            assert refused.status_code == 503
            for path in (
                f"{talk}/items/{added.json()['data'][0]['id']}",
                "/v1/responses/resp_it",
                f"/v1/files/{file}",
            ):
                assert (await http.delete(path)).status_code == 200
                assert (await http.get(path)).status_code == 404
            assert await said_in(http, talk) == ["Hi", "x"]
            assert (await http.delete(talk)).status_code == 200


async def test_a_conversation_is_read_though_there_is_no_room(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.says("Hi")
    talk, _ = await begun(http, background=True)
    await ended(stack)
    store = stack.gateway.service.link.ledger._store
    monkeypatch.setattr(store, "limits", replace(store.limits, files_bytes_max=1))
    assert await said_in(http, talk) == ["Hi", "x"]
    item = {"role": "user", "content": "more"}
    assert (await http.post(f"{talk}/items", json={"items": [item]})).status_code == 429


async def test_what_ends_while_it_is_deleted_stays_in_its_conversation(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at whether it has ended and its end."""
    stack.says("Hi")
    stack.scheduler.is_open.clear()
    talk, _ = await begun(http, background=True)
    ledger = stack.gateway.service.link.ledger
    result = ledger.result

    async def look(id: str) -> Any:
        found = await result(id)
        monkeypatch.setattr(ledger, "result", result)
        stack.scheduler.is_open.set()
        await ended(stack)
        return found

    monkeypatch.setattr(ledger, "result", look)
    await http.delete("/v1/responses/resp_it")
    stack.scheduler.is_open.set()
    await ended(stack)
    # Whoever is told that it was deleted before its end has asked for that.
    assert bool(stack.scheduler.cancels) == (await said_in(http, talk) == [])


async def test_an_ended_response_is_told_without_reading_its_conversation_again(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.says("Hi")
    talk, _ = await begun(http, background=True)
    await ended(stack)
    conversations = stack.gateway.service.link.ledger.conversations
    find, reads = conversations.find, 0

    async def count(*args: Any) -> KeptConversation:
        nonlocal reads
        reads += 1
        return await find(*args)

    monkeypatch.setattr(conversations, "find", count)
    for _ in range(3):
        assert (await http.get("/v1/responses/resp_it")).json()["status"] == "completed"
    assert reads == 1
    assert await said_in(http, talk) == ["Hi", "x"]


@pytest.mark.parametrize("background", [True, False])
async def test_a_store_that_is_away_ends_nothing_that_is_asked_for_again(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Accepted, a response did not get into its conversation: its client asks by the same key."""
    stack.says("Hi")
    stack.scheduler.is_open.clear()
    conversations = stack.gateway.service.link.ledger.conversations

    async def away(*_args: Any, **_rest: Any) -> KeptConversation | None:
        raise Unavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(conversations, "change", away)
        talk, refused = await begun(http, background=background)
        assert refused.status_code == 503
    await asyncio.wait_for(stack.gateway.service.generation_service.releases.settled(), WAIT_S)
    stack.scheduler.is_open.set()
    body = {"input": "x", "conversation": talk.rpartition("/")[2], "background": background}
    again = await http.post("/v1/responses", json=body, headers={"idempotency-key": "it"})
    assert again.status_code == 200
    await ended(stack)
    assert stack.scheduler.cancels == []
    assert await said_in(http, talk) == ["Hi", "x"]


async def test_who_leaves_while_a_response_joins_its_conversation_leaves_it_there(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.says("Hi")
    conversations = stack.gateway.service.link.ledger.conversations
    change, is_joining, may_join = conversations.change, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **rest: Any) -> KeptConversation | None:
        monkeypatch.setattr(conversations, "change", change)
        is_joining.set()
        await may_join.wait()
        return await change(*args, **rest)

    talk = f"/v1/conversations/{(await http.post('/v1/conversations', json={})).json()['id']}"
    monkeypatch.setattr(conversations, "change", slow)
    body = {"input": "x", "conversation": talk.rpartition("/")[2], "background": True}
    gone = asyncio.create_task(http.post("/v1/responses", json=body))
    await asyncio.wait_for(is_joining.wait(), WAIT_S)
    gone.cancel()
    await asyncio.wait({gone})
    # The gateway has heard of it when it has answered this one.
    assert (await http.get("/health")).status_code == 200
    may_join.set()
    await until(lambda: not stack.gateway.service.generation_service.door.active, "it has left")
    await ended(stack)
    assert await said_in(http, talk) == ["Hi", "x"]


SENT_AGAIN = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("what", ["response", "conversation", "item", "file"])
async def test_who_did_not_hear_that_something_is_deleted_is_told_when_asking_again(
    stack: Stack, http: httpx.AsyncClient, what: str
) -> None:
    """OpenAI's SDKs ask again by themselves, and say so; to them it is done."""
    stack.says("Hi")
    talk, _ = await begun(http)
    form: Any = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}}
    (item, _) = (await http.get(f"{talk}/items")).json()["data"]
    path = {
        "response": "/v1/responses/resp_it",
        "conversation": talk,
        "item": f"{talk}/items/{item['id']}",
        "file": f"/v1/files/{(await http.post('/v1/files', **form)).json()['id']}",
    }[what]
    first = await http.delete(path, headers={"x-stainless-retry-count": "0"})
    assert first.status_code == 200
    assert (await http.delete(path)).status_code == 404
    again = await http.delete(path, headers=SENT_AGAIN)
    assert (again.status_code, again.json()) == (200, first.json())


@pytest.mark.parametrize("what", ["response", "conversation", "file"])
async def test_what_is_deleted_is_told_though_the_store_was_not_heard(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stack.says("Hi")
    talk, _ = await begun(http)
    form: Any = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}}
    path = {
        "response": "/v1/responses/resp_it",
        "conversation": talk,
        "file": f"/v1/files/{(await http.post('/v1/files', **form)).json()['id']}",
    }[what]
    connections = stack.gateway.service.link.ledger._store._connections
    heard = connections.roundtrip
    lost = {each.sha for each in (FORGET, CONVERSATION_DROP, FILE_DROP)}

    async def lose(commands: Sequence[Command], **rest: Any) -> list[Any]:
        replies = await heard(commands, **rest)
        if commands[0][1] in lost and not isinstance(replies[0], NoScriptError):
            monkeypatch.setattr(connections, "roundtrip", heard)
            raise ConnectionError("lost on its way")
        return replies

    monkeypatch.setattr(connections, "roundtrip", lose)
    assert (await http.delete(path)).status_code == 200
    assert connections.roundtrip == heard
    assert (await http.get(path)).status_code == 404


@pytest.mark.parametrize("asked", [{}, {"stream": True}, {"background": True}], ids=str)
async def test_a_key_whose_response_came_to_nothing_is_told_to_be_used_up(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    """Somebody added to its conversation meanwhile: who asks again as told, asks in vain."""
    stack.says("Hi")
    conversations = stack.gateway.service.link.ledger.conversations
    change, item = conversations.change, {"role": "user", "content": "more"}

    async def second(tenant: str, before: KeptConversation, *args: Any, **rest: Any) -> Any:
        monkeypatch.setattr(conversations, "change", change)
        added = await http.post(f"/v1/conversations/{before.id}/items", json={"items": [item]})
        assert added.status_code == 200
        return await change(tenant, before, *args, **rest)

    monkeypatch.setattr(conversations, "change", second)
    talk, refused = await begun(http, **asked)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
    body = {"input": "x", "conversation": talk.rpartition("/")[2], **asked}
    again = await http.post("/v1/responses", json=body, headers={"idempotency-key": "it"})
    told = again.json()["error"]
    assert (again.status_code, told["param"]) == (400, "idempotency-key")
    assert told["message"].endswith("take another key")
    other = await http.post("/v1/responses", json=body, headers={"idempotency-key": "other"})
    assert other.status_code == 200
    await until(lambda: "default:other" in [it.id for it in stack.scheduler.submits], "it")
    await until(lambda: stack.scheduler.live_count == 0, "the end")
    assert await said_in(http, talk) == ["Hi", "x", "more"]


@pytest.mark.parametrize("first", ["it itself, unheard", "another"])
async def test_an_item_that_two_delete_at_once_is_deleted_for_both(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    items = [{"role": "user", "content": text} for text in "ab"]
    made = (await http.post("/v1/conversations", json={"items": items})).json()["id"]
    talk, conversations = (
        f"/v1/conversations/{made}",
        stack.gateway.service.link.ledger.conversations,
    )
    path, change = (
        f"{talk}/items/{(await http.get(f'{talk}/items')).json()['data'][0]['id']}",
        conversations.change,
    )

    async def second(*args: Any, **rest: Any) -> KeptConversation | None:
        monkeypatch.setattr(conversations, "change", change)
        if first == "another":
            assert (await http.delete(path)).status_code == 200
        else:
            await change(*args, **rest)
            await http.post(talk, json={"metadata": {"by": "another"}})
        return await change(*args, **rest)

    monkeypatch.setattr(conversations, "change", second)
    assert (await http.delete(path)).status_code == 200
    assert await said_in(http, talk) == ["a"]
    assert (await http.delete(path)).status_code == 404
