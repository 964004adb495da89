"""API keys and tenants over both doors: who may call, who sees what, and whose bound it is."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, QuotaFailure
from google.rpc.status_pb2 import Status
from openai import AsyncOpenAI, AuthenticationError

from gateway.app import OPERATIONS
from gateway.grpc.inference import SERVICE_NAMES
from kaiten.cli.batch import Files, Note, batch
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import model_service_pb2 as model_pb
from ledger.servers.connections import Command
from tests.support.gateway_stack import MODEL, WAIT_S, Stack, running_stack, until

ALICE = (("authorization", "Bearer alice-key"),)
BOB = (("authorization", "Bearer bob-key"),)


@pytest.fixture
async def stack(
    tmp_path: Path, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    monkeypatch.setattr("gateway.wrong_keys.WAIT_S_MAX", 0.0)
    keys = tmp_path / "keys.toml"
    digests = {
        name: hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in ("alice", "bob")
    }
    keys.write_text(
        f'[tenants.alice]\nkeys = ["sha256:{digests["alice"]}"]\nrequests_max = 2\n'
        f'prompt_tokens_max = 100\n[tenants.bob]\nkeys = ["sha256:{digests["bob"]}"]\n'
    )
    async with running_stack(tmp_path / "model", redis_url, cell, api_keys_file=keys) as running:
        yield running


async def all_of(call: Any) -> list[Any]:
    return [response async for response in call]


def http_of(stack: Stack, key: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=stack.gateway.http_url, headers=headers, timeout=WAIT_S)


async def test_a_batch_is_not_forgotten_by_who_comes_back_as_another_tenant(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines would be answered twice. A command of alice's was killed before."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n')
    files, content, url = Files(path), path.read_bytes(), stack.gateway.http_url
    async with http_of(stack, "alice-key") as http:
        form: Any = {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}
        file_id = (await http.post("/v1/files", **form)).json()["id"]
        note = Note(url=url, digest=hashlib.sha256(content).hexdigest(), file_id=file_id, key="k")
        note.write(files.note)
        code = await asyncio.to_thread(batch, url, None, path, api_key="bob-key", cancels=False)
        said = capsys.readouterr().err
        assert (code, Note.read(files.note)) == (1, note)
        assert "begun with another key? " in said
        assert f"delete {files.note} to begin anew" in said
        assert (await http.get(f"/v1/files/{file_id}")).is_success


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "alice-key"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer alice-kex"),),
        (("authorization", "Basic YWxpY2U6a2V5"),),
        (("authorization", "Bearer " + "x" * 5000),),
    ],
)
async def test_no_method_runs_without_a_key(stack: Stack, metadata: Any) -> None:
    tried = 0
    for service in (pb.DESCRIPTOR, model_pb.DESCRIPTOR):
        for description in service.services_by_name.values():
            assert description.full_name in SERVICE_NAMES
            for method in description.methods:
                kind = "unary_stream" if method.server_streaming else "unary_unary"
                call = getattr(stack.gateway.channel, kind)(
                    f"/{description.full_name}/{method.name}",
                    request_serializer=lambda _: b"",
                    response_deserializer=bytes,
                )(None, metadata=metadata, timeout=WAIT_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (all_of(call) if method.server_streaming else call)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED, method.name
                tried += 1
    assert tried == 9
    assert stack.scheduler.submits == []


async def test_no_path_answers_without_a_key_but_the_open_ones(stack: Stack) -> None:
    async with http_of(stack) as http:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/responses/resp_x"),
            ("DELETE", "/v1/responses/resp_x"),
            ("POST", "/v1/responses/resp_x/cancel"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/nowhere"),
            ("GET", "/V1/models"),
            ("GET", "/health/../v1/models"),
        ):
            reply = await http.request(method, path)
            assert reply.status_code == 401, path
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["type"] == "authentication_error"
            assert reply.headers["x-request-id"]
        for path in ("/health", "/livez", "/ready", "/readyz", "/version", "/openapi.json"):
            assert (await http.get(path)).status_code in (200, 503)
    url = f"{stack.gateway.http_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(AuthenticationError):
            await client.models.list()


async def test_a_key_names_its_tenant(stack: Stack) -> None:
    stack.says("hello")
    request = pb.GenerateRequest(text="x", request_id="same")
    for metadata in (ALICE, BOB):
        events = await all_of(
            stack.gateway.inference.Generate(request, metadata=metadata, timeout=WAIT_S)
        )
        assert events[-1].event.HasField("done")
    async with http_of(stack, "bob-key") as http:
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    seen = [(record.tenant, record.id.partition(":")[0]) for record in stack.scheduler.submits]
    assert seen == [("alice", "alice"), ("bob", "bob"), ("bob", "bob")]


async def test_anothers_request_is_not_found_as_an_unknown_one_is(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.says("secret")
    request = pb.GenerateRequest(text="x", request_id="mine")
    await all_of(stack.gateway.inference.Generate(request, metadata=ALICE, timeout=WAIT_S))
    stub = stack.gateway.inference
    store = stack.gateway.service.link.ledger._store
    asked: list[str] = []
    commands = store.commands

    async def noting(sent: Sequence[Command], **options: Any) -> list[Any]:
        asked.append(str(sent))
        return await commands(sent, **options)

    monkeypatch.setattr(store, "commands", noting)
    for name in ("mine", "none"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await all_of(
                stub.Attach(pb.AttachRequest(request_id=name), metadata=BOB, timeout=WAIT_S)
            )
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert str(caught.value.details()).startswith(f"request {name!r} not found: it never was")
    # Both take as long: one look at the store each, the same.
    looks = [sent for sent in asked if "bob:mine" in sent or "bob:none" in sent]
    assert len(looks) == 2
    assert looks[0] == looks[1].replace("bob:none", "bob:mine")
    for call in (
        stub.Cancel(pb.CancelRequest(request_id="mine"), metadata=BOB),
        stub.GetRequest(pb.GetRequestRequest(request_id="mine"), metadata=BOB),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    async with http_of(stack, "alice-key") as http:
        told = (await http.post("/v1/responses", json={"input": "x"})).json()
        url = f"/v1/responses/{told['id']}"
        assert (await http.get(url)).json()["output"][0]["content"][0]["text"] == "secret"
    async with http_of(stack, "bob-key") as http:
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        ):
            assert (await http.request(method, url + path)).status_code == 404


async def test_every_path_with_anothers_id_answers_as_for_one_that_never_was(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ids in bodies, too. A path that is new finds itself here."""
    monkeypatch.setattr("gateway.cell.leader.LEADERLESS_S_MAX", 0.0)
    stack.says("secret")
    said = {"items": [{"role": "user", "content": "secret"}]}
    form: Any = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}}
    async with http_of(stack, "alice-key") as http:

        async def made(path: str, **body: Any) -> str:
            return str((await http.post(path, **body)).json()["id"])

        file = await made("/v1/files", **form)
        window = {"endpoint": "/v1/completions", "completion_window": "24h"}
        response = await made("/v1/responses", json={"input": "x"})
        hers = {
            "/v1/responses/": response,
            "/v1/requests/": response,
            "/v1/conversations/": await made("/v1/conversations", json=said),
            "/v1/files/": file,
            "/v1/batches/": await made("/v1/batches", json={"input_file_id": file, **window}),
        }
    in_bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/responses/", "/v1/responses", {"input": "x", "previous_response_id": "{id}"}),
        ("/v1/conversations/", "/v1/responses", {"input": "x", "conversation": "{id}"}),
        ("/v1/files/", "/v1/batches", {"input_file_id": "{id}", **window}),
        ("/v1/files/", "/v1/files?after={id}", {}),
        ("/v1/batches/", "/v1/batches?after={id}", {}),
    ]
    asked = [(start, "POST" if body else "GET", path, body) for start, path, body in in_bodies]
    for operation in OPERATIONS:
        if "{id}" in operation.path:
            body: dict[str, Any] = said if operation.path.endswith("/items") else {"metadata": {}}
            start = operation.path.partition("{")[0]
            path = operation.path.replace("{item_id}", "msg_1")
            asked.append((start, operation.method, path, body if operation.body else {}))
    async with http_of(stack, "bob-key") as http:
        for start, method, path, body in asked:
            # Of her ids the hex digits, in another order.
            kind, mark, digits = hers[start].rpartition("_" if "_" in hers[start] else "-")
            answers = []
            for id in (hers[start], kind + mark + digits[::-1]):
                sent = json.loads(json.dumps(body).replace("{id}", id)) or None
                reply = await http.request(method, path.replace("{id}", id), json=sent)
                told = reply.text.replace(id.removeprefix("resp_"), "ID").replace("resp_ID", "ID")
                answers.append((reply.status_code, told))
            assert answers[0] == answers[1], path
            assert answers[0][0] in (400, 404, 503), path
            assert "secret" not in answers[0][1]


def details(error: "grpc.aio.AioRpcError") -> tuple[QuotaFailure, ErrorInfo]:
    status = Status.FromString(dict(error.trailing_metadata() or ())["grpc-status-details-bin"])
    quota, info = QuotaFailure(), ErrorInfo()
    assert any(detail.Unpack(quota) for detail in status.details)
    assert any(detail.Unpack(info) for detail in status.details)
    return quota, info


async def test_a_tenant_over_its_bound_is_refused_and_others_are_not(stack: Stack) -> None:
    stack.scheduler.is_open.clear()
    stub = stack.gateway.inference
    call = stub.Generate(pb.GenerateRequest(text="x", n=2), metadata=ALICE, timeout=WAIT_S)
    await anext(aiter(call))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await all_of(stub.Generate(pb.GenerateRequest(text="y"), metadata=ALICE, timeout=WAIT_S))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    quota, info = details(caught.value)
    (violation,) = quota.violations
    assert violation.subject == "tenant:alice"
    assert violation.description == (
        "overloaded: too many live requests of tenant alice (live 2, requests_max 2); retry in 1 s"
    )
    assert dict(info.metadata) == {
        "limit": "2",
        "live": "2",
        "subject": "tenant",
        "rule": "requests_max",
        "tenant": "alice",
    }
    # A long prompt is refused by a look at the store, before its text is touched.
    service = stack.gateway.service.generation_service
    tokenized = service._prompter.token_ids
    asked: list[object] = []

    async def spy(prompt: Any, tenant: str, context_tokens: int) -> Any:
        asked.append(prompt)
        return await tokenized(prompt, tenant, context_tokens)

    service._prompter.token_ids = spy  # type: ignore[method-assign]
    async with http_of(stack, "alice-key") as http:
        reply = await http.post("/v1/completions", json={"prompt": "long " * 1000})
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        assert "tenant alice (live 2, requests_max 2)" in reply.json()["error"]["message"]
        # Counting its tokens is the same work.
        reply = await http.post("/tokenize", json={"prompt": "long " * 1000})
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        assert not asked
        assert int(reply.headers["retry-after"]) >= 1
    assert asked == []
    call.cancel()
    stack.scheduler.is_open.set()
    await until(lambda: stack.scheduler.live_count == 0, "an idle scheduler")
    stack.says("bob")
    other = stub.Generate(pb.GenerateRequest(text="y"), metadata=BOB, timeout=WAIT_S)
    assert (await all_of(other))[-1].event.HasField("done")
    assert (await stack.ledger.load("alice")).choices == 0


async def test_who_says_no_bound_has_half_of_what_it_shares_with_others(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    """And all of it while there is nobody else; whoever asks for more is refused."""
    keys = tmp_path / "keys.toml"
    of_alice, of_bob = (
        f'[[keys]]\ntenant = "{name}"\ndigest = "sha256:{digest}"\n'
        for name in ("alice", "bob")
        for digest in [hashlib.sha256(f"{name}-key".encode()).hexdigest()]
    )
    keys.write_text(of_alice)
    bounds: dict[str, Any] = {
        "api_keys_file": keys,
        "requests_max": 4,
        "choices_max": 1,
        "streams_max": 8,
    }
    async with running_stack(tmp_path / "model", redis_url, cell, **bounds) as stack:
        stub = stack.gateway.inference
        stack.scheduler.is_open.clear()
        live = [
            stub.Generate(
                pb.GenerateRequest(text="x", request_id=f"r{i}"), metadata=ALICE, timeout=WAIT_S
            )
            for i in range(3)
        ]
        for call in live:
            await anext(aiter(call))
        keys.write_text(of_alice + of_bob)
        keyring = stack.gateway.service._keyring
        await until(lambda: repr(keyring) == "Keyring(2 keys)", "the new key")
        refused = stub.Generate(pb.GenerateRequest(text="x"), metadata=ALICE, timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError, match=r"alice \(live 3, requests_max 2\)"):
            await all_of(refused)
        # Who comes back to a request makes no new one, but is followed.
        attached = pb.AttachRequest(request_id="r0")
        live.append(stub.Attach(attached, metadata=ALICE, timeout=WAIT_S))
        await anext(aiter(live[3]))
        with pytest.raises(grpc.aio.AioRpcError, match=r"alice \(live 4, streams_max 4\)"):
            await all_of(stub.Attach(attached, metadata=ALICE, timeout=WAIT_S))
        live.append(stub.Generate(pb.GenerateRequest(text="x"), metadata=BOB, timeout=WAIT_S))
        await anext(aiter(live[4]))
        for call in live:
            call.cancel()


async def test_more_than_the_tenant_may_ever_have_is_wrong_not_late(stack: Stack) -> None:
    async with http_of(stack, "alice-key") as http:
        reply = await http.post("/v1/completions", json={"prompt": "x", "n": 3})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
        reply = await http.post("/v1/completions", json={"prompt": "x", "priority": -1})
        assert "more urgent" in reply.json()["error"]["message"]
        body = {"model": MODEL, "prompt": list(range(1, 102))}
        assert (await http.post("/v1/completions", json=body)).status_code == 400


async def test_a_key_taken_out_is_refused_and_what_it_began_goes_on(
    stack: Stack, tmp_path: Path
) -> None:
    stack.scheduler.is_open.clear()
    stub = stack.gateway.inference
    stack.says("goes on")
    call = stub.Generate(pb.GenerateRequest(text="x"), metadata=ALICE, timeout=WAIT_S)
    await anext(aiter(call))
    digest = hashlib.sha256(b"alice-new").hexdigest()
    new = tmp_path / "new.toml"
    new.write_text(f'[tenants.alice]\nkeys = ["sha256:{digest}"]\n')
    new.rename(tmp_path / "keys.toml")
    keyring = stack.gateway.service._keyring

    def is_replaced() -> bool:
        return repr(keyring) == "Keyring(1 keys)"

    await until(is_replaced, "the new keys")
    for metadata in (ALICE, BOB):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetRequest(pb.GetRequestRequest(request_id="x"), metadata=metadata)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    stack.scheduler.is_open.set()
    rest = await all_of(call)
    assert rest[-1].event.HasField("done")
    async with http_of(stack, "alice-new") as http:
        assert (await http.get("/v1/models")).status_code == 200
