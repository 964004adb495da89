"""What is kept with a request for its gateway, and requests that are to be forgotten."""

from typing import Any

import pytest
from redis.asyncio import Redis

from ledger import Ledger, LedgerLimits, TenantBounds
from service_kit.errors import NotFound, Overloaded
from tests.support.play_leader import PlayLeader, submit_record


async def test_a_note_is_kept_as_long_as_its_request(redis_url: str, cell: str) -> None:
    limits = LedgerLimits(result_ttl_s=600, response_ttl_s=5000)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    leader = await PlayLeader.elected(ledger)
    submitted = await ledger.submit(submit_record("a"), b"h", note=b"\x00of a")
    await ledger.submit(submit_record("b"), b"h")
    assert await ledger.note("a") == b"\x00of a"
    for id in ("b", "nobody"):
        with pytest.raises(NotFound):
            await ledger.note(id)
    # A repeat changes nothing.
    assert not (await ledger.submit(submit_record("a"), b"h", note=b"other")).is_new
    await leader.finish("a", submitted.sequence_id)
    assert await ledger.note("a") == b"\x00of a"
    async with Redis.from_url(redis_url) as client:
        for key in (ledger.keys.request("a"), ledger.keys.result("a")):
            assert 4900 < await client.ttl(key) <= 5000
    await ledger.close()


async def test_notes_count_among_the_bytes_of_results(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    leader = await PlayLeader.elected(ledger)
    counts = []
    async with Redis.from_url(redis_url) as client:
        for id, note in (("plain", b""), ("noted", b"n" * 5000)):
            submitted = await ledger.submit(submit_record(id), b"h", note=note)
            await leader.finish(id, submitted.sequence_id)
            load: Any = await client.hgetall(ledger.keys.load)
            stored = [load[each] for each in load if each.startswith((b"results:", b"noted:"))]
            counts.append(sum(int(each.split()[1]) for each in stored if b" " in each))
    plain, both = counts
    assert both - plain == plain + 5000
    await ledger.close()


async def test_notes_of_what_is_live_count_as_well(redis_url: str, cell: str) -> None:
    """Nobody fills a store with what has not ended yet. Nothing of it is left behind."""
    ledger = await Ledger.connect(redis_url, cell=cell)
    leader = await PlayLeader.elected(ledger)
    bounds = TenantBounds(results_bytes_max=12_000)
    submitted = {}
    for id in ("a", "b", "c"):
        record = submit_record(id)
        submitted[id] = await ledger.submit(record, b"h", bounds, note=b"n" * 5000)
    with pytest.raises(Overloaded, match="results"):
        await ledger.submit(submit_record("d"), b"h", bounds)
    await ledger.forget("a")
    await ledger.submit(submit_record("d"), b"h", bounds)
    # At its end it counts among the results, once.
    await leader.finish("b", submitted["b"].sequence_id)
    await ledger.submit(submit_record("e"), b"h", bounds)
    for id in ("a", "c"):
        await leader.finish(id, submitted[id].sequence_id)
    async with Redis.from_url(redis_url) as client:
        load: Any = await client.hgetall(ledger.keys.load)
        assert not [each for each in load if each.startswith(b"notes")]
    await ledger.close()


async def test_what_an_earlier_version_leaves_counted_is_forgotten(
    redis_url: str, cell: str
) -> None:
    """Its scheduler beside our gateways: it knows no notes, and releases none with a request."""
    ledger = await Ledger.connect(redis_url, cell=cell)
    leader = await PlayLeader.elected(ledger)
    bounds, note = TenantBounds(results_bytes_max=8_000), b"n" * 5000
    async with Redis.from_url(redis_url) as client:
        for id in ("a", "b", "c", "d"):
            submitted = await ledger.submit(submit_record(id), b"h", bounds, note=note)
            await client.hdel(ledger.keys.request(id), "note", "note_bytes")
            await leader.finish(id, submitted.sequence_id)
        live = [await ledger.submit(submit_record(id), b"h", bounds) for id in ("e", "f")]
        for id, submitted in zip(("e", "f"), live, strict=True):
            await leader.finish(id, submitted.sequence_id)
        load: Any = await client.hgetall(ledger.keys.load)
        assert not [each for each in load if each.startswith(b"notes:")]
        assert int(load.get(b"notes", 0)) == 0
    await ledger.close()


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_forgotten_request_is_found_by_nobody(
    redis_url: str, cell: str, *, is_live: bool
) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    leader = await PlayLeader.elected(ledger)
    submitted = await ledger.submit(submit_record("a"), b"h", note=b"n")
    if not is_live:
        await leader.finish("a", submitted.sequence_id)
    await ledger.forget("a")
    for ask in (ledger.find, ledger.note, ledger.cancel, ledger.forget):
        with pytest.raises(NotFound):
            await ask("a")
    if is_live:
        # It comes to its end all the same, and takes nothing with it.
        await leader.finish("a", submitted.sequence_id)
        assert (await ledger.load()).choices == 0
    assert await ledger.result("a") is None
    with pytest.raises(NotFound):
        await ledger.find("a")
    with pytest.raises(NotFound):
        await ledger.forget("nobody")
    await ledger.close()


async def test_nothing_forgotten_stays_for_ever(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell, limits=LedgerLimits(result_ttl_s=600))
    leader = await PlayLeader.elected(ledger)
    submitted = await ledger.submit(submit_record("a"), b"h", note=b"n")
    await ledger.forget("a")
    await leader.finish("a", submitted.sequence_id)
    async with Redis.from_url(redis_url) as client:
        assert 0 < await client.ttl(ledger.keys.request("a")) <= 600
        assert not await client.exists(ledger.keys.result("a"))
    await ledger.close()
