"""What drivers of batches can rely on, however many of them there are."""

from functools import partial

import pytest
from redis.asyncio import Redis

from ledger import Ledger, LedgerLimits
from ledger.batches import batches as batches_module
from ledger.batches.batches import LIVE_MAX, BatchName
from service_kit.errors import NotFound, Overloaded, Unavailable

NAME = BatchName("alice", "batch_1")
FIELDS = {"endpoint": "/v1/completions"}


async def test_an_answer_is_written_once_and_counted_once(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    batches = ledger.batches
    await batches.new(NAME, FIELDS, window_s=60)
    with pytest.raises(NotFound):
        await batches.answer(NAME, 1, b"early", is_ok=True)
    assert await batches.move(NAME, "in_progress", of=("validating",)) == "in_progress"
    for answer, is_ok in ((b"first", True), (b"second", False)):
        await batches.answer(NAME, 7, answer, is_ok=is_ok)
    await batches.answer(NAME, 3, b"wrong", is_ok=False)
    assert await batches.answered(NAME) == [3, 7]
    assert await batches.answers(NAME, [3, 7]) == [b"wrong", b"first"]
    found = await batches.find(NAME)
    assert (found.number("completed"), found.number("failed")) == (1, 1)
    assert await batches.live() == [NAME]
    fields = {"output_file_id": "file-1"}
    assert await batches.move(NAME, "completed", of=("in_progress",), fields=fields) == "completed"
    assert await batches.live() == []
    assert await batches.answered(NAME) == []
    with pytest.raises(NotFound):
        await batches.answer(NAME, 8, b"late", is_ok=True)
    # A state is left once: who comes later is told which it is.
    assert await batches.move(NAME, "cancelling", of=("in_progress",)) == "completed"
    assert (await batches.find(NAME)).fields["output_file_id"] == "file-1"
    await ledger.close()


async def test_one_drives_and_another_when_it_says_nothing(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    assert await ledger.batches.hold(NAME, "me", 60_000)
    assert await ledger.batches.hold(NAME, "me", 60_000)
    assert not await ledger.batches.hold(NAME, "you", 60_000)
    async with Redis.from_url(redis_url) as client:
        assert 0 < await client.pttl(ledger.keys.batch_driver(*NAME)) <= 60_000
        await client.delete(ledger.keys.batch_driver(*NAME))
    assert await ledger.batches.hold(NAME, "you", 60_000)
    await ledger.close()


async def test_live_batches_are_bounded_by_tenant(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    for number in range(LIVE_MAX):
        await ledger.batches.new(BatchName("alice", f"b{number}"), FIELDS, window_s=60)
    with pytest.raises(Overloaded, match="too many live batches of tenant alice"):
        await ledger.batches.new(NAME, FIELDS, window_s=60)
    await ledger.batches.new(BatchName("alicia", "b"), FIELDS, window_s=60)
    # Again is no other one.
    await ledger.batches.new(BatchName("alice", "b0"), FIELDS, window_s=60)
    await ledger.batches.move(BatchName("alice", "b0"), "failed", of=("validating",))
    await ledger.batches.new(NAME, FIELDS, window_s=60)
    assert len(await ledger.batches.all("alice")) == LIVE_MAX + 1
    await ledger.close()


async def test_batches_that_are_kept_are_bounded_until_some_leave(
    redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "KEPT_MAX", 3)
    monkeypatch.setitem(batches_module.BOUNDS, b"KEPT", ("kept batches", 3))
    limits = LedgerLimits(files_ttl_s=100)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    async with Redis.from_url(redis_url) as client:
        began_s, _ = await client.time()
    for number in range(3):
        name = BatchName("alice", f"b{number}")
        await ledger.batches.new(name, FIELDS, window_s=60)
        await ledger.batches.move(name, "failed", of=("validating",))
    with pytest.raises(
        Overloaded, match=r"too many kept batches of tenant alice \(live 3, limit 3"
    ):
        await ledger.batches.new(NAME, FIELDS, window_s=60)
    await ledger.batches.new(BatchName("bob", "b"), FIELDS, window_s=60)
    async with Redis.from_url(redis_url) as client:
        leaves = await client.hvals(ledger.keys.batches_of("alice"))
        now_s, _ = await client.time()
        assert all(began_s + 160 <= each <= now_s + 160 for each in map(int, leaves))
        # As if its time had come: the head leaves by itself, its name when there is need of room.
        await client.hset(ledger.keys.batches_of("alice"), "b1", str(now_s))
        await client.delete(ledger.keys.batch("alice", "b1"))
    await ledger.batches.new(NAME, FIELDS, window_s=60)
    assert sorted(each.name.id for each in await ledger.batches.all("alice")) == [
        "b0",
        "b2",
        NAME.id,
    ]
    await ledger.close()


async def test_answers_of_live_batches_are_bounded_by_tenant(redis_url: str, cell: str) -> None:
    limits = LedgerLimits(files_bytes_max=1000, files_ttl_s=100)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    batches, other = ledger.batches, BatchName("alice", "batch_2")
    for name in (NAME, other, BatchName("bob", "batch_3")):
        await batches.new(name, FIELDS, window_s=60)
        await batches.move(name, "in_progress", of=("validating",))
    await batches.answer(NAME, 1, b"a" * 400, is_ok=True)
    await batches.answer(other, 1, b"a" * 300, is_ok=True)
    says = r"too many bytes of answers in live batches of tenant alice \(live 830, files_mb 1000\)"
    with pytest.raises(Overloaded, match=says):
        await batches.answer(NAME, 2, b"a" * 400, is_ok=True)
    # That it failed is always told; what is there already is no new one; others have their own.
    await batches.answer(NAME, 2, b"no room", is_ok=False)
    await batches.answer(NAME, 1, b"a" * 400, is_ok=True)
    await batches.answer(BatchName("bob", "batch_3"), 1, b"a" * 400, is_ok=True)
    assert (await batches.find(NAME)).number("failed") == 1
    async with Redis.from_url(redis_url) as client:
        assert 0 < await client.ttl(ledger.keys.answers("alice")) <= 100
    await batches.move(other, "completed", of=("in_progress",))
    await batches.answer(NAME, 3, b"a" * 300, is_ok=True)
    await batches.move(NAME, "completed", of=("in_progress",))
    async with Redis.from_url(redis_url) as client:
        assert not await client.exists(ledger.keys.answers("alice"))
    await ledger.close()


async def test_nothing_of_a_batch_stays_for_ever(redis_url: str, cell: str) -> None:
    limits = LedgerLimits(files_ttl_s=100)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    await ledger.batches.new(NAME, FIELDS, window_s=50)
    await ledger.batches.move(NAME, "in_progress", of=("validating",))
    await ledger.batches.answer(NAME, 1, b"a", is_ok=True)
    keys = ledger.keys
    async with Redis.from_url(redis_url) as client:
        for key in (keys.batch(*NAME), keys.batch_lines(*NAME), keys.batches_of(NAME.tenant)):
            assert 0 < await client.ttl(key) <= 150
        await ledger.batches.let_go(NAME)
        assert (await ledger.batches.find(NAME)).status == "in_progress"
        # One whose state has left is nobody's to drive any more.
        await client.delete(keys.batch(*NAME))
        assert await ledger.batches.live() == [NAME]
        await ledger.batches.let_go(NAME)
        assert await ledger.batches.live() == []
        assert not await client.exists(keys.answers(NAME.tenant))
    with pytest.raises(NotFound):
        await ledger.batches.move(NAME, "completed", of=("in_progress",))
    await ledger.close()


async def test_a_file_is_there_when_all_of_it_is(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell, limits=LedgerLimits(files_ttl_s=100))
    files = ledger.files
    keep = partial(files.keep, "alice", "f", filename="a", purpose="batch", size_bytes=7, chunks=2)
    await files.put("alice", "f", 0, b"one ")
    with pytest.raises(NotFound):
        await files.find("alice", "f")
    with pytest.raises(Unavailable, match="a piece of the file was lost"):
        await keep()
    await files.put("alice", "f", 1, b"two")
    kept = await keep()
    assert await files.find("alice", "f") == kept
    # A driver that goes on sends its pieces again.
    await files.put("alice", "f", 0, b"one ")
    assert await keep() == kept
    assert b"".join([piece async for piece in files.read("alice", kept)]) == b"one two"
    async with Redis.from_url(redis_url) as client:
        for number in range(2):
            assert 0 < await client.ttl(ledger.keys.file_chunk("alice", "f", number)) <= 100
    await files.drop("alice", "f", 2)
    with pytest.raises(NotFound):
        await anext(files.read("alice", kept))
    with pytest.raises(NotFound):
        await files.drop("alice", "f", 2)
    await ledger.close()
