"""Lines of a batch at their gateway: how they begin beside who is live."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway.openai.batches import driver
from gateway.openai.batches.operations import WINDOW_S
from gateway.openai.batches.window import Window
from gateway.requests.generation_service import GenerationService
from gateway.requests.stream import Generation
from gateway.tenants import PRIORITY_MAX
from kaiten.v1.ledger_pb2 import SubmitRecord
from ledger.batches.batches import BatchName, StoredBatch
from ledger.types import InboxEntry
from service_kit.errors import Unavailable
from tests.support.gateway_stack import WAIT_S, Stack, running_stack, until

URL = "/v1/completions"
LINES = 40


class Openings:
    """How many requests are being opened, and were at most."""

    def __init__(self) -> None:
        self.count = self.most = 0

    def counting(self, generate: Any) -> Any:
        async def counted(*args: Any) -> Generation:
            self.count += 1
            self.most = max(self.most, self.count)
            try:
                generation: Generation = await generate(*args)
                return generation
            finally:
                self.count -= 1

        return counted


async def begun(http: httpx.AsyncClient, lines: list[str]) -> str:
    """Its path."""
    form = {"file": ("lines.jsonl", "\n".join(lines).encode("utf-8-sig"))}
    file = (await http.post("/v1/files", files=form, data={"purpose": "batch"})).json()
    asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
    return f"/v1/batches/{(await http.post('/v1/batches', json=asked)).json()['id']}"


def line(number: int, **changes: Any) -> str:
    body = {"prompt": "abc", "max_tokens": 3, **changes}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": URL, "body": body})


@pytest.fixture
def stack_options() -> dict[str, Any]:
    return {"request_timeout_s": 600.0}


async def test_one_that_is_cancelled_while_it_is_validated_tells_all_of_its_lines(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = driver.BatchRun._validate

    async def cancelled(run: driver.BatchRun, batch: StoredBatch) -> None:
        state = (await http.post(f"/v1/batches/{batch.name.id}/cancel")).json()
        assert state["status"] == "cancelling"
        await validate(run, batch)

    monkeypatch.setattr(driver.BatchRun, "_validate", cancelled)
    path, state = await begun(http, [line(1), "{", line(3)]), dict[str, Any]()
    while state.get("status") != "cancelled":
        state = (await http.get(path)).json()
    assert state["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
    assert state["output_file_id"] is None
    told = (await http.get(f"/v1/files/{state['error_file_id']}/content")).text.splitlines()
    assert [json.loads(each)["custom_id"] for each in told] == ["1", None, "3"]
    assert not stack.scheduler.submits


async def test_what_was_fetched_and_deleted_before_the_batch_is_over_stays_deleted(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on with it writes its output down again."""
    batches, state = stack.gateway.service.link.ledger.batches, dict[str, Any]()
    move = batches.move

    async def deleted(name: BatchName, to: str, **given: Any) -> str:
        if to == "completed":
            monkeypatch.setattr(batches, "move", move)
            told = (await http.get(f"/v1/batches/{name.id}")).json()
            assert told["status"] == "finalizing"
            await http.delete(f"/v1/files/{told['output_file_id']}")
            raise Unavailable("the driver dies here")
        return await move(name, to, **given)

    monkeypatch.setattr(batches, "move", deleted)
    path = await begun(http, [line(1)])
    while state.get("status") != "completed":
        state = (await http.get(path)).json()
    assert (await http.get(f"/v1/files/{state['output_file_id']}")).status_code == 404
    query = {"purpose": "batch_output"}
    assert (await http.get("/v1/files", params=query)).json()["data"] == []


@pytest.mark.parametrize("opening_s", [60.0, 0.0])
async def test_lines_begin_one_after_the_other_unless_the_ledger_is_slow(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, opening_s: float
) -> None:
    monkeypatch.setattr(driver, "OPENING_S", opening_s)
    openings, state = Openings(), dict[str, Any]()
    monkeypatch.setattr(
        GenerationService, "generate", openings.counting(GenerationService.generate)
    )
    # Two that are refused before they are accepted, and one that is none.
    lines = [line(1, priority=-5), line(2, stop="x" * 1000), "{", line(3, stream=True)]
    path = await begun(http, lines + [line(number) for number in range(10, 10 + LINES)])
    while state.get("status") != "completed":
        state = (await http.get(path)).json()
    assert state["request_counts"] == {"total": LINES + 4, "completed": LINES + 1, "failed": 3}
    assert openings.most == 1 or not opening_s
    assert {each.priority for each in stack.scheduler.submits} == {-PRIORITY_MAX}
    # What is left of the batch's day, not what the gateway gives who is live.
    day_ms = 1000 * (WINDOW_S + driver.PARTING_S)
    assert all(day_ms / 2 < each.timeout_ms <= day_ms for each in stack.scheduler.submits)
    await until(lambda: not openings.count)


def entry_of(tenant: str) -> str:
    digest = hashlib.sha256(tenant.encode()).hexdigest()
    return f'[tenants.{tenant}]\nkeys = ["sha256:{digest}"]\n'


@asynccontextmanager
async def two_tenants(
    tmp_path: Path, redis_url: str, cell: str
) -> AsyncIterator[tuple[Stack, httpx.AsyncClient, httpx.AsyncClient]]:
    """Clients of alice, who may have eight live requests, and of bob."""
    file = tmp_path / "keys.toml"
    file.write_text(f"{entry_of('bob')}{entry_of('alice')}requests_max = 8\n")
    async with running_stack(tmp_path / "model", redis_url, cell, api_keys_file=file) as stack:
        alices, bobs = (
            httpx.AsyncClient(
                base_url=stack.gateway.http_url,
                headers={"authorization": f"Bearer {name}"},
                timeout=WAIT_S,
            )
            for name in ("alice", "bob")
        )
        async with alices, bobs:
            yield stack, alices, bobs


async def completed(http: httpx.AsyncClient, count: int) -> None:
    """A batch of so many lines is begun and answered."""
    path, state = await begun(http, [line(number) for number in range(count)]), dict[str, Any]()
    async with asyncio.timeout(WAIT_S):
        while state.get("status") != "completed":
            state = (await http.get(path)).json()
    assert state["request_counts"] == {"total": count, "completed": count, "failed": 0}


async def test_who_is_refused_holds_up_no_other_and_goes_on_by_what_it_may_now(
    tmp_path: Path, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of alice, more than are under way at once, are refused until her entry says more: by
    then all her keys are gone.
    """
    monkeypatch.setattr(Window, "size", 4)
    async with two_tenants(tmp_path, redis_url, cell) as (stack, alices, bobs):
        async with Redis.from_url(redis_url) as client:
            # As if so many of hers were live.
            await client.hset(stack.ledger.keys.load, "choices:alice", 500)
        await begun(alices, [line(number) for number in range(LINES)])
        await completed(bobs, 3)
        assert {each.tenant for each in stack.scheduler.submits} == {"bob"}
        (tmp_path / "keys.toml").write_text(
            f"{entry_of('bob')}[tenants.alice]\nrequests_max = 1000\n"
        )
        await until(lambda: len(stack.scheduler.submits) == 3 + LINES, "all lines are asked")
        # Each of hers once.
        assert len({each.id for each in stack.scheduler.submits}) == 3 + LINES


async def test_lines_of_a_tenant_that_wait_hold_up_no_other(
    tmp_path: Path, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the ledger, and wait there for their tenant's bound of running tokens."""
    monkeypatch.setattr(Window, "size", 4)
    async with two_tenants(tmp_path, redis_url, cell) as (stack, alices, bobs):
        scheduler = stack.scheduler
        take, waiting = scheduler._take, list[InboxEntry]()

        def taken(entry: InboxEntry) -> None:
            is_hers = isinstance(entry.record, SubmitRecord) and entry.record.tenant == "alice"
            waiting.append(entry) if is_hers else take(entry)

        monkeypatch.setattr(scheduler, "_take", taken)
        path = await begun(alices, [line(number) for number in range(LINES)])
        await until(lambda: len(waiting) == 4, "a window of hers")
        await completed(bobs, 10)
        assert len(waiting) == 4
        monkeypatch.setattr(scheduler, "_take", take)
        for entry in waiting:
            take(entry)
        async with asyncio.timeout(WAIT_S):
            while (await alices.get(path)).json()["status"] != "completed":
                pass


async def test_a_batch_whose_state_has_left_is_let_go(
    stack: Stack, http: httpx.AsyncClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts among the live ones of its tenant no more."""
    monkeypatch.setattr(driver, "LOOK_S", 0.01)
    stack.scheduler.is_open.clear()
    path = await begun(http, [line(1)])
    batches = stack.ledger.batches
    async with Redis.from_url(redis_url) as client, asyncio.timeout(WAIT_S):
        (name,) = await batches.live()
        while (await batches.find(name)).status != "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await client.delete(stack.ledger.keys.batch(*name))
        while await batches.live():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await http.get(path)).status_code == 404
    stack.scheduler.is_open.set()


async def test_of_two_contents_under_one_key_at_once_one_is_a_batch(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever asked for the other is told so, not of a batch that will never have their lines.

    Neither found one before.
    """
    batches = stack.gateway.service.link.ledger.batches
    new = batches.new
    form: Any = {"files": {"file": ("f", b"{}")}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **form)).json()["id"]

    async def ask(of: str) -> httpx.Response:
        asked = {"input_file_id": file, "endpoint": URL, "completion_window": "24h"}
        body, named = {**asked, "metadata": {"of": of}}, {"idempotency-key": "one"}
        return await http.post("/v1/batches", json=body, headers=named)

    async def second(*args: Any, **rest: Any) -> None:
        monkeypatch.setattr(batches, "new", new)
        assert (await ask("another")).status_code == 200
        await new(*args, **rest)

    monkeypatch.setattr(batches, "new", second)
    late = await ask("me")
    assert (late.status_code, late.json()["error"]["code"]) == (409, "already_exists")
