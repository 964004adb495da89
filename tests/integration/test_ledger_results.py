"""Finished results are bounded by the bytes they take: beyond, nothing new is accepted."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from redis.asyncio import Redis

from ledger import Ledger, LedgerLimits, TenantBounds
from service_kit.errors import NotFound, Overloaded
from tests.support.play_leader import PlayLeader, outlive_results, submit_record
from tests.support.store_server import StoreServer

RESULTS = 150
# Between a write and a look at it, on a slow machine: what is kept is told in what is left.
SLOW_S = 100


async def run_one(
    ledger: Ledger,
    leader: PlayLeader,
    id: str,
    tokens: int = 20,
    *,
    tenant: str = "default",
    bounds: TenantBounds | None = None,
    note: bytes = b"",
) -> None:
    record = submit_record(id, tenant=tenant)
    submitted = await ledger.submit(record, b"h", bounds or TenantBounds(), note=note)
    await leader.step({submitted.sequence_id: list(range(1000, 1000 + tokens))})
    await leader.finish(id, submitted.sequence_id)


async def counted(client: Redis, ledger: Ledger, tenant: str | None = None) -> int:
    named = [f"results:{index}" for index in range(40)] + [f"noted:{n}" for n in range(10)]
    key = ledger.keys.load if tenant is None else ledger.keys.results(tenant)
    return sum(int(one.split()[1]) for one in await client.hmget(key, named) if one)


async def test_more_results_than_there_is_room_for_are_refused_until_some_leave(
    redis_url: str, cell: str
) -> None:
    # Down to a second, however slowly they come.
    limits = LedgerLimits(result_ttl_s=32, results_bytes_max=10_000)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    leader = await PlayLeader.elected(ledger)
    waiting = await ledger.submit(submit_record("accepted before"), b"h")

    async def run_many() -> None:
        for index in range(1000):
            await run_one(ledger, leader, f"r{index}")

    with pytest.raises(
        Overloaded, match=r"results \(results_mb\) are kept \(.*bytes_max 10000"
    ) as caught:
        await run_many()
    assert caught.value.live is not None
    assert 10_000 < caught.value.live < 12_000
    # What was accepted ends all the same.
    await leader.finish("accepted before", waiting.sequence_id)
    async with asyncio.timeout(60):
        while True:
            try:
                await run_one(ledger, leader, "later")
                break
            except Overloaded:
                await asyncio.sleep(0.01)
    await ledger.close()


async def test_results_are_kept_for_less_where_room_becomes_scarce(
    redis_url: str, cell: str
) -> None:
    """Down to a thirty-second: many short requests are rather forgotten sooner than refused."""
    limits = LedgerLimits(result_ttl_s=8000, results_bytes_max=100_000)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    leader = await PlayLeader.elected(ledger)
    kept_s: list[int] = []
    async with Redis.from_url(redis_url) as client:
        while await counted(client, ledger) <= limits.results_bytes_max:
            id = f"r{len(kept_s)}"
            await run_one(ledger, leader, id)
            kept_s.append(await client.ttl(ledger.keys.result(id)))
            assert await client.ttl(ledger.keys.request(id)) == pytest.approx(
                kept_s[-1], abs=SLOW_S
            )
    half = len(kept_s) // 2
    assert min(kept_s[: half - 1]) >= 8000 - SLOW_S, "the first half as long as any"
    assert 800 < kept_s[half + half // 2] < 1200, "half of that half is taken: an eighth"
    assert 250 - SLOW_S <= kept_s[-1] <= 250
    assert all(later <= sooner + SLOW_S for sooner, later in pairwise(kept_s))
    await ledger.close()


async def test_stored_responses_are_kept_for_longer_and_leave_room_for_others(
    redis_url: str, cell: str
) -> None:
    limits = LedgerLimits(result_ttl_s=8000, response_ttl_s=800_000, results_bytes_max=200_000)
    share = TenantBounds(results_bytes_max=100_000)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    leader = await PlayLeader.elected(ledger)
    kept_s: list[int] = []
    async with Redis.from_url(redis_url) as client:
        while not kept_s or kept_s[-1] > 8000:
            id = f"r{len(kept_s)}"
            await run_one(ledger, leader, id, note=b"n", bounds=share)
            kept_s.append(await client.ttl(ledger.keys.result(id)))
            assert await client.ttl(ledger.keys.request(id)) == pytest.approx(
                kept_s[-1], abs=SLOW_S
            )
        # Half of its tenant's share: a quarter of all.
        assert 40_000 < await counted(client, ledger) <= 60_000
        assert await counted(client, ledger, "default") == await counted(client, ledger)
        assert min(kept_s[: len(kept_s) // 2 - 1]) >= 800_000 - SLOW_S
        assert all(later <= sooner + SLOW_S for sooner, later in pairwise(kept_s))
        assert 800_000 < await client.ttl(ledger.keys.results("default")) <= 900_000
        # Others have all their time, and take none of what is counted for longer.
        await run_one(ledger, leader, "plain", tenant="other")
        assert await client.ttl(ledger.keys.result("plain")) >= 8000 - SLOW_S
        assert 8000 < await client.ttl(ledger.keys.results("other")) <= 8250
        await run_one(ledger, leader, "mine")
        assert await client.ttl(ledger.keys.results("default")) > 800_000
        # They count where something new is accepted.
        bounds = TenantBounds(results_bytes_max=20_000)
        with pytest.raises(Overloaded, match="are kept of tenant default"):
            await run_one(ledger, leader, "more", bounds=bounds)
    await ledger.close()


async def test_one_tenant_that_keeps_much_shuts_out_nobody_else(redis_url: str, cell: str) -> None:
    """Its own are kept for less, then it is refused; others have all their time."""
    share = TenantBounds(results_bytes_max=20_000)
    limits = LedgerLimits(result_ttl_s=8000)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    leader = await PlayLeader.elected(ledger)
    kept_s: list[int] = []

    async def fill(tenant: str, bounds: TenantBounds = share) -> None:
        for index in range(1000):
            id = f"{tenant}:{index}"
            await run_one(ledger, leader, id, tenant=tenant, bounds=bounds)
            kept_s.append(await client.ttl(ledger.keys.result(id)))

    async with Redis.from_url(redis_url) as client:
        says = (
            r"of results \(results_mb\) are kept of tenant acme \(live \d+, results_bytes_max 20000"
        )
        with pytest.raises(Overloaded, match=says) as caught:
            await fill("acme")
        assert (caught.value.subject, caught.value.tenant) == ("tenant", "acme")
        assert caught.value.live == await counted(client, ledger, "acme")
        assert min(kept_s[: len(kept_s) // 2 - 1]) >= 8000 - SLOW_S
        assert 250 - SLOW_S <= kept_s[-1] <= 250
        await run_one(ledger, leader, "other:1", tenant="other")
        assert await client.ttl(ledger.keys.result("other:1")) >= 8000 - SLOW_S
        # One of its own counts before what all may keep; all of them count for the cell.
        with pytest.raises(Overloaded, match=r"of tenant less .*results_bytes_max 5000"):
            await fill("less", TenantBounds(results_bytes_max=5_000))
        tenants = [await counted(client, ledger, each) for each in ("acme", "other", "less")]
        assert sum(tenants) == await counted(client, ledger)
        assert 8000 < await client.ttl(ledger.keys.results("acme")) <= 8250
    await ledger.close()


async def test_what_was_kept_for_its_time_is_told_with_the_rule(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell, limits=LedgerLimits(result_ttl_s=100))
    rule = "request gone not found: it never was, was deleted, or is kept no more; results are kept"
    with pytest.raises(NotFound, match=f"{rule} for --result-ttl-s, stored resp.* for less"):
        await ledger.find("gone")
    leader = await PlayLeader.elected(ledger)
    await run_one(ledger, leader, "gone")
    assert (await ledger.find("gone")).is_finished
    await outlive_results(redis_url, cell)
    with pytest.raises(NotFound) as caught:
        await ledger.find("gone")
    assert str(caught.value) == (
        f"{rule} for 100 s at most (--result-ttl-s), stored responses for 86400 s"
        " (--response-ttl-s), for less where results_mb runs short"
    )
    with pytest.raises(NotFound, match="for 100 s at most"):
        await ledger.note("gone")
    await ledger.close()


@pytest.mark.parametrize(("tokens", "n"), [(1, 1), (20, 1), (500, 1), (3, 4)])
async def test_what_is_counted_is_what_the_store_needs(tmp_path: Path, tokens: int, n: int) -> None:
    """Never much less, or a store within the bound would be full; and not twice as much."""
    server = StoreServer(tmp_path)
    server.start()
    try:
        ledger = await Ledger.connect(server.url, limits=LedgerLimits(result_ttl_s=3600))
        leader = await PlayLeader.elected(ledger)
        async with Redis.from_url(server.url) as client:

            async def used() -> int:
                return int((await client.info("memory"))["used_memory_dataset"])

            await run_one(ledger, leader, "first")
            before, told = await used(), await counted(client, ledger)
            for index in range(RESULTS):
                id = f"00000000-0000-0000-0000-{index:012d}"
                submitted = await ledger.submit(submit_record(id, n=n), b"h" * 32)
                ids = range(submitted.sequence_id, submitted.sequence_id + n)
                await leader.step({one: list(range(10_000, 10_000 + tokens)) for one in ids})
                await leader.finish(id, submitted.sequence_id, n=n)
                if index % 100 == 0:
                    await leader.fold(leader.seq, [])
            await leader.fold(leader.seq, [])
            grown, told = await used() - before, await counted(client, ledger) - told
        await ledger.close()
    finally:
        server.close()
    assert 0.5 < grown / told < 1.1, (
        f"{grown / RESULTS:.0f} bytes each, {told / RESULTS:.0f} counted"
    )
