"""/v1/watch of a real stack: it lives, it is for operators, and a closed tab leaves nothing."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from gateway.cell.operators import STREAMS_MAX
from tests.support.answers import until
from tests.support.whole_stack import GOLDEN, WholeStack

WAIT_S = 60.0


@pytest.fixture
async def http(whole_stack: WholeStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=whole_stack.door.http, timeout=WAIT_S) as client:
        yield client


async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    assert reply.status_code == 200, await reply.aread()
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


async def test_a_request_is_seen_while_it_runs(
    http: httpx.AsyncClient, whole_stack: WholeStack
) -> None:
    asked = GOLDEN | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    async with http.stream("GET", "/v1/watch?interval_ms=100") as watched:
        told = events(watched)
        first = await anext(told)
        assert first["is_snapshot"]
        assert (first["configured"]["policy"], len(first["workers"])) == ("fair", 1)
        # Who comes and goes between two looks is not seen.
        with whole_stack.held():
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                id = answer.headers["x-request-id"]
                assert id
                async for core in told:
                    running = [each for each in core.get("sequences", ()) if "identity" in each]
                    if running:
                        break
                assert running[0]["identity"]["tokens_max"] > 900
        sequence_id = running[0]["sequence_id"]
        async for core in told:
            if sequence_id in core.get("sequence_ids_gone", ()):
                break


async def test_a_burst_is_played_with_step_times_of_the_worker(
    http: httpx.AsyncClient, whole_stack: WholeStack
) -> None:
    """What there was is in the fit; under `static` the same lengths take more iterations."""
    await http.post("/v1/completions", json=GOLDEN)
    (worker,) = whole_stack.state().workers
    lengths = [8 + 61 * i % 120 for i in range(48)]
    requests = [{"prompt_tokens": 5, "output_tokens": length} for length in lengths]
    steps = {}
    for policy in ("", "static"):
        body = {"worker_id": worker.worker_id, "policy": policy, "requests": requests}
        reply = await http.post("/v1/rehearsals", json=body)
        assert reply.status_code == 200, reply.text
        told = reply.json()
        assert told["configured"]["policy"] == (policy or "fair")
        steps[policy] = told["steps"]["steps"]
        assert sum(each["tokens"] for each in steps[policy]) == sum(lengths)
        assert max(each["step_us"] for each in steps[policy]) > 1
    assert len(steps["static"]) > 1.2 * len(steps[""])
    wrong = {"worker_id": "nobody", "requests": requests}
    assert (await http.post("/v1/rehearsals", json=wrong)).status_code == 404
    wrong = {"worker_id": worker.worker_id, "policy": "fastest", "requests": requests}
    reply = await http.post("/v1/rehearsals", json=wrong)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "policy")


async def test_a_closed_tab_leaves_nothing(http: httpx.AsyncClient) -> None:
    """As many as may watch, and then as many again: of the first, every place is free."""
    for _ in range(2):
        async with AsyncExitStack() as tabs:
            # An iterator that nobody holds closes its answer.
            read: list[AsyncIterator[dict[str, Any]]] = []

            async def is_let_in(
                tabs: AsyncExitStack = tabs, read: list[AsyncIterator[dict[str, Any]]] = read
            ) -> bool:
                """The one before is being given back."""
                reply = await tabs.enter_async_context(http.stream("GET", "/v1/watch"))
                if reply.status_code == 200:
                    read.append(events(reply))
                    await anext(read[-1])
                return reply.status_code == 200

            for _ in range(STREAMS_MAX):
                await until(is_let_in, "a place")
            refused = await http.get("/v1/watch")
            assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "true")


async def test_what_is_wrong_is_said(http: httpx.AsyncClient) -> None:
    for interval in ("x", "60001", "-1"):
        reply = await http.get(f"/v1/watch?interval_ms={interval}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "interval_ms")
    assert (await http.get("/v1/archive")).status_code == 404, "none is kept"

    async def has_a_place() -> bool:
        """Those who watched before may still be leaving."""
        return (await http.head("/v1/watch")).status_code == 200

    await until(has_a_place, "a head of it")
    # A page of another site, whose browser asks without being able to read the answer.
    reply = await http.get("/v1/watch", headers={"sec-fetch-site": "cross-site"})
    assert reply.status_code == 403
