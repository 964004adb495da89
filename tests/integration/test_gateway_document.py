"""The OpenAPI document against the running gateway: every route, every kind of reply."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_api
from gateway.openai.operation import routes_of
from gateway.settings import GatewaySettings
from service_kit.metrics import Metrics
from tests.support.gateway_stack import JSON, MODEL, Stack
from tests.support.json_schema import is_valid

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT: dict[str, Any] = {"prompt": "x", "max_tokens": 3}
ALL_OF_IT: dict[str, Any] = {"n": 2, "return_token_ids": True}
STREAM: dict[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True},
}


async def document_of(http: httpx.AsyncClient) -> dict[str, Any]:
    document: dict[str, Any] = (await http.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    return document


def check_reply(document: dict[str, Any], method: str, path: str, reply: httpx.Response) -> None:
    """Status, type and content are among those that the document tells."""
    responses = document["paths"][path][method]["responses"]
    assert str(reply.status_code) in responses, (method, path, reply.text)
    content = responses[str(reply.status_code)]["content"]
    kind = reply.headers["content-type"].partition(";")[0]
    assert kind in content, (method, path, kind)
    for value in contents_of(reply, kind):
        assert is_valid(document, content[kind]["schema"], value), (method, path, value)


def contents_of(reply: httpx.Response, kind: str) -> list[Any]:
    if kind == "application/json":
        return [reply.json()]
    if kind != "text/event-stream":
        return [reply.text]
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert len(events) > 2
    return [json.loads(event) for event in events]


async def test_the_document_has_the_routes_of_the_app_and_no_others(
    stack: Stack, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    config = GatewaySettings(model=tmp_path)
    metrics = Metrics("routes", is_scraped=False)
    gateway = stack.gateway.service
    parts = gateway.generation_service, gateway.link, gateway._operators
    try:
        served = {
            (route.path.replace(":path}", "}"), method.lower())
            for route in routes_of(create_api(*parts, config, metrics, share=int))
            for method in route.methods or ()
            if method != "HEAD"
        }
    finally:
        metrics.close()
    document = await document_of(http)
    told = {(path, method) for path, each in document["paths"].items() for method in each}
    assert told == served


async def test_every_reference_is_in_the_document(http: httpx.AsyncClient) -> None:
    document = await document_of(http)
    parts = json.dumps(document).split('"#/components/schemas/')[1:]
    references = {part.partition('"')[0] for part in parts}
    assert references == set(document["components"]["schemas"])


async def test_every_route_answers_an_empty_body_as_the_document_says(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody leads here, and nobody will.
    monkeypatch.setattr("gateway.cell.leader.LEADERLESS_S_MAX", 0.0)
    document = await document_of(http)
    for path, operations in document["paths"].items():
        url = path.replace("{name}", MODEL).replace("{id}", "nobody")
        for method in operations:
            reply = await http.request(method, url, content=b"{}", headers=JSON)
            check_reply(document, method, path, reply)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", CHAT | ALL_OF_IT | {"logprobs": True, "top_logprobs": 1}, 200),
        ("/v1/chat/completions", CHAT | ALL_OF_IT | STREAM, 200),
        ("/v1/chat/completions", CHAT | {"model": "other"}, 404),
        ("/v1/chat/completions", CHAT | {"n": 0}, 400),
        ("/v1/chat/completions", CHAT | {"background": True}, 400),
        ("/v1/completions", TEXT | ALL_OF_IT, 200),
        ("/v1/completions", TEXT | ALL_OF_IT | {"logprobs": 1}, 200),
        ("/v1/completions", TEXT | ALL_OF_IT | STREAM | {"logprobs": 1}, 200),
        ("/v1/completions", TEXT | {"user": 7, "tools": [], "store": None}, 200),
        ("/v1/completions", TEXT | {"tools": [1]}, 400),
        ("/tokenize", {"prompt": "x"}, 200),
        ("/detokenize", {"tokens": [1]}, 200),
        ("/detokenize", {"tokens": [-1]}, 400),
    ],
)
async def test_replies_are_of_the_document_s_form(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int
) -> None:
    document = await document_of(http)
    reply = await http.post(path, json=body)
    assert reply.status_code == status, reply.text
    check_reply(document, "post", path, reply)


async def test_stored_responses_are_of_the_document_s_form(http: httpx.AsyncClient) -> None:
    document = await document_of(http)
    path = "/v1/responses/{id}"
    asked = {"input": "x", "background": True, "max_output_tokens": 4}
    named = (await http.post("/v1/responses", json=asked)).json()["id"]
    url = path.replace("{id}", named)
    async with asyncio.timeout(60):
        while (await http.get(url)).json()["status"] not in ("completed", "incomplete"):
            check_reply(document, "get", path, await http.get(url))
    check_reply(document, "get", path, await http.get(url))
    check_reply(document, "post", f"{path}/cancel", await http.post(f"{url}/cancel"))
    check_reply(document, "get", path, await http.get(url, params={"starting_after": "x"}))
    check_reply(document, "delete", path, await http.delete(url))
    check_reply(document, "get", path, await http.get("/v1/responses/%20"))
    # Another method is refused on every route.
    for each in document["paths"]:
        reply = await http.put(each.replace("{id}", named).replace("{name}", MODEL))
        assert reply.status_code == 405
        assert is_valid(document, document["components"]["schemas"]["Error"], reply.json())
