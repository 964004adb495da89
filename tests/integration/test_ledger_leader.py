"""elect, commit, fold and recover on the real server."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from kaiten.v1.common_pb2 import PromptLogprobs
from kaiten.v1.ledger_pb2 import CellRecord, FoldedTokens, JournalRecord, SubmitRecord
from ledger import Candidate, Commit, Fenced, FoldPart, Ledger, LedgerLimits, Load
from service_kit.clock import SystemClock
from service_kit.errors import NotFound, Unavailable
from tests.support.play_leader import PlayLeader, outlive_results, stopped, submit_record


async def test_an_election_is_decided_once_and_a_repeat_is_the_same_answer(ledger: Ledger) -> None:
    assert await ledger.leader() is None
    first = await ledger.elect("here", 7)
    assert first is not None
    assert first.after_seq == 0
    assert first.journal_seq > 0
    assert await ledger.elect("here", 7) == first
    assert await ledger.elect("there", 8) is None
    lease = await ledger.leader()
    assert lease is not None
    assert (lease.nonce, lease.address, lease.epoch) == (7, "here", first.epoch)


async def test_a_lease_that_moved_since_it_was_seen_cannot_be_stolen(ledger: Ledger) -> None:
    first = await ledger.elect("here", 7)
    assert first is not None
    seen = await ledger.leader()
    await ledger.renew(first, CellRecord(waiting=3))
    assert await ledger.elect("there", 8, seen=seen) is None
    second = await ledger.elect("there", 8, seen=await ledger.leader())
    assert second is not None
    assert second.epoch > first.epoch
    with pytest.raises(Fenced):
        await ledger.renew(first, CellRecord())
    view = await ledger.cell()
    assert view.record is not None
    assert view.record.waiting == 3


async def test_of_a_leader_that_has_ended_no_renewal_counts_but_its_successors_do(
    ledger: Ledger,
) -> None:
    """What it sent before it died may arrive after anybody looked."""
    first = await ledger.elect("here", 7)
    assert first is not None
    seen = await ledger.leader()
    await ledger.renew(first, CellRecord())
    second = await ledger.elect("there", 8, seen=seen, has_ended=True)
    assert second is not None
    # The same news once more, too late: somebody else leads by now.
    assert await ledger.elect("elsewhere", 9, seen=seen, has_ended=True) is None
    assert await ledger.elect("elsewhere", 9, has_ended=True) is None


async def test_of_two_candidates_exactly_one_leads_until_it_resigns(
    redis_url: str, cell: str
) -> None:
    ledgers = [await Ledger.connect(redis_url, cell=cell) for _ in range(2)]
    campaigns = {
        asyncio.create_task(Candidate(ledger, SystemClock(), 30.0).campaign()): ledger
        for ledger in ledgers
    }
    done, waiting = await asyncio.wait(campaigns, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    assert (len(done), len(waiting)) == (1, 1)
    winner, loser = done.pop(), waiting.pop()
    loser.cancel()
    await campaigns[winner].resign(winner.result())
    # Resigned: the next campaign does not wait for the TTL.
    successor = await asyncio.wait_for(
        Candidate(campaigns[loser], SystemClock(), 30.0).campaign(), 60
    )
    assert successor.epoch > winner.result().epoch
    # An old leader's late resignation must not unseat the new one.
    await campaigns[winner].resign(winner.result())
    lease = await ledgers[0].leader()
    assert lease is not None
    assert lease.nonce == successor.nonce
    for ledger in ledgers:
        await ledger.close()


async def test_a_candidate_steals_from_a_silent_leader_after_the_ttl(ledger: Ledger) -> None:
    dead = await ledger.elect("dead", 7)
    assert dead is not None
    loop = asyncio.get_running_loop()
    started = loop.time()
    successor = await asyncio.wait_for(Candidate(ledger, SystemClock(), 0.4).campaign(), 60)
    assert successor.epoch > dead.epoch
    assert loop.time() - started >= 0.4


async def test_a_candidate_that_was_not_told_finds_that_it_leads(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away for as long as it was asked: nobody waits for its own lease to run out."""
    elect = ledger.elect

    async def lose(address: str, nonce: int, **rest: Any) -> None:
        monkeypatch.setattr(ledger, "elect", elect)
        await elect(address, nonce, **rest)
        raise Unavailable("the answer was lost")

    monkeypatch.setattr(ledger, "elect", lose)
    candidate = Candidate(ledger, SystemClock(), 3600.0)
    leader = await asyncio.wait_for(candidate.campaign(), 60)
    lease = await ledger.leader()
    assert lease is not None
    assert (lease.epoch, lease.nonce) == (leader.epoch, leader.nonce)


async def test_commit_fences_repeats_and_gaps(ledger: Ledger) -> None:
    leader = await PlayLeader.elected(ledger)
    first = await leader.step({1: [10]})
    await ledger.commit(leader.leader, first)
    with pytest.raises(Fenced, match=f"the journal is at {leader.base + 1}"):
        await ledger.commit(leader.leader, JournalRecord(seq=leader.base + 3))
    successor = await PlayLeader.elected(ledger, nonce=2)
    with pytest.raises(Fenced, match=f"epoch {leader.leader.epoch} no longer leads"):
        await ledger.commit(leader.leader, JournalRecord(seq=leader.base + 2))
    stranger = replace(successor.leader, nonce=99)
    with pytest.raises(Fenced):
        await ledger.commit(stranger, JournalRecord(seq=successor.base + 1))
    # What the old leader committed is not the new one's to repeat.
    with pytest.raises(Fenced):
        await ledger.commit(successor.leader, JournalRecord(seq=leader.base + 1))
    with pytest.raises(Fenced):
        await ledger.commit(successor.leader, JournalRecord(seq=successor.base))
    await successor.step({1: [11]})
    with pytest.raises(Fenced):
        await ledger.fold(leader.leader, leader.base + 1, {})
    lease = await ledger.leader()
    assert lease is not None
    assert lease.journal_seq == successor.base + 1
    assert successor.leader.after_seq == leader.base + 1


async def test_a_batch_may_be_sent_again_as_a_whole(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    records = [leader.record({sequence_id: [i]}) for i in range(5)]
    batch = [Commit(record) for record in records]
    await ledger.commit_many(leader.leader, batch[:3])
    await ledger.commit_many(leader.leader, batch)
    await ledger.commit_many(leader.leader, batch)
    history = await ledger.history(sequence_id, through_seq=leader.seq)
    assert list(history.output.token_ids) == [0, 1, 2, 3, 4]
    assert history.finished is None


async def test_a_reader_who_waits_gets_a_batch_as_a_whole(ledger: Ledger, redis_url: str) -> None:
    leader = await PlayLeader.elected(ledger)
    batch = [Commit(leader.record({1: [i]})) for i in range(4)]

    async def read() -> list[JournalRecord]:
        # A wait is cut to five seconds.
        while not (records := await ledger.journal_read(0, block_ms=10_000, count=64)):
            pass
        return records

    reader = asyncio.create_task(read())
    async with Redis.from_url(redis_url) as store, asyncio.timeout(60):
        while not any(  # noqa: ASYNC110 - the condition is the server's
            client["flags"] == "b" for client in await store.client_list()
        ):
            await asyncio.sleep(0.002)
    await ledger.commit_many(leader.leader, batch)
    assert [record.seq - leader.base for record in await reader] == [1, 2, 3, 4]


async def test_a_fenced_batch_applies_nothing_after_the_fence(ledger: Ledger) -> None:
    leader = await PlayLeader.elected(ledger)
    batch = [Commit(leader.record({1: [i]})) for i in range(4)]
    successor = await PlayLeader.elected(ledger, nonce=2)
    with pytest.raises(Fenced):
        await ledger.commit_many(leader.leader, batch)
    lease = await ledger.leader()
    assert lease is not None
    assert lease.journal_seq == successor.base


async def test_ending_twice_releases_the_counters_once(ledger: Ledger) -> None:
    first, _ = [
        (await ledger.submit(submit_record(id, n=2), b"h")).sequence_id for id in ("a", "b")
    ]
    leader = await PlayLeader.elected(ledger)
    await leader.finish("a", first, n=2)
    await leader.finish("a", first, n=2)
    assert await ledger.load() == Load(choices=2, prompt_tokens=3)


async def test_an_ending_that_does_not_match_its_request_is_refused_whole(ledger: Ledger) -> None:
    first = (await ledger.submit(submit_record("a", n=2), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    with pytest.raises(Fenced, match="differ"):
        await leader.step({}, (), [leader.ending("a", first, n=1)])
    lease = await ledger.leader()
    assert lease is not None
    assert lease.journal_seq == leader.base
    assert await ledger.load() == Load(choices=2, prompt_tokens=3)


async def test_folding_is_idempotent_and_loses_no_token_at_any_point(ledger: Ledger) -> None:
    sequence_ids = [(await ledger.submit(submit_record(id), b"h")).sequence_id for id in ("a", "b")]
    leader = await PlayLeader.elected(ledger)
    for step in range(1, 13):
        await leader.step({sequence_ids[0]: [step, step + 100], sequence_ids[1]: [step + 500]})
        if step % 3 == 0:
            due = list(leader.unfolded)
            await leader.fold(leader.seq - 1, sequence_ids)
            leader.unfolded = due
            # The same fold again, as after a lost reply.
            await leader.fold(leader.seq - 1, sequence_ids)
        for sequence_id in sequence_ids:
            history = await ledger.history(sequence_id, through_seq=leader.seq)
            assert list(history.output.token_ids) == leader.outputs[sequence_id]
    with pytest.raises(Fenced, match=f"the journal is at {leader.base + 12}"):
        await ledger.fold(leader.leader, leader.base + 20, {})


async def test_a_leader_that_ends_amid_a_fold_loses_no_token_and_folds_none_twice(
    ledger: Ledger,
) -> None:
    sequence_ids = [(await ledger.submit(submit_record(id), b"h")).sequence_id for id in "abc"]
    first = await PlayLeader.elected(ledger)
    for token in range(6):
        await first.step({sequence_id: [token] for sequence_id in sequence_ids})
    await first.fold(first.base + 4, sequence_ids, parts=3, ended_by=2)
    with pytest.raises(Fenced, match="the fold is at 0"):
        await ledger.fold(first.leader, first.base + 4, {}, part=FoldPart(3, 4))

    second = await PlayLeader.elected(ledger, nonce=2)
    recovered = await ledger.recover(second.leader)
    assert [list(output.token_ids) for output in recovered.tokens.values()] == [[*range(6)]] * 3
    assert sorted(recovered.folded_counts.values()) == [0, 4, 4]
    rest = {
        sequence_id: FoldedTokens(token_ids=range(count, 6))
        for sequence_id, count in recovered.folded_counts.items()
    }
    await ledger.fold(second.leader, second.base, rest)
    third = await PlayLeader.elected(ledger, nonce=3)
    recovered = await ledger.recover(third.leader)
    assert [list(output.token_ids) for output in recovered.tokens.values()] == [[*range(6)]] * 3
    assert set(recovered.folded_counts.values()) == {6}


async def test_a_fold_built_on_another_state_is_refused(redis_url: str, cell: str) -> None:
    one, two = [await Ledger.connect(redis_url, cell=cell) for _ in range(2)]
    leader = await PlayLeader.elected(one)
    for token in range(4):
        await leader.step({1: [token]})
    await two.fold(leader.leader, 0, {})
    await leader.fold(leader.base + 2, [1])
    with pytest.raises(Fenced, match=f"the fold is at {leader.base + 2}"):
        await two.fold(leader.leader, leader.base + 3, {1: FoldedTokens(token_ids=[0, 1, 2])})
    for ledger in (one, two):
        await ledger.close()


async def test_a_fold_never_revives_an_ended_sequence(ledger: Ledger, redis_url: str) -> None:
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    await leader.step({sequence_id: [1, 2]})
    await leader.finish("a", sequence_id)
    await leader.fold(leader.seq, [sequence_id])
    client = Redis.from_url(redis_url)
    assert await client.exists(ledger.keys.tokens(sequence_id)) == 0
    await client.aclose()


async def test_logprobs_stay_beside_their_tokens_through_a_fold(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    await leader.step({sequence_id: [3, 4]}, with_logprobs=True)
    await leader.step({sequence_id: [5]}, with_logprobs=True)
    await leader.fold(leader.base + 1, [sequence_id])
    history = await ledger.history(sequence_id, through_seq=leader.seq)
    assert [entry.logprob for entry in history.output.logprobs] == [-3.0, -4.0, -5.0]


async def test_recover_returns_every_live_request_with_all_its_tokens(
    redis_url: str, cell: str
) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    for index in range(300):
        await ledger.submit(submit_record(f"r{index}", n=1 + index % 2), b"h")
    entries = await ledger.inbox_all()
    leader = await PlayLeader.elected(ledger)
    sequence_ids = [s for e in entries for s in range(e.sequence_id, e.sequence_id + e.record.n)]
    token_of = {sequence_id: 10 * place for place, sequence_id in enumerate(sequence_ids)}
    for token in range(3):
        await leader.step({s: [token_of[s] + token] for s in sequence_ids})
    # r1 has two choices: the second ends and is folded away; r0 ends altogether.
    ended = sequence_ids[2]
    await leader.step({}, [stopped(ended, 2)])
    await leader.finish("r0", sequence_ids[0])
    await leader.fold(leader.seq, sequence_ids[1:])
    await leader.step({s: [token_of[s] + 3] for s in sequence_ids[1:] if s != ended})
    await ledger.cancel("r7")

    successor = await PlayLeader.elected(ledger, nonce=2)
    recovered = await ledger.recover(successor.leader)
    assert [e.record.id for e in recovered.entries][:299] == [f"r{i}" for i in range(1, 300)]
    assert recovered.entries[-1].record.id == "r7"
    assert recovered.cursor == recovered.entries[-1].entry_id
    assert recovered.journal_seq == successor.base
    assert recovered.tokens.keys() == set(sequence_ids[1:])
    assert {s: list(t.token_ids) for s, t in recovered.tokens.items()} == {
        sequence_id: leader.outputs[sequence_id] for sequence_id in sequence_ids[1:]
    }
    assert {s: f.output_tokens for s, f in recovered.finished.items()} == {ended: 2}
    with pytest.raises(Fenced):
        await ledger.recover(leader.leader)
    await ledger.close()


async def test_history_of_a_choice_that_ended_before_its_request(ledger: Ledger) -> None:
    one = (await ledger.submit(submit_record("a", n=2), b"h")).sequence_id
    two = one + 1
    leader = await PlayLeader.elected(ledger)
    await leader.step({one: [1, 2, 3], two: [4]})
    # A stop string ended it at one token; the other two never happened.
    await leader.step({two: [5]}, [stopped(one, 1)])
    for _ in range(2):
        output, finished = await ledger.history(one, through_seq=leader.seq)
        assert (list(output.token_ids), finished) == ([1], stopped(one, 1))
        await leader.fold(leader.seq, [one, two])
    output, finished = await ledger.history(two, through_seq=leader.seq)
    assert (list(output.token_ids), finished) == ([4, 5], None)


async def test_a_long_unfolded_journal_is_recovered_page_by_page(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(submit_record("a"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    batch = [Commit(leader.record({sequence_id: [token]})) for token in range(600)]
    await ledger.commit_many(leader.leader, batch)
    await ledger.commit_many(leader.leader, [])
    recovered = await ledger.recover(leader.leader)
    assert list(recovered.tokens[sequence_id].token_ids) == list(range(600))


async def test_the_cells_clock_moves_on(ledger: Ledger) -> None:
    first, second = await ledger.now_ns(), await ledger.now_ns()
    assert 0 < second - first < 60_000_000_000


async def test_a_result_is_kept_for_its_time_and_then_the_id_is_free(
    redis_url: str, cell: str
) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell, limits=LedgerLimits(result_ttl_s=100))
    sequence_id = (await ledger.submit(submit_record("a"), b"one")).sequence_id
    leader = await PlayLeader.elected(ledger)
    await leader.step({sequence_id: [4]})
    await leader.finish("a", sequence_id)
    await leader.fold(leader.seq, [])
    result = await ledger.result("a")
    assert result is not None
    assert list(result.choices[0].output.token_ids) == [4]
    await outlive_results(redis_url, cell)
    assert await ledger.result("a") is None
    with pytest.raises(NotFound):
        await ledger.find("a")
    with pytest.raises(NotFound):
        await ledger.history(sequence_id, through_seq=leader.seq)
    again = await ledger.submit(submit_record("a"), b"two")
    assert (again.is_new, again.journal_seq) == (True, leader.seq)
    assert again.sequence_id > sequence_id
    await ledger.close()


async def test_nothing_is_left_behind(redis_url: str, cell: str) -> None:
    limits = LedgerLimits(result_ttl_s=3200)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    leader = await PlayLeader.elected(ledger)
    for index in range(10):
        submitted = await ledger.submit(submit_record(f"r{index}", n=2), b"h")
        first, second = submitted.sequence_id, submitted.sequence_id + 1
        await leader.step({first: [1], second: [2]}, [stopped(first, 1)])
        await leader.fold(leader.seq, [first, second])
        if index % 2:
            await ledger.cancel(f"r{index}")
        await leader.finish(f"r{index}", first, n=2)
    await leader.fold(leader.seq, [])

    client = Redis.from_url(redis_url, decode_responses=True)
    prefix = ledger.keys.prefix
    found = {key.removeprefix(prefix) async for key in client.scan_iter(f"{prefix}*", count=1000)}
    lasting = {key for key in found if await client.ttl(prefix + key) == -1}
    assert lasting == {"meta", "lease", "inbox", "journal", "load"}
    counted = ledger.keys.results("default").removeprefix(prefix)
    assert 3200 < await client.ttl(prefix + counted) <= 3300, "until the last result has left"
    lasting |= {counted}
    assert {await client.ttl(prefix + key) <= 3200 for key in found - lasting} == {True}
    assert len(found - lasting) == 10 * (1 + 1 + 2), "request, result, and two sequence ids each"
    assert await client.xlen(ledger.keys.inbox) == 0
    assert await client.xlen(ledger.keys.journal) == 0
    assert await ledger.load() == Load(choices=0, prompt_tokens=0)
    await client.aclose()
    await ledger.close()


def run(start: int, count: int, k: int = 2) -> PromptLogprobs:
    """Prompt positions [start, start + count); the values say which."""
    return PromptLogprobs(
        position=start,
        token_count=count,
        logprobs=[-float(start + i) for i in range(count)],
        top_token_ids=[10 * (start + i) + j for i in range(count) for j in range(k)],
        top_logprobs=[-float(start + i) for i in range(count) for j in range(k)],
    )


def prompt_logprobs_record(id: str, prompt: Sequence[int]) -> SubmitRecord:
    record = submit_record(id, prompt=prompt)
    record.sampling.prompt_logprobs = 2
    return record


async def test_a_prompt_is_explained_piece_by_piece_with_the_commits(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(prompt_logprobs_record("a", range(9)), b"h")).sequence_id
    plain = (await ledger.submit(submit_record("b"), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    batch = [
        Commit(leader.record({}), prompt_logprobs={sequence_id: run(1, 3)}),
        Commit(leader.record({sequence_id: [7]}), prompt_logprobs={sequence_id: run(4, 5)}),
    ]
    await ledger.commit_many(leader.leader, batch[:1])
    assert (await ledger.recover(leader.leader)).prompt_logprobs_from == {sequence_id: 4}
    # The first is sent again, as after a lost reply.
    await ledger.commit_many(leader.leader, batch)
    assert await ledger.prompt_logprobs(sequence_id) == run(1, 8)
    assert (await ledger.recover(leader.leader)).prompt_logprobs_from == {sequence_id: 9}
    assert (await ledger.prompt_logprobs(plain)).token_count == 0


async def test_a_fenced_leader_explains_nothing(ledger: Ledger) -> None:
    sequence_id = (await ledger.submit(prompt_logprobs_record("a", range(9)), b"h")).sequence_id
    leader = await PlayLeader.elected(ledger)
    await PlayLeader.elected(ledger, nonce=2)
    piece = Commit(leader.record({}), prompt_logprobs={sequence_id: run(1, 3)})
    with pytest.raises(Fenced):
        await ledger.commit_many(leader.leader, [piece])
    assert (await ledger.prompt_logprobs(sequence_id)).token_count == 0


async def test_the_explained_prompt_is_kept_as_long_as_the_result(ledger: Ledger) -> None:
    """Also when the last piece comes with the end, beside drops and choices that go on."""
    first = await ledger.submit(prompt_logprobs_record("a", range(9)), b"h")
    other = await ledger.submit(submit_record("b", n=2), b"h")
    leader = await PlayLeader.elected(ledger)
    record = leader.record(
        {first.sequence_id: [7]}, [stopped(first.sequence_id, 1), stopped(other.sequence_id, 0)]
    )
    commit = Commit(
        record,
        [leader.ending("a", first.sequence_id, prompt_tokens=9)],
        prompt_logprobs={first.sequence_id: run(1, 8)},
    )
    await ledger.commit_many(leader.leader, [commit])
    assert await ledger.prompt_logprobs(first.sequence_id) == run(1, 8)
    key = ledger.keys.prompt_logprobs(first.sequence_id)
    (ttl_s,) = await ledger._store.commands((("TTL", key),))
    assert 0 < ttl_s <= ledger._store.limits.result_ttl_s
    ended = await ledger.history(other.sequence_id, through_seq=leader.seq)
    assert ended.finished == stopped(other.sequence_id, 0)
    assert (await ledger.load()).choices == 2
