"""/v1/files by the OpenAI package, and by those who send what is no file."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI, RateLimitError
from redis.asyncio import Redis

from ledger.batches.files import CHUNK_BYTES
from tests.support.answers import until
from tests.support.whole_stack import WAIT_S, Door, WholeStack

BOUNDARY = "b0undary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def upload(client: OpenAI, content: bytes, name: str = "lines.jsonl") -> Any:
    return client.files.create(file=(name, content), purpose="batch")


def test_a_file_comes_back_as_it_was(client: OpenAI) -> None:
    content = bytes(range(256)) * 12_000 + b"the end"
    file = upload(client, content, "zwölf.jsonl")
    assert (file.bytes, file.purpose, file.filename) == (len(content), "batch", "zwölf.jsonl")
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 48 * 3600
    assert client.files.content(file.id).read() == content
    assert client.files.retrieve(file.id) == file
    assert file in client.files.list()
    assert client.files.delete(file.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(NotFoundError, match=file.id):
            ask(file.id)


def test_files_are_listed_the_newest_first_and_page_by_page(client: OpenAI) -> None:
    made = [upload(client, b"{}\n") for _ in range(3)]
    ids = [file.id for file in client.files.list(limit=2, purpose="batch")]
    assert set(ids) >= {file.id for file in made}
    assert ids == [file.id for file in client.files.list(purpose="batch")]
    assert ids[::-1] == [
        file.id for file in client.files.list(purpose="batch", order="asc", limit=1)
    ]
    for file in made:
        client.files.delete(file.id)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_are_turned_while_what_was_on_them_is_deleted(client: OpenAI, order: Any) -> None:
    made = {upload(client, b"{}\n").id for _ in range(5)}
    found = []
    for file in client.files.list(limit=2, purpose="batch", order=order):
        found.append(file.id)
        if file.id in made:
            client.files.delete(file.id)
    assert made <= set(found)
    assert len(found) == len(set(found))
    assert not made & {file.id for file in client.files.list()}


def test_a_file_leaves_when_it_says_or_all_do(client: OpenAI) -> None:
    content = ("lines.jsonl", b"{}")
    for seconds, kept_s in ((3600, 3600), (30 * 24 * 3600, 48 * 3600)):
        after: Any = {"anchor": "created_at", "seconds": seconds}
        file = client.files.create(file=content, purpose="batch", expires_after=after)
        assert file.expires_at == file.created_at + kept_s
        client.files.delete(file.id)
    for wrong, name in (
        ({"anchor": "created_at", "seconds": 0}, "seconds"),
        ({"anchor": "used_at", "seconds": 1}, "anchor"),
    ):
        after = wrong
        with pytest.raises(BadRequestError, match=rf"expires_after\[{name}\]: must"):
            client.files.create(file=content, purpose="batch", expires_after=after)


def keys_of(folder: Path, *names: str) -> Path:
    """A key file of tenants whose keys are their names. What others keep is none of theirs."""
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    file = folder / "keys.toml"
    file.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = ["sha256:{digest}"]\n'
            for name, digest in zip(names, digests, strict=True)
        )
    )
    return file


def test_what_a_tenant_may_keep_is_bounded(
    another_door: Callable[..., Door], tmp_path: Path
) -> None:
    names = ("alice", "bob")
    keys = keys_of(tmp_path, *names)
    door = another_door(api_keys_file=keys, files_mb=1)
    alice, bob = (
        OpenAI(base_url=door.openai, api_key=name, max_retries=0, timeout=60) for name in names
    )
    with alice, bob:
        half = upload(alice, b"a" * (600 << 10))
        with pytest.raises(
            RateLimitError, match="bytes of files, batches and conversations of tenant alice"
        ):
            upload(alice, b"a" * (600 << 10))
        assert [file.id for file in alice.files.list()] == [half.id]
        # Another tenant has room of its own, and sees nothing of it.
        upload(bob, b"b" * (600 << 10))
        with pytest.raises(NotFoundError):
            bob.files.content(half.id)
        alice.files.delete(half.id)
        upload(alice, b"a" * (600 << 10))
        with pytest.raises(Exception, match="file: must have at most 1048576 bytes") as caught:
            upload(alice, b"a" * (3 << 20))
        assert caught.value.status_code == 413  # type: ignore[attr-defined]


async def test_all_that_a_tenant_sends_at_once_is_bounded_too(
    whole_stack: WholeStack, another_door: Callable[..., Door], tmp_path: Path
) -> None:
    keys = keys_of(tmp_path, "carol")
    door, is_refused = another_door(api_keys_file=keys, files_mb=2), asyncio.Event()

    def form(size_bytes: int) -> bytes:
        return (PURPOSE + part("file", "a" * size_bytes, '; filename="a"') + END).encode()

    async def held() -> AsyncIterator[bytes]:
        whole = form(CHUNK_BYTES + 1000)
        yield whole[:-500]
        await is_refused.wait()
        yield whole[-500:]

    async with (
        Redis.from_url(whole_stack.store.url) as store,
        httpx.AsyncClient(
            base_url=door.openai, headers=FORM | {"authorization": "Bearer carol"}, timeout=60
        ) as client,
    ):
        pieces = "*:file:carol:*:0"
        before = set(await store.keys(pieces))

        async def is_coming_in() -> bool:
            return set(await store.keys(pieces)) > before

        first = asyncio.create_task(client.post("/files", content=held()))
        await until(is_coming_in, "a piece of the first one is in the store")
        second = await client.post("/files", content=form(3 * CHUNK_BYTES // 2))
        assert second.status_code == 429
        assert "are coming in" in second.json()["error"]["message"]
        is_refused.set()
        file = (await first).json()
        assert file["bytes"] == CHUNK_BYTES + 1000
        await client.delete(f"/files/{file['id']}")
        # Nothing comes in any more.
        assert (await client.post("/files", content=form(100))).status_code == 200


def part(name: str, value: str, more: str = "") -> str:
    head = f'content-disposition: form-data; name="{name}"{more}'
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n{value}\r\n"


FILE, PURPOSE = part("file", "{}", '; filename="a"'), part("purpose", "batch")
END = f"--{BOUNDARY}--\r\n"


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (FILE + END, 400, "purpose: must be 'batch'"),
        (FILE + part("purpose", "fine-tune") + END, 400, "purpose: must be 'batch'"),
        (PURPOSE + END, 400, "file: is required"),
        (PURPOSE + part("file", "", '; filename="a"') + END, 400, "file: must not be empty"),
        (PURPOSE + FILE + FILE + END, 400, "file: must be given once"),
        (PURPOSE + part("colour", "red") + FILE + END, 400, "colour: is not a known field"),
        (PURPOSE + part("purpose", "batch") + FILE + END, 400, "at most 8 fields"),
        ("".join(part(str(n), "") for n in range(9)) + END, 400, "at most 8 fields"),
        (part("purpose", "x" * 5000) + END, 400, "purpose: must have at most 4096 characters"),
        (PURPOSE + FILE, 400, "to its last boundary"),
        ("", 400, "to its last boundary"),
        ("no form at all", 400, "must be multipart/form-data"),
        (f"--{BOUNDARY}\r\n" + "a: b\r\n" * 1000, 400, "must be multipart/form-data"),
    ],
)
def test_what_is_no_file_is_refused(
    whole_stack: WholeStack, body: str, status: int, word: str
) -> None:
    url = f"{whole_stack.door.openai}/files"
    answer = httpx.post(url, content=body, headers=FORM, timeout=WAIT_S)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_a_form_is_for_files_only_and_a_file_is_a_form(whole_stack: WholeStack) -> None:
    with httpx.Client(base_url=whole_stack.door.openai, timeout=WAIT_S) as http:
        assert http.post("/responses", content=END, headers=FORM).status_code == 415
        assert http.post("/files", json={"purpose": "batch"}).status_code == 415
        headers = {**FORM, "origin": "https://evil.example"}
        answer = http.post("/files", content=PURPOSE + FILE + END, headers=headers)
    assert answer.status_code == 403


def test_a_wrong_id_is_named(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="must match file-"):
        client.files.retrieve("nothing")
    rule = r"not found: it never was, was deleted, or is kept no more; .* 48 h \(--files-hours\)"
    with pytest.raises(NotFoundError, match=rule):
        client.files.retrieve("file-" + "0" * 24)
