"""submit and cancel on the real server: idempotent, bounded, and nothing left behind."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import redis.asyncio

from kaiten.v1.common_pb2 import FinishReason
from kaiten.v1.ledger_pb2 import CancelRecord, SubmitRecord
from ledger import InboxEntry, Ledger, LedgerLimits, Load, TenantBounds
from service_kit.errors import (
    AlreadyExists,
    ConfigError,
    InvalidRequest,
    NotFound,
    Overloaded,
    TooLong,
)
from tests.support.play_leader import PlayLeader, submit_record


async def test_fifty_parallel_submitters_get_one_sequence_id(redis_url: str, cell: str) -> None:
    ledgers = [await Ledger.connect(redis_url, cell=cell) for _ in range(2)]
    record = submit_record("default:same", n=3)
    answers = await asyncio.gather(*(ledgers[i % 2].submit(record, b"hash") for i in range(50)))
    assert {answer.sequence_id for answer in answers} == {answers[0].sequence_id}
    assert sum(answer.is_new for answer in answers) == 1
    assert len(await ledgers[0].inbox_all()) == 1
    assert await ledgers[0].load() == Load(choices=3, prompt_tokens=3)
    for ledger in ledgers:
        await ledger.close()


async def test_another_body_under_the_same_id_is_refused_and_changes_nothing(
    ledger: Ledger,
) -> None:
    await ledger.submit(submit_record("a"), b"one")
    with pytest.raises(AlreadyExists):
        await ledger.submit(submit_record("a", n=2), b"two")
    assert await ledger.load() == Load(choices=1, prompt_tokens=3)
    assert len(await ledger.inbox_all()) == 1


async def test_sequence_ids_grow_and_are_consecutive_per_choice(ledger: Ledger) -> None:
    sizes = [1, 4, 2, 1]
    sequence_ids = [
        (await ledger.submit(submit_record(f"r{i}", n=n), b"h")).sequence_id
        for i, n in enumerate(sizes)
    ]
    ends = [first + n for first, n in zip(sequence_ids, sizes, strict=True)]
    assert all(end <= after for end, after in zip(ends, sequence_ids[1:], strict=False))


async def test_the_bound_is_exact_under_concurrency_and_n_counts_n(
    redis_url: str, cell: str
) -> None:
    limits = LedgerLimits(requests_max=20)
    ledgers = [await Ledger.connect(redis_url, cell=cell, limits=limits) for _ in range(3)]
    answers = await asyncio.gather(
        *(ledgers[i % 3].submit(submit_record(f"r{i}", n=3), b"h") for i in range(30)),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert len(refused) == 24, "six requests of three choices fit into twenty"
    assert refused[0].limit == 20
    assert (await ledgers[0].load()).choices == 18
    # Two more choices fit, exactly.
    await ledgers[1].submit(submit_record("two", n=2), b"h")
    with pytest.raises(Overloaded):
        await ledgers[2].submit(submit_record("one more"), b"h")
    for ledger in ledgers:
        await ledger.close()


async def test_prompt_tokens_are_bounded_too(redis_url: str, cell: str) -> None:
    limits = LedgerLimits(prompt_tokens_max=10)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    await ledger.submit(submit_record("a", prompt=range(7)), b"h")
    with pytest.raises(Overloaded) as refusal:
        await ledger.submit(submit_record("b", prompt=range(4)), b"h")
    assert refusal.value.limit == 10
    await ledger.submit(submit_record("c", prompt=range(3)), b"h")
    assert await ledger.load() == Load(choices=2, prompt_tokens=10)
    with pytest.raises(TooLong):
        await ledger.submit(submit_record("d", prompt=range(11)), b"h")
    await ledger.close()


async def test_a_tenant_is_bounded_by_itself_and_releases_what_it_held(ledger: Ledger) -> None:
    bounds = TenantBounds(requests_max=2, prompt_tokens_max=10)
    leader = await PlayLeader.elected(ledger)
    first = await ledger.submit(of_tenant("a", "1", n=2), b"h", bounds)
    with pytest.raises(Overloaded) as refusal:
        await ledger.submit(of_tenant("a", "2"), b"h", bounds)
    error = refusal.value
    assert (error.subject, error.live, error.limit) == ("tenant", 2, 2)
    # A repeat is no new request, and others have their own room.
    assert not (await ledger.submit(of_tenant("a", "1", n=2), b"h", bounds)).is_new
    other = await ledger.submit(of_tenant("b", "1"), b"h", bounds)
    assert await ledger.load("a") == Load(choices=2, prompt_tokens=3)
    assert await ledger.load("b") == Load(choices=1, prompt_tokens=3)
    assert await ledger.load() == Load(choices=3, prompt_tokens=6)
    await leader.finish("a:1", first.sequence_id, n=2)
    assert await ledger.load("a") == Load(choices=0, prompt_tokens=0)
    await ledger.submit(of_tenant("a", "2", prompt=range(8)), b"h", bounds)
    with pytest.raises(Overloaded, match=r"tenant a .live 8, prompt_tokens_max 10"):
        await ledger.submit(of_tenant("a", "3"), b"h", bounds)
    await leader.finish("b:1", other.sequence_id)
    assert await ledger.load("b") == Load(choices=0, prompt_tokens=0)


async def test_tenants_that_came_and_went_leave_no_counters(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    leader = await PlayLeader.elected(ledger)
    for tenant in "abc":
        submitted = await ledger.submit(of_tenant(tenant, "1"), b"h")
        await leader.finish(f"{tenant}:1", submitted.sequence_id)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        found = {key async for key, _ in client.hscan_iter(ledger.keys.load)}
        # And what the results of all of them take, in fifty fields at most.
        assert {key for key in found if not key.startswith((b"results:", b"noted:"))} == {
            b"choices",
            b"prompt_tokens",
        }
    await ledger.close()


async def test_a_tenant_cannot_wait_for_what_its_bounds_never_allow(ledger: Ledger) -> None:
    with pytest.raises(InvalidRequest):
        await ledger.submit(of_tenant("a", "1", n=3), b"h", TenantBounds(requests_max=2))
    with pytest.raises(TooLong):
        await ledger.submit(of_tenant("a", "1"), b"h", TenantBounds(prompt_tokens_max=2))
    assert await ledger.load("a") == Load(choices=0, prompt_tokens=0)


async def test_a_tenants_bound_is_exact_under_concurrency(redis_url: str, cell: str) -> None:
    ledgers = [await Ledger.connect(redis_url, cell=cell) for _ in range(3)]
    bounds = TenantBounds(requests_max=7)
    answers = await asyncio.gather(
        *(ledgers[i % 3].submit(of_tenant("a", str(i)), b"h", bounds) for i in range(30)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Overloaded) for answer in answers) == 23
    assert (await ledgers[0].load("a")).choices == 7
    for ledger in ledgers:
        await ledger.close()


def of_tenant(tenant: str, name: str, **fields: Any) -> SubmitRecord:
    record = submit_record(f"{tenant}:{name}", **fields)
    record.tenant = tenant
    return record


@pytest.mark.parametrize("n", [0, 4097])
async def test_a_number_of_choices_that_can_never_fit_is_invalid(ledger: Ledger, n: int) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await ledger.submit(submit_record("a", n=n), b"h")
    assert refusal.value.field == "n"


@pytest.mark.parametrize("field", ["prompt", "max_tokens"])
async def test_what_the_scheduler_takes_for_granted_is_checked(ledger: Ledger, field: str) -> None:
    """Once in the inbox it would crash every leader that reads it."""
    record = submit_record("a", prompt=() if field == "prompt" else (1,))
    if field == "max_tokens":
        record.sampling.max_tokens = 0
    with pytest.raises(InvalidRequest) as refusal:
        await ledger.submit(record, b"h")
    assert refusal.value.field == field
    assert await ledger.inbox_all() == []


async def test_a_repeat_after_the_end_still_finds_the_same_request(ledger: Ledger) -> None:
    first = await ledger.submit(submit_record("a"), b"h")
    leader = await PlayLeader.elected(ledger)
    await leader.step({first.sequence_id: [5]})
    await leader.finish("a", first.sequence_id)
    again = await ledger.submit(submit_record("a"), b"h")
    assert (again.sequence_id, again.is_new, again.journal_seq) == (first.sequence_id, False, 0)
    assert (await ledger.find("a")).is_finished
    assert await ledger.load() == Load(choices=0, prompt_tokens=0)
    assert await ledger.inbox_all() == []


async def test_find_shows_what_was_submitted(ledger: Ledger) -> None:
    record = submit_record("a", n=2)
    record.render.stop.extend(["\n\n", "END"])
    submitted = await ledger.submit(record, b"h")
    found = await ledger.find("a")
    assert (found.sequence_id, found.n, found.prompt_tokens) == (submitted.sequence_id, 2, 3)
    assert list(found.render.stop) == ["\n\n", "END"]
    assert not found.is_finished
    assert await ledger.result("a") is None
    with pytest.raises(NotFound):
        await ledger.find("b")


async def test_cancels_repeat_without_growing_anything(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(submit_record("a", n=2), b"h")).sequence_id
    stop = FinishReason.FINISH_REASON_STOP
    for _ in range(20):
        assert await ledger.cancel("a", choice=1, reason=stop, output_tokens=4)
    for _ in range(20):
        assert await ledger.cancel("a")
    # The whole request is being cancelled: a choice of it needs no entry of its own any more.
    assert await ledger.cancel("a", choice=0)
    entries = await ledger.inbox_all()
    assert [entry.sequence_id for entry in entries] == [sequence_id] * 3
    one, every = entries[1].record, entries[2].record
    assert isinstance(one, CancelRecord)
    assert isinstance(every, CancelRecord)
    assert (one.choice, one.reason, one.output_tokens) == (1, stop, 4)
    assert not every.HasField("choice")
    assert all(a.entry_id != b.entry_id for a, b in pairwise(entries))


async def test_it_ends_with_the_last_who_waits(ledger: Ledger) -> None:
    """However often the store hears who left."""
    await ledger.submit(submit_record("a"), b"h", waiter="one")
    await ledger.submit(submit_record("a"), b"h", waiter="two")
    await ledger.submit(submit_record("a"), b"h", waiter="two")
    await ledger.wait("a", "three")
    await ledger.wait("unknown", "three")
    for _ in range(2):
        assert await ledger.cancel("a", waiter="one")
        assert await ledger.cancel("a", waiter="two")
    # Whom it goes on without.
    assert await ledger.cancel("a", waiter="three", goes_on=True)
    for waiter in ("one", "two", "three", "nobody"):
        assert await ledger.cancel("a", waiter=waiter)
    assert len(await ledger.inbox_all()) == 1
    await ledger.wait("a", "four")
    assert await ledger.cancel("a", waiter="four")
    assert len(await ledger.inbox_all()) == 2
    with pytest.raises(NotFound):
        await ledger.find("unknown")


async def test_cancelling_what_is_unknown_or_ended(ledger: Ledger) -> None:
    with pytest.raises(NotFound):
        await ledger.cancel("nobody")
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    with pytest.raises(InvalidRequest):
        await ledger.cancel("a", choice=1)
    leader = await PlayLeader.elected(ledger)
    await leader.finish("a", sequence_id)
    assert not await ledger.cancel("a")
    assert await ledger.inbox_all() == []


async def test_a_cancel_the_leader_never_read_goes_with_its_request(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    await ledger.cancel("a")
    await leader.finish("a", sequence_id)
    assert await ledger.inbox_all() == []


async def test_inbox_read_continues_at_the_cursor_and_wakes_on_arrival(ledger: Ledger) -> None:
    await ledger.submit(submit_record("a"), b"h")
    (first,) = await ledger.inbox_read("0-0", block_ms=10)
    assert await ledger.inbox_read(first.entry_id, block_ms=10) == []

    async def read() -> list[InboxEntry]:
        while not (entries := await ledger.inbox_read(first.entry_id, block_ms=4000)):
            pass
        return entries

    waiting = asyncio.create_task(read())
    await ledger.submit(submit_record("b"), b"h")
    (second,) = await asyncio.wait_for(waiting, 60)
    assert second.record.id == "b"


async def test_a_url_or_cell_that_cannot_be_is_a_config_error() -> None:
    with pytest.raises(ConfigError):
        await Ledger.connect("http://localhost")
    with pytest.raises(ConfigError):
        await Ledger.connect("redis://localhost", cell="{a}")
    with pytest.raises(ConfigError, match="requests_max must be at least 1"):
        LedgerLimits(requests_max=0)
    # Beyond what the store counts in, a commit would fail after its first writes.
    with pytest.raises(ConfigError, match=r"result_ttl_s must be in \[1, 315360000\], got 1"):
        LedgerLimits(result_ttl_s=10**16)
