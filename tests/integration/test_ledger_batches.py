"""What drivers of batches can rely on, however many of them there are."""

from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from ledger import Ledger, LedgerLimits
from ledger.batches import batches as batches_module
from ledger.batches import files as files_module
from ledger.batches.batches import BATCH_BYTES, LIVE_MAX, BatchName
from ledger.batches.files import FILE_BYTES_MIN
from ledger.batches.shelf import Page
from service_kit.errors import NotFound, OutOfOrder, Overloaded, Unavailable

NAME = BatchName("alice", "batch_1")
FIELDS = {"endpoint": "/v1/completions"}
ALL = Page(100)


async def keep(ledger: Ledger, id: str, size_bytes: int = 1, *, ttl_s: int | None = None) -> None:
    """A file of alice, of one piece that may be smaller than it says."""
    await ledger.files.put("alice", id, 0, b"a")
    kind = "batch_output" if id.endswith("-output") else "batch"
    about: Any = {"filename": id, "purpose": kind, "size_bytes": size_bytes, "chunks": 1}
    await ledger.files.keep("alice", id, ttl_s=ttl_s, **about)


async def left_over(ledger: Ledger, client: Redis) -> tuple[int, int]:
    """Bytes that count, and by their sum."""
    *_, leaving, total = ledger.keys.shelf("alice")
    members: list[Any] = await client.zrange(leaving, 0, -1)
    found: Any = await client.get(total)
    return sum(int(each.rsplit(b" ", 1)[1]) for each in members), int(found)


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
    # Whoever still writes them down must not take them for none.
    with pytest.raises(NotFound):
        await batches.answers(NAME, [3, 7])
    with pytest.raises(NotFound):
        await batches.answer(NAME, 8, b"late", is_ok=True)
    # A state is left once: who comes later is told which it is.
    assert await batches.move(NAME, "cancelling", of=("in_progress",)) == "completed"
    assert (await batches.find(NAME)).fields["output_file_id"] == "file-1"
    await ledger.close()


async def test_what_is_written_down_is_all_that_was_answered(redis_url: str, cell: str) -> None:
    """Another driver may not have seen yet that the batch is to be cancelled."""
    ledger = await Ledger.connect(redis_url, cell=cell)
    batches = ledger.batches
    await batches.new(NAME, FIELDS, window_s=60)
    await batches.move(NAME, "in_progress", of=("validating",))
    await batches.answer(NAME, 1, b"in time", is_ok=True)
    await batches.move(NAME, "cancelling", of=("in_progress",))
    numbers = await batches.answered(NAME)
    for is_ok in (True, False):
        with pytest.raises(NotFound):
            await batches.answer(NAME, 2, b"late", is_ok=is_ok)
    await batches.move(NAME, "cancelled", of=("cancelling",))
    found = await batches.find(NAME)
    assert found.number("completed") + found.number("failed") == len(numbers) == 1
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
    ids, has_more = await ledger.batches.page("alice", ALL)
    assert (len(ids), has_more) == (LIVE_MAX + 1, False)
    await ledger.close()


async def test_batches_that_are_kept_are_bounded_until_some_leave(
    redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "KEPT_MAX", 3)
    monkeypatch.setitem(batches_module.BOUNDS, b"KEPT", ("kept batches", 3))
    limits = LedgerLimits(files_ttl_s=100)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
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
        await leave(ledger, client, "b1")
    await ledger.batches.new(NAME, FIELDS, window_s=60)
    ids, _ = await ledger.batches.page("alice", Page(100, is_oldest_first=True))
    assert ids == ["b0", "b2", NAME.id]
    found = [each async for each in ledger.batches.some("alice", ["b2", "b1", "b0"])]
    assert [each.name.id for each in found] == ["b2", "b0"]
    await ledger.close()


async def leave(ledger: Ledger, client: Redis, id: str) -> None:
    """As if its time were over: its head leaves by itself, its name when somebody looks."""
    *_, leaving, _ = ledger.keys.shelf("alice")
    (member,) = [each async for each in client.zscan_iter(leaving, f"{id} *")]
    await client.zadd(leaving, {member[0]: (await client.time())[0]})
    await client.delete(ledger.keys.batch("alice", id), ledger.keys.file("alice", id))


async def test_files_and_batches_are_bounded_together(redis_url: str, cell: str) -> None:
    limits = LedgerLimits(files_bytes_max=10_000, files_ttl_s=100)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    fields = FIELDS | {"metadata": "é" * 1000}
    size = BATCH_BYTES + sum(len(word.encode()) for pair in fields.items() for word in pair)
    for number in range(2):
        await ledger.batches.new(BatchName("alice", f"b{number}"), fields, window_s=60)
    says = r"bytes of files, batches and conversations of tenant alice are kept; delete some"
    with pytest.raises(Overloaded, match=rf"{says} \(live {2 * size}, files_mb 10000\)"):
        await ledger.batches.new(NAME, fields, window_s=60)
    with pytest.raises(Overloaded, match=says):
        await keep(ledger, "f", 10_001 - 2 * size)
    await ledger.batches.new(BatchName("bob", "b"), fields, window_s=60)
    async with Redis.from_url(redis_url) as client:
        await leave(ledger, client, "b0")
        await keep(ledger, "f", 10_000 - size)
        assert await left_over(ledger, client) == (10_000, 10_000)
    await ledger.close()


async def test_the_number_of_files_is_bounded_and_each_counts_for_what_it_takes(
    redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "FILES_MAX", 3)
    limits = LedgerLimits(files_bytes_max=4 * FILE_BYTES_MIN, files_ttl_s=100)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    for id in ("a", "b", "c"):
        await keep(ledger, id)
    says = r"too many files of tenant alice are kept; delete some \(live 3, limit 3\)"
    with pytest.raises(Overloaded, match=says):
        await keep(ledger, "d")
    # Again is no other one.
    await keep(ledger, "a")
    async with Redis.from_url(redis_url) as client:
        assert await left_over(ledger, client) == (3 * FILE_BYTES_MIN, 3 * FILE_BYTES_MIN)
    await ledger.files.drop("alice", "a", 1)
    with pytest.raises(Overloaded, match="too many bytes"):
        await keep(ledger, "d", 2 * FILE_BYTES_MIN + 1)
    await keep(ledger, "d", 2 * FILE_BYTES_MIN)
    await ledger.close()


async def test_the_sum_is_right_whatever_leaves(redis_url: str, cell: str) -> None:
    """By its time, by its tenant, half-way, or all at once; and who leaves soon takes no list of
    the others with it.
    """
    limits = LedgerLimits(files_bytes_max=100_000, files_ttl_s=1000)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    async with Redis.from_url(redis_url) as client:
        await keep(ledger, "stays", 30_000)
        await keep(ledger, "short", 20_000, ttl_s=100)
        keys = ledger.keys.shelf("alice")
        for key in (keys[0], *keys[2:]):
            assert 900 < await client.ttl(key) <= 1060
        assert await client.ttl(keys[3]) > await client.ttl(keys[2])
        assert await left_over(ledger, client) == (50_000, 50_000)
        # Pieces of what was never kept were never counted; what is gone is gone once.
        await ledger.files.put("alice", "never", 0, b"a")
        for id in ("never", "gone"):
            with pytest.raises(NotFound):
                await ledger.files.drop("alice", id, 1)
        await leave(ledger, client, "short")
        with pytest.raises(NotFound):
            await ledger.files.drop("alice", "short", 1)
        assert await ledger.files.page("alice", ALL) == (["stays"], False)
        assert await left_over(ledger, client) == (30_000, 30_000)
        # Its pieces are not all there: nothing of it counts.
        about: Any = {"filename": "a", "purpose": "batch", "size_bytes": 9, "chunks": 2}
        with pytest.raises(Unavailable):
            await ledger.files.keep("alice", "half", **about)
        assert await left_over(ledger, client) == (30_000, 30_000)
        # All have left by the time to live of their list, which ends a moment before their sum's.
        await client.delete(*keys[:3])
        await keep(ledger, "new", 10_000)
        assert await left_over(ledger, client) == (10_000, 10_000)
        await ledger.files.drop("alice", "new", 1)
        assert not await client.exists(*keys[:3])
        assert await client.get(keys[3]) == b"0"
        assert 0 < await client.ttl(keys[3]) <= 1060
    await ledger.close()


async def test_a_list_is_read_page_by_page(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    made = [f"file-{number:03x}{kind}" for number in range(150) for kind in ("", "-output")]
    for id in made:
        await keep(ledger, id)
    async with Redis.from_url(redis_url) as client:
        # Of two seconds; those of the same one by id.
        await client.zadd(ledger.keys.shelf("alice")[0], dict.fromkeys(made[:200], 1))
        await client.zadd(ledger.keys.shelf("alice")[0], dict.fromkeys(made[200:], 2))
    for purpose, expected in (
        ("", made), ("batch", made[::2]), ("batch_output", made[1::2]), ("other", []),
    ):  # fmt: skip
        for is_oldest_first in (True, False):
            found: list[str] = []
            has_more = True
            while has_more:
                page = Page(70, found[-1] if found else "", is_oldest_first)
                ids, has_more = await ledger.files.page("alice", page, purpose=purpose)
                assert len(ids) == 70 or not has_more
                found += ids
            assert found == (expected if is_oldest_first else expected[::-1])
    assert await ledger.files.page("alice", Page(300)) == (made[::-1], False)
    for after, purpose in (("file-none", ""), (made[1], "batch")):
        with pytest.raises(NotFound):
            await ledger.files.page("alice", Page(1, after), purpose=purpose)
    assert await ledger.files.page("bob", ALL) == ([], False)
    await ledger.close()


@pytest.mark.parametrize("is_oldest_first", [True, False])
async def test_pages_go_on_behind_a_file_that_was_deleted(
    redis_url: str, cell: str, is_oldest_first: bool
) -> None:
    """All of one second, and of several."""
    ledger = await Ledger.connect(redis_url, cell=cell)
    made = [f"file-{number:024x}" for number in range(9)]
    for id in made:
        await keep(ledger, id)
    left, page = list(made if is_oldest_first else made[::-1]), Page(2, "", is_oldest_first)
    async with Redis.from_url(redis_url) as client:
        for number, id in enumerate(made):
            at = number // 3
            await client.zadd(ledger.keys.shelf("alice")[0], {id: at})
            await client.hset(ledger.keys.file("alice", id), "created_at", at)
    while left:
        ids, has_more = await ledger.files.page("alice", page)
        assert (ids, has_more) == (left[:2], len(left) > 2)
        for id in ids:
            await ledger.files.drop("alice", id, 1)
            with pytest.raises(NotFound):
                await ledger.files.drop("alice", id, 1)
            with pytest.raises(NotFound):
                await ledger.files.find("alice", id)
        left, page = left[2:], page._replace(after=ids[-1])
    assert await ledger.files.page("alice", page) == ([], False)
    # Of another tenant there is no such place.
    with pytest.raises(NotFound):
        await ledger.files.page("bob", page)
    await ledger.close()


@pytest.mark.parametrize("is_oldest_first", [True, False])
@pytest.mark.parametrize("of_batches", [True, False])
async def test_pages_go_on_behind_what_has_expired(
    redis_url: str, cell: str, is_oldest_first: bool, of_batches: bool
) -> None:
    """Be it that another call has taken its name out of the list."""
    ledger = await Ledger.connect(redis_url, cell=cell, limits=LedgerLimits(files_ttl_s=100))
    made = [f"id{number}" for number in range(6)]
    listed = ledger.batches.page if of_batches else ledger.files.page
    left, page = list(made if is_oldest_first else made[::-1]), Page(2, "", is_oldest_first)
    async with Redis.from_url(redis_url) as client:
        for number, id in enumerate(made):
            if of_batches:
                await ledger.batches.new(BatchName("alice", id), FIELDS, window_s=60)
            else:
                await keep(ledger, id)
            await client.zadd(ledger.keys.shelf("alice")[int(of_batches)], {id: number // 2})
            place = ledger.keys.place("alice", id)
            assert await client.set(place, number // 2, xx=True, keepttl=True)
        while left:
            assert await listed("alice", page) == (left[:2], len(left) > 2)
            for id in left[:2]:
                await leave(ledger, client, id)
            page, left = page._replace(after=left[1]), left[2:]
            assert await listed("alice", ALL) == (sorted(left, reverse=True), False)
        for _ in range(2):
            assert await listed("alice", page) == ([], False)
        kept_s = 100 + 60 * of_batches
        assert kept_s < await client.ttl(ledger.keys.place("alice", made[0])) <= kept_s + 300
    await ledger.close()


async def test_answers_of_live_batches_are_bounded_by_tenant(redis_url: str, cell: str) -> None:
    limits = LedgerLimits(files_bytes_max=10_000, files_ttl_s=100)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    batches, other = ledger.batches, BatchName("alice", "batch_2")
    for name in (NAME, other, BatchName("bob", "batch_3")):
        await batches.new(name, FIELDS, window_s=60)
        await batches.move(name, "in_progress", of=("validating",))
    await batches.answer(NAME, 1, b"a" * 4000, is_ok=True)
    await batches.answer(other, 1, b"a" * 3000, is_ok=True)
    says = (
        r"too many bytes of answers in live batches of tenant alice \(live 7130, files_mb 10000\)"
    )
    with pytest.raises(Overloaded, match=says):
        await batches.answer(NAME, 2, b"a" * 4000, is_ok=True)
    # That it failed is always told; what is there already is no new one; others have their own.
    await batches.answer(NAME, 2, b"no room", is_ok=False)
    await batches.answer(NAME, 1, b"a" * 4000, is_ok=True)
    await batches.answer(BatchName("bob", "batch_3"), 1, b"a" * 4000, is_ok=True)
    assert (await batches.find(NAME)).number("failed") == 1
    async with Redis.from_url(redis_url) as client:
        assert 0 < await client.ttl(ledger.keys.answers("alice")) <= 161
    await batches.move(other, "completed", of=("in_progress",))
    await batches.answer(NAME, 3, b"a" * 3000, is_ok=True)
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
        for key in (keys.batch(*NAME), keys.batch_lines(*NAME), *keys.shelf(NAME.tenant)[1:]):
            assert 0 < await client.ttl(key) <= 150 + 60
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


async def test_answers_leave_no_sooner_than_their_batch(redis_url: str, cell: str) -> None:
    """However long after the last one the next comes: files may be kept for less than a day."""
    limits = LedgerLimits(files_ttl_s=10)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    await ledger.batches.new(NAME, FIELDS, window_s=1000)
    other = BatchName("alice", "batch_2")
    await ledger.batches.new(other, FIELDS, window_s=50)
    keys = ledger.keys
    async with Redis.from_url(redis_url) as client:
        for name in (NAME, other):
            await ledger.batches.move(name, "in_progress", of=("validating",))
            await ledger.batches.answer(name, 1, b"a", is_ok=True)
            ends_ms = await client.pexpiretime(keys.batch(*name))
            assert await client.pexpiretime(keys.batch_lines(*name)) >= ends_ms
        ends_ms = await client.pexpiretime(keys.batch(*NAME))
        assert await client.pexpiretime(keys.answers("alice")) >= ends_ms
    await ledger.close()


async def test_a_file_that_is_kept_stays_as_it_is_whoever_is_late(
    redis_url: str, cell: str
) -> None:
    """A driver that was put aside, or a piece that the store takes in late: another has written
    the file meanwhile, and its answers are gone.
    """
    ledger = await Ledger.connect(redis_url, cell=cell)
    await ledger.files.put("alice", "f-output", 1, b"of whoever is late")
    await keep(ledger, "f-output")
    kept = await ledger.files.find("alice", "f-output")
    chunk, late = (ledger.keys.file_chunk("alice", "f-output", number) for number in (0, 1))
    async with Redis.from_url(redis_url) as client:
        ends_ms = await client.pexpiretime(chunk)
        await ledger.files.put("alice", "f-output", 0, b"and more")
        about: Any = {"filename": "other", "purpose": "batch", "size_bytes": 26, "chunks": 2}
        assert await ledger.files.keep("alice", "f-output", **about) == kept
        assert await client.pexpiretime(chunk) >= ends_ms
        # It is no piece of the file, and would outlive it.
        assert await client.ttl(late) <= files_module.UPLOAD_S_MAX
    assert [piece async for piece in ledger.files.read("alice", kept)] == [b"a"]
    await ledger.close()


async def test_an_output_that_was_deleted_is_not_kept_again_by_a_driver_that_is_late(
    redis_url: str, cell: str
) -> None:
    """It stood still while another brought its batch to the end, and the client had it all."""
    ledger = await Ledger.connect(redis_url, cell=cell)
    files, move = ledger.files, partial(ledger.batches.move, NAME)
    about: Any = {"filename": "f", "purpose": "batch_output", "size_bytes": 1, "chunks": 1}
    keep_output = partial(files.keep, "alice", "f-output", **about, of=NAME)
    await ledger.batches.new(NAME, FIELDS, window_s=60)
    await files.put("alice", "f-output", 0, b"a")
    with pytest.raises(OutOfOrder, match="not being written down"):
        await keep_output()
    await move("finalizing", of=("validating",))
    kept = await keep_output()
    await move("completed", of=("finalizing",))
    assert await keep_output() == kept, "again: what it was"
    await files.drop("alice", "f-output", 1)
    await files.put("alice", "f-output", 0, b"a")
    with pytest.raises(OutOfOrder):
        await keep_output()
    with pytest.raises(NotFound):
        await files.find("alice", "f-output")
    await ledger.close()


async def test_an_output_that_was_deleted_is_not_kept_again_by_who_goes_on(
    redis_url: str, cell: str
) -> None:
    """A driver kept it and died, with the batch's last word left to say; its client had it all, and
    needs the room.
    """
    ledger = await Ledger.connect(redis_url, cell=cell)
    files = ledger.files
    await ledger.batches.new(NAME, FIELDS, window_s=60)
    await ledger.batches.move(NAME, "finalizing", of=("validating",))
    for kind in ("output", "errors"):
        about: Any = {"filename": "f", "purpose": "batch_output", "size_bytes": 1, "chunks": 1}
        keep_it = partial(files.keep, "alice", f"f-{kind}", **about, of=NAME)
        await files.put("alice", f"f-{kind}", 0, b"a")
        kept = await keep_it()
        assert await keep_it() == kept, "again: what it was"
        assert (await ledger.batches.find(NAME)).fields[f"{kind}_file_id"] == f"f-{kind}"
        await files.drop("alice", f"f-{kind}", 1)
        await files.put("alice", f"f-{kind}", 0, b"a")
        with pytest.raises(NotFound, match="was deleted"):
            await keep_it()
        with pytest.raises(NotFound):
            await files.find("alice", f"f-{kind}")
    await ledger.close()


async def test_a_file_is_there_when_all_of_it_is(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell, limits=LedgerLimits(files_ttl_s=100))
    files = ledger.files
    whole = partial(files.keep, "alice", "f", filename="a", purpose="batch", size_bytes=7, chunks=2)
    await files.put("alice", "f", 0, b"one ")
    with pytest.raises(NotFound):
        await files.find("alice", "f")
    with pytest.raises(Unavailable, match="a piece of the file was lost"):
        await whole()
    await files.put("alice", "f", 1, b"two")
    kept = await whole()
    assert await files.find("alice", "f") == kept
    # A driver that goes on sends its pieces again.
    await files.put("alice", "f", 0, b"one ")
    assert await whole() == kept
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
