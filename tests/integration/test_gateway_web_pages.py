"""What a browser could send here on behalf of a page, and what programs may always send.

`tests/browser` has the same with a real browser.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.gateway_stack import JSON, Stack

PAGE = "https://page.example"
BODY = b'{"prompt": "x"}'
# What the official JS SDK sends beyond what every page may.
SDK_HEADERS = (
    "authorization,content-type,idempotency-key,openai-organization,openai-project,x-request-id,"
    "x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)

OURS = ("localhost", "localhost:8000", "LocalHost.:80", "127.0.0.1:9", "[::1]:8000", "10.0.0.7")
EVIL = (
    "evil.example",
    "evil.example:8000",
    "1.evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "127.0.0.1:80@evil.example",
    "[::1].evil.example",
)


def preflight(origin: str) -> dict[str, str]:
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": SDK_HEADERS,
    }
    return {"origin": origin, **asked}


async def refused(reply: httpx.Response, status: int, code: str, *words: str) -> None:
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code)
    assert all(word in error["message"] for word in words), error
    assert reply.headers["x-should-retry"] == "false"
    assert reply.headers["x-request-id"]
    assert "access-control-allow-origin" not in reply.headers


@pytest.fixture
def spoken(stack: Stack) -> list[Any]:
    """Requests that reached the scheduler: what made the model speak."""
    stack.says("x")
    return stack.scheduler.submits


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "text/plain; charset=application/json"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=application/json"},
    ],
    ids=str,
)
async def test_a_body_must_say_that_it_is_json(
    spoken: list[Any], http: httpx.AsyncClient, given: dict[str, str]
) -> None:
    """Every other type a page may send without asking, and a Blob has none."""
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = await http.post(path, content=BODY, headers=given)
        await refused(reply, 415, "unsupported_media_type", "application/json")

    async def chunks() -> AsyncIterator[bytes]:
        yield BODY

    reply = await http.post("/v1/completions", content=chunks(), headers=given)
    await refused(reply, 415, "unsupported_media_type")
    assert spoken == []


@pytest.mark.parametrize("given", ["application/json; charset=utf-8", "Application/JSON"])
async def test_json_may_be_spelt_as_people_do(
    spoken: list[Any], http: httpx.AsyncClient, given: str
) -> None:
    reply = await http.post("/v1/completions", content=BODY, headers={"content-type": given})
    assert (reply.status_code, len(spoken)) == (200, 1)


async def test_a_cancel_needs_no_body(stack: Stack, http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/responses/resp_nobody/cancel")).status_code == 404


@pytest.mark.parametrize("host", EVIL)
async def test_a_name_that_was_led_here_gets_no_answer(
    spoken: list[Any], http: httpx.AsyncClient, host: str
) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/responses/resp_x"),
        ("GET", "/ready"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("OPTIONS", "/v1/completions"),
    ):
        reply = await http.request(method, path, headers={"host": host})
        await refused(reply, 403, "host_not_allowed", "--allowed-hosts", host)
    # As a rebound page: to the browser this is its own origin.
    given = JSON | {"host": host, "origin": f"http://{host}"}
    reply = await http.post("/v1/completions", content=BODY, headers=given)
    await refused(reply, 403, "host_not_allowed")
    assert spoken == []


@pytest.mark.parametrize("host", OURS)
async def test_a_program_on_this_machine_is_served(
    spoken: list[Any], http: httpx.AsyncClient, host: str
) -> None:
    reply = await http.post("/v1/completions", content=BODY, headers=JSON | {"host": host})
    assert (reply.status_code, len(spoken)) == (200, 1)
    same = JSON | {"host": host, "origin": f"http://{host}"}
    assert (await http.post("/v1/completions", content=BODY, headers=same)).status_code == 200


@pytest.mark.parametrize("origin", [PAGE, "null", "http://localhost:1", "file://", "http://"])
async def test_other_sites_pages_are_refused(
    spoken: list[Any], http: httpx.AsyncClient, origin: str
) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/ready")):
        headers = JSON | {"origin": origin, "host": "localhost:8000"}
        reply = await http.request(method, path, content=BODY, headers=headers)
        await refused(reply, 403, "origin_not_allowed", "--cors-origins")
    reply = await http.options("/v1/completions", headers=preflight(origin))
    await refused(reply, 403, "origin_not_allowed")
    assert spoken == []


class TestAllowed:
    @pytest.fixture
    def stack_options(self) -> dict[str, Any]:
        return {"cors_origins": (PAGE,), "allowed_hosts": ("gateway",)}

    async def test_a_page_of_an_allowed_origin_may_do_what_the_sdk_does(
        self, spoken: list[Any], http: httpx.AsyncClient
    ) -> None:
        asked = await http.options("/v1/completions", headers=preflight(PAGE))
        assert asked.status_code == 200
        allowed = {
            each.strip() for each in asked.headers["access-control-allow-headers"].split(",")
        }
        assert set(SDK_HEADERS.split(",")) <= allowed
        assert asked.headers["access-control-allow-origin"] == PAGE
        headers = JSON | {"origin": PAGE}
        reply = await http.post("/v1/completions", content=BODY, headers=headers)
        assert (reply.status_code, len(spoken)) == (200, 1)
        exposed = reply.headers["access-control-expose-headers"]
        assert {"x-request-id", "x-should-retry", "retry-after-ms"} <= set(exposed.split(", "))

    async def test_it_can_read_its_errors(self, stack: Stack, http: httpx.AsyncClient) -> None:
        stack.gateway.service.generation_service.readiness.drain()
        for given, status in ((JSON, 503), ({"content-type": "text/plain"}, 415)):
            headers = given | {"origin": PAGE}
            reply = await http.post("/v1/completions", content=BODY, headers=headers)
            allowed = reply.headers["access-control-allow-origin"]
            assert (reply.status_code, allowed) == (status, PAGE)

    async def test_other_origins_are_still_refused(
        self, spoken: list[Any], http: httpx.AsyncClient
    ) -> None:
        other = "https://evil.example"
        reply = await http.options("/v1/completions", headers=preflight(other))
        await refused(reply, 403, "origin_not_allowed")
        reply = await http.post("/v1/completions", content=BODY, headers=JSON | {"origin": other})
        await refused(reply, 403, "origin_not_allowed")
        assert spoken == []

    @pytest.mark.parametrize(("host", "status"), [("gateway:8000", 200), ("other", 403)])
    async def test_names_of_a_proxy(self, http: httpx.AsyncClient, host: str, status: int) -> None:
        assert (await http.get("/health", headers={"host": host})).status_code == status


class TestBoundElsewhere:
    """As in a container whose port is published: the gateway knows none of its names."""

    @pytest.fixture
    def stack_options(self) -> dict[str, Any]:
        return {"http_host": "0.0.0.0"}

    @pytest.mark.parametrize("host", ["localhost:8000", "gateway:8000", "chat.example"])
    async def test_any_name_will_do(
        self, spoken: list[Any], http: httpx.AsyncClient, host: str
    ) -> None:
        reply = await http.post("/v1/completions", content=BODY, headers=JSON | {"host": host})
        assert (reply.status_code, len(spoken)) == (200, 1)

    async def test_other_sites_pages_are_refused_all_the_same(
        self, spoken: list[Any], http: httpx.AsyncClient
    ) -> None:
        reply = await http.post("/v1/completions", content=BODY, headers=JSON | {"origin": PAGE})
        await refused(reply, 403, "origin_not_allowed")
        assert spoken == []


class TestNamedElsewhere:
    @pytest.fixture
    def stack_options(self) -> dict[str, Any]:
        return {"http_host": "0.0.0.0", "allowed_hosts": ("Chat.example",)}

    @pytest.mark.parametrize(
        ("host", "status"),
        [("chat.example", 200), ("localhost:8000", 200), ("172.17.0.2:8000", 200), ("evil.x", 403)],
    )
    async def test_only_the_names_given(
        self, http: httpx.AsyncClient, host: str, status: int
    ) -> None:
        assert (await http.get("/health", headers={"host": host})).status_code == status


class TestAnything:
    @pytest.fixture
    def stack_options(self) -> dict[str, Any]:
        return {"allowed_hosts": ("*",), "cors_origins": ("*",)}

    async def test_a_star_allows_all(self, spoken: list[Any], http: httpx.AsyncClient) -> None:
        headers = JSON | {"origin": "null", "host": "any.example"}
        reply = await http.post("/v1/completions", content=BODY, headers=headers)
        assert (reply.status_code, len(spoken)) == (200, 1)
        assert reply.headers["access-control-allow-origin"] == "*"
