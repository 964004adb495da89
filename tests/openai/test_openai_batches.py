"""/v1/batches by the OpenAI package."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI
from redis import Redis

from ledger.keys import Keys
from tests.support.whole_stack import MODEL, WAIT_S, Door, WholeStack, wait_until

ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 6},
    "/v1/completions": {"prompt": "The chef", "max_tokens": 6},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 6},
}
COMPLETION: Any = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")
LONG: Any = {"max_tokens": 100, "ignore_eos": True}
# Of what is long nothing is answered while steps behind it are held.
HELD_FROM = 20


def line(custom_id: str, endpoint: str = COMPLETION, /, **changes: Any) -> str:
    body = {"model": MODEL, "temperature": 0, **ENDPOINTS[endpoint], **changes}
    return enveloped(custom_id, endpoint, body)


def enveloped(custom_id: str, endpoint: str, body: Any, **more: Any) -> str:
    named = {"custom_id": custom_id, "method": "POST", "url": endpoint}
    return json.dumps(named | {"body": body} | more)


def begun(client: OpenAI, lines: list[str], endpoint: Any = COMPLETION, **more: Any) -> Any:
    content = "\n".join(lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: OpenAI, batch: Any) -> Any:
    def is_over() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch.id)
        return batch.status in OVER

    wait_until(is_over, "the batch is over")
    return batch


def counts(client: OpenAI, batch: Any) -> dict[str, int]:
    found = client.batches.retrieve(batch.id).request_counts
    assert found is not None
    return {"total": found.total, "completed": found.completed, "failed": found.failed}


def answers(client: OpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_line_is_answered_as_its_endpoint_does(client: OpenAI, endpoint: str) -> None:
    batch = begun(client, [line("a", endpoint), line("b", endpoint)], endpoint, metadata={"k": "v"})
    assert (batch.endpoint, batch.metadata) == (endpoint, {"k": "v"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    assert (batch.model, batch.usage) == (None, None)
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}
    found = answers(client, batch.output_file_id)
    assert [each["custom_id"] for each in found] == ["a", "b"]
    direct = client.post(
        endpoint.removeprefix("/v1"),
        cast_to=dict[str, Any],
        body={"model": MODEL, "temperature": 0, **ENDPOINTS[endpoint]},
    )
    # The sum of its lines, in the words of responses.
    used = [each["response"]["body"]["usage"] for each in found]
    sent, said = (sum(map(count_of, used)) for count_of in (_sent, _said))
    assert batch.model == MODEL
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (sent, said)
    assert (batch.usage.total_tokens, said) == (sent + said, 12)
    for each in found:
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        body = each["response"]["body"]
        assert body["object"] == direct["object"]
        words = "output" if "output" in body else "choices"
        assert _texts(body[words]) == _texts(direct[words])
    assert batch.error_file_id is None
    assert batch in client.batches.list()


def _sent(usage: dict[str, Any]) -> int:
    return int(usage.get("prompt_tokens") or usage["input_tokens"])


def _said(usage: dict[str, Any]) -> int:
    return int(usage.get("completion_tokens") or usage["output_tokens"])


def _texts(told: Any) -> list[str]:
    """Whatever is called text or content, wherever."""
    if isinstance(told, list):
        return [text for each in told for text in _texts(each)]
    if isinstance(told, dict):
        own = [str(told[key]) for key in ("text", "content") if isinstance(told.get(key), str)]
        return own + [text for each in told.values() for text in _texts(each)]
    return []


def test_what_is_wrong_with_a_line_is_its_own(client: OpenAI) -> None:
    lines = [
        line("fine"),
        "{",
        line("long", stop="x" * 1000),
        line("fine"),
        line("streamed", stream=True),
        "",
        line("elsewhere", "/v1/responses"),
        line(""),
        line("deep", prompt="soup " * 3000),
        line("large", user="u" * (8 << 20)),
        # What dumps of SDKs have besides says nothing; another word may be a misspelt one.
        enveloped("dump", COMPLETION, ENDPOINTS[COMPLETION], response=None, error=None),
        enveloped("odd", COMPLETION, ENDPOINTS[COMPLETION], error=None, priority=3),
        line("several", prompt=["a", "b"]),
        line("options", stream_options={"include_usage": True}),
        f'{{"custom_id": "nested", "body": {"[" * 50_000}{"]" * 50_000}}}',
        line("last"),
    ]
    batch = ended(client, begun(client, lines))
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 15, "completed": 3, "failed": 12}
    found = answers(client, batch.output_file_id)
    assert [each["custom_id"] for each in found] == ["fine", "dump", "last"]
    failed = answers(client, batch.error_file_id)
    broken, long, twice, streamed, elsewhere, nameless, deep, large, odd, *rest = failed
    several, options, nested = rest
    assert broken["error"]["message"].startswith("line 2: is no request: ")
    assert long["response"]["status_code"] == 400
    assert long["response"]["body"]["error"]["param"] == "stop"
    assert "line 4: custom_id: 'fine' is that of an earlier line" in twice["error"]["message"]
    assert streamed["response"]["body"]["error"]["param"] == "stream"
    assert "line 6: url: must be the batch's endpoint" in elsewhere["error"]["message"]
    # What can be read of it says whose it is.
    assert [each["custom_id"] for each in (twice, elsewhere, odd)] == ["fine", "elsewhere", "odd"]
    assert "line 7: custom_id: must have 1 to 512" in nameless["error"]["message"]
    assert (deep["custom_id"], deep["response"]["status_code"]) == ("deep", 400)
    assert deep["response"]["body"]["error"]["param"] == "prompt"
    assert large["error"]["message"] == "line 9: must have at most 8388608 bytes"
    assert odd["error"]["message"] == "line 11: priority: is not a known field"
    assert several["response"]["body"]["error"]["param"] == "prompt"
    assert options["response"]["body"]["error"]["param"] == "stream_options"
    assert "line 14: is no request: maximum recursion depth" in nested["error"]["message"]


def test_what_is_only_for_live_requests_is_named(client: OpenAI) -> None:
    asked: Any = {"background": True, "conversation": f"conv_{'0' * 24}"}
    url = "/v1/responses"
    batch = begun(client, [line(field, url, **{field: asked[field]}) for field in asked], url)
    failed = answers(client, ended(client, batch).error_file_id)
    told = [each["response"]["body"]["error"] for each in failed]
    assert [each["param"] for each in told] == list(asked)
    assert {each["message"].partition(": ")[2] for each in told} == {"is not for lines of a batch"}


def test_a_batch_is_cancelled_and_what_was_answered_stays(
    client: OpenAI, whole_stack: WholeStack
) -> None:
    lines = [line("short"), *(line(str(n), **LONG) for n in range(200))]
    after: Any = {"anchor": "created_at", "seconds": 5000}
    with whole_stack.held(HELD_FROM):
        batch = begun(client, lines, output_expires_after=after)
        wait_until(lambda: counts(client, batch)["completed"], "a line is answered")
        assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 5000
    assert batch.status == "cancelled"
    done, rest = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert 1 <= batch.request_counts.completed == len(done) < 201
    assert batch.request_counts.failed == len(rest)
    assert {each["error"]["code"] for each in rest} == {"batch_cancelled"}
    told = sorted(each["custom_id"] for each in done + rest)
    assert told == sorted(["short", *map(str, range(200))])
    # What is over stays so.
    assert client.batches.cancel(batch.id) == batch


def test_a_response_that_did_not_come_to_its_end_is_no_answer(
    client: OpenAI, whole_stack: WholeStack
) -> None:
    url = "/v1/responses"

    def is_cancelled() -> bool:
        try:
            return client.responses.cancel(f"resp_{batch.id}-1").status == "cancelled"
        except NotFoundError:
            return False

    with whole_stack.held():
        batch = begun(client, [line("long", url, max_output_tokens=900, ignore_eos=True)], url)
        wait_until(is_cancelled, "it is accepted, and cancelled")
    batch = ended(client, batch)
    assert batch.request_counts.to_dict() == {"total": 1, "completed": 0, "failed": 1}
    (told,) = answers(client, batch.error_file_id)
    assert (told["custom_id"], told["response"]["body"]["status"]) == ("long", "cancelled")


def test_a_batch_whose_day_is_over_ends_with_what_it_has(
    client: OpenAI, whole_stack: WholeStack
) -> None:
    lines = [line("short"), *(line(str(n), **LONG) for n in range(100))]
    with whole_stack.held(HELD_FROM), Redis.from_url(whole_stack.store.url) as store:
        batch = begun(client, lines)
        wait_until(lambda: counts(client, batch)["completed"], "a line is answered")
        store.hset(Keys("0").batch("default", batch.id), "expires_at", 1)
        batch = ended(client, batch)
    assert batch.status == "expired"
    done, late = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert {each["error"]["code"] for each in late} == {"batch_expired"}
    told = sorted(each["custom_id"] for each in done + late)
    assert told == sorted(["short", *map(str, range(100))])
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(done), len(late))


def test_a_batch_whose_input_is_deleted_ends_with_what_it_has(
    client: OpenAI, whole_stack: WholeStack
) -> None:
    # Longer than a piece of a file, which is read when its turn comes.
    wide: Any = {"user": "u" * 50_000}
    lines = [line("0", **wide), *(line(str(n), **LONG, **wide) for n in range(1, 200))]
    with whole_stack.held(HELD_FROM):
        batch = begun(client, lines)
        wait_until(lambda: counts(client, batch)["completed"], "a line is answered")
        client.files.delete(batch.input_file_id)
    batch = ended(client, batch)
    assert batch.status == "completed"
    found = batch.request_counts
    assert (found.total, found.completed + found.failed) == (200, 200)
    assert found.completed
    assert found.failed
    for answer in answers(client, batch.error_file_id):
        assert answer["error"]["code"] == "input_gone"
        assert batch.input_file_id in answer["error"]["message"]


def test_batches_are_counted(client: OpenAI, whole_stack: WholeStack) -> None:
    def counts() -> dict[str, float]:
        """Of all gateways: any of them may drive it."""
        found: dict[str, float] = {}
        for door in whole_stack.doors:
            page = httpx.get(f"{door.http}/metrics", timeout=WAIT_S).text
            for name, value in re.findall(r"^kaiten_gateway_(batch\S+) (\S+)$", page, re.MULTILINE):
                found[name] = found.get(name, 0) + float(value)
        return found

    def nobody_drives() -> bool:
        """Who drives one counts its end after everybody can see it."""
        return counts()["batches_driven"] == 0

    # Those of other tests count, too.
    wait_until(lambda: all(each.status in OVER for each in client.batches.list()), "none is live")
    wait_until(nobody_drives, "nobody drives one of theirs")
    before = counts()
    assert ended(client, begun(client, [line("a"), "no json"])).status == "completed"
    wait_until(nobody_drives, "nobody drives it any more")
    after = counts()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown.pop("batches_driven") == 0
    assert {name: by for name, by in grown.items() if by} == {
        'batch_lines_total{outcome="answered"}': 1,
        'batch_lines_total{outcome="failed"}': 1,
        'batches_ended_total{status="completed"}': 1,
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\n\n \n", "has no line"),
        (b"{}\n" * 50_001, "at most 50000 lines, empty ones counted; it has more"),
    ],
)
def test_a_file_that_is_none_fails_its_batch(client: OpenAI, content: bytes, problem: str) -> None:
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=COMPLETION, completion_window="24h"
    )
    batch = ended(client, batch)
    assert batch.status == "failed"
    assert problem in batch.errors.data[0].message
    client.files.delete(file.id)


def test_the_same_key_is_the_same_batch(client: OpenAI) -> None:
    """For who does not know whether it was heard."""
    key: Any = {"Idempotency-Key": "once"}
    batch = begun(client, [line("a")], extra_headers=key)
    asked: Any = {
        "input_file_id": batch.input_file_id, "endpoint": COMPLETION, "completion_window": "24h",
    }  # fmt: skip
    assert client.batches.create(**asked, extra_headers=key).id == batch.id
    assert client.batches.create(**asked).id != batch.id
    with pytest.raises(ConflictError, match="already exists with another content"):
        client.batches.create(**asked, metadata={"other": "one"}, extra_headers=key)
    with pytest.raises(BadRequestError, match="idempotency-key: must match"):
        client.batches.create(**asked, extra_headers={"Idempotency-Key": "a b"})
    # Over, it is still the same.
    assert ended(client, batch).status == "completed"
    assert client.batches.create(**asked, extra_headers=key).status == "completed"


def test_an_answer_without_room_is_told_by_its_line(
    client: OpenAI, another_door: Callable[..., Door], whole_stack: WholeStack, tmp_path: Path
) -> None:
    """To its tenant, and nothing of it to another."""
    keys, key = tmp_path / "keys.toml", "roomless"
    digest = hashlib.sha256(key.encode()).hexdigest()
    keys.write_text(f'[tenants.{key}]\nkeys = ["sha256:{digest}"]\n')
    door = another_door(api_keys_file=keys)
    with (
        OpenAI(base_url=door.openai, api_key=key, max_retries=0, timeout=60) as roomless,
        Redis.from_url(whole_stack.store.url) as store,
    ):
        # As if others of its batches had as many answers as one tenant's may have.
        full = Keys("0").answers(key)
        store.hset(full, "another", 256 << 20)
        batch = ended(roomless, begun(roomless, [line("first"), "{"]))
        assert (batch.status, batch.output_file_id) == ("completed", None)
        told, broken = answers(roomless, batch.error_file_id)
        assert (told["custom_id"], told["error"]["code"]) == ("first", "no_room")
        assert re.match(r"line 1: its answer of \d+ bytes had no room: ", told["error"]["message"])
        assert "tenant roomless (files_mb: 268435456)" in told["error"]["message"]
        assert broken["error"]["code"] == "invalid_line"
        for ask in (client.batches.retrieve, client.batches.cancel):
            with pytest.raises(NotFoundError):
                ask(batch.id)
        for id in (batch.input_file_id, batch.error_file_id):
            with pytest.raises(NotFoundError):
                client.files.content(id)
        assert batch.id not in {each.id for each in client.batches.list()}
        store.delete(full)
        batch = ended(roomless, begun(roomless, [line("first")]))
        assert batch.request_counts.completed == 1
        assert not store.exists(full)


def test_what_is_no_batch_is_refused(client: OpenAI) -> None:
    file = client.files.create(file=("lines.jsonl", b"{}"), purpose="batch")
    good: Any = {
        "input_file_id": file.id, "endpoint": COMPLETION, "completion_window": "24h",
    }  # fmt: skip
    for wrong, rule in (
        ({"input_file_id": "file-" + "0" * 24}, r"which is not here: .* kept for 48 h \(--files-h"),
        ({"input_file_id": "nothing"}, "must match file-"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "24h"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 0}}, "seconds: input should"),
        ({"metadata": {"a": "b" * 600}}, "512"),
    ):
        with pytest.raises(BadRequestError, match=rule):
            client.batches.create(**{**good, **wrong})
    for ask in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(NotFoundError, match=r"is kept no more; .* \(--files-hours\) after"):
            ask("batch_" + "0" * 24)
        with pytest.raises(BadRequestError, match="must match batch_"):
            ask("nothing")
