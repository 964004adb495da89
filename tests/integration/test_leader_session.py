"""A session on a real store, in this process: its loop, its lease, and whom it takes for silent."""

import asyncio
import itertools
import socket
from typing import Any

import pytest
from structlog.testing import capture_logs

from kaiten.v1.common_pb2 import FEATURE_LOGPROBS, FINISH_REASON_ERROR
from kaiten.v1.ledger_pb2 import CellRecord, SequenceFinished
from kaiten.v1.worker_service_pb2 import Plan, StepResult, StepTimings
from ledger import Candidate, Commit, Ledger
from ledger.commits import PAGE_ENTRIES
from scheduler_svc.commit_queue import BATCH_MAX, CommitQueue
from scheduler_svc.core.commands import Cancel, HandedOver, MakePlan, Submit
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import FLEX_PRIORITY, Handover, Request, SequencePast
from scheduler_svc.core.workers import HOLD_US
from scheduler_svc.journal import INPUTS_MAX
from scheduler_svc.leader_session import LeaderSession
from scheduler_svc.links import WorkerLink
from scheduler_svc.settings import SchedulerSettings
from service_kit.clock import SystemClock
from service_kit.errors import OutOfOrder
from tests.support.answers import until
from tests.support.leading import NOWHERE, TTL_S, JumpingClock, leading, worker
from tests.support.play_leader import PlayLeader, stopped, submit_record


def _fail(*_: object, **__: object) -> None:
    raise AssertionError("on purpose")


async def renewals(ledger: Ledger) -> int:
    lease = await ledger.leader()
    assert lease is not None
    return lease.renew_seq


async def test_a_leader_that_takes_no_turns_is_not_renewed(ledger: Ledger) -> None:
    async with leading(ledger) as (session, _):
        rival = asyncio.create_task(Candidate(ledger, SystemClock(), TTL_S).campaign())
        seen = await renewals(ledger)

        async def has_renewed() -> bool:
            return await renewals(ledger) > seen + 10

        await until(has_renewed, "more renewals than a lifetime needs")
        assert not rival.done()
        # What the loop waits for now is never set.
        session._turn_asked = asyncio.Event()
        await asyncio.wait_for(rival, 60)


@pytest.mark.parametrize("name", ["turns", "commits", "inbox", "renew", "tick"])
async def test_a_loop_that_ends_unasked_ends_the_leadership(ledger: Ledger, name: str) -> None:
    """A stray cancellation, too: nobody would read the inbox, and the lease be renewed for ever."""
    async with leading(ledger) as (_, running):
        (loop,) = [task for task in asyncio.all_tasks() if task.get_name() == name]

        def is_cancelled() -> bool:
            """What it waits for may have come, and it not have gone on yet."""
            waits_for = loop._fut_waiter  # type: ignore[attr-defined]
            return waits_for is not None and bool(waits_for.cancel())

        await until(is_cancelled, "it waits for something")
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(running, 60)
        assert ended.value.subgroup(RuntimeError) is not None


class HurriedClock(SystemClock):
    """Every look at it takes a while."""

    def __init__(self) -> None:
        self._looks = itertools.count()

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + next(self._looks) * 100_000_000


async def test_a_recovery_that_takes_long_keeps_the_lease(ledger: Ledger) -> None:
    """Page by page, and request by request: a standby would begin all over again."""
    for number in range(3 * PAGE_ENTRIES):
        await ledger.submit(submit_record(str(number)), b"")
    before = await ledger.leader()
    assert before is None
    async with leading(ledger, HurriedClock()):
        lease = await ledger.leader()
        assert lease is not None
        # Of each the election is one; a lifetime is over after ten looks.
        assert lease.renew_seq > 3 * PAGE_ENTRIES / 10


async def test_a_renewal_while_recovering_leaves_what_was_said_of_the_cell(ledger: Ledger) -> None:
    first = await ledger.elect("here", 7)
    assert first is not None
    await ledger.renew(first, CellRecord(waiting=3))
    await ledger.renew(first, None)
    view = await ledger.cell()
    assert view.record is not None
    assert view.lease is not None
    assert (view.record.waiting, view.lease.renew_seq) == (3, 3)


async def test_what_a_leader_has_learned_of_a_request_the_next_one_knows(ledger: Ledger) -> None:
    """Or a request that kills workers would have them all again."""
    record, trace = submit_record("r"), f"00-{1:032x}-{2:016x}-01"
    record.traceparent = trace
    accepted = await ledger.submit(record, b"")
    past = SequencePast(sequence_id=accepted.sequence_id, num_preemptions=2, deaths=1, furthest=17)
    learned = Handover(sequences=(past,), tenants=(("acme", 900),))

    async def is_told() -> bool:
        record = (await ledger.cell()).record
        return record is not None and len(record.handover.sequences) == 1

    async with leading(ledger) as (session, _):
        assert session.core.handover() == Handover()
        session.tell(HandedOver(handover=learned))
        await until(is_told, "a renewal")
    async with leading(ledger) as (session, _):
        assert session.core.handover() == learned
        # Its spans go on in the trace in which they began.
        assert session._requests.traceparent(accepted.sequence_id) == trace


async def test_of_a_request_all_choices_count_also_those_that_ended_under_an_earlier_leader(
    ledger: Ledger,
) -> None:
    accepted = await ledger.submit(submit_record("r", n=2), b"")
    first = accepted.sequence_id
    earlier = await PlayLeader.elected(ledger)
    failed = SequenceFinished(
        sequence_id=first, reason=FINISH_REASON_ERROR, output_tokens=4, error="on purpose"
    )
    await earlier.step({first: [5, 6, 7, 8], first + 1: [9, 9]}, [failed])
    async with leading(ledger) as (session, _):
        session.tell(Cancel(sequence_id=first))
        await until(lambda: session._meters.output_tokens, "its end is committed")
        assert session._meters.output_tokens == (4 + 2) / 2
        assert {k: n for k, n in session._meters._ended.items() if n} == {"error": 1}


async def test_what_a_deposed_leader_decides_is_its_successors_to_count(ledger: Ledger) -> None:
    """Seen: what it could not commit was counted by both."""
    first = (await ledger.submit(submit_record("r"), b"")).sequence_id
    async with leading(ledger) as (session, running):
        lease = await ledger.leader()
        assert await ledger.elect("there", 2, seen=lease, has_ended=True) is not None
        session.tell(Cancel(sequence_id=first))
        with pytest.raises(ExceptionGroup):
            await asyncio.wait_for(running, 60)
        meters = session._meters
        assert meters.live == 1
        meters.leads(None)
        assert (meters.live, meters._counts["requests_handed_over"]) == (0, 1)
        assert not meters._ended.total()


async def test_a_new_leader_says_whose_workers_it_has_yet_to_reach(ledger: Ledger) -> None:
    """What they can do is accepted meanwhile: it waits for them, and for a moment only."""
    first = await ledger.elect("here", 7)
    assert first is not None
    # It takes connections, and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        known = CellRecord(model=worker("w"), workers_ready=1, worker_addresses=[address])
        await ledger.renew(first, known)
        await ledger.resign(first)
        clock = JumpingClock()
        async with leading(ledger, clock) as (session, _):
            told = session.cell()
            assert (told.workers_ready, told.workers_expected) == (0, 1)
            assert (told.model, told.worker_addresses) == (known.model, known.worker_addresses)
            clock.ahead_ns += 3_000_000_000
            told = session.cell()
            assert (told.workers_expected, *told.worker_addresses) == (0,)
            assert not told.HasField("model")


async def test_nobody_joins_a_leadership_that_is_ending(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part has failed, and another takes its time to end."""
    is_told, may_end = asyncio.Event(), asyncio.Event()

    async def lingering(_: LeaderSession) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_told.set()
            await may_end.wait()

    monkeypatch.setattr(LeaderSession, "_tick", lingering)
    async with leading(ledger) as (session, running):
        monkeypatch.setattr(session, "_fold", _fail)
        await asyncio.wait_for(is_told.wait(), 60)
        with pytest.raises(OutOfOrder, match="this leadership is just ending"), session.called():
            session.roster.register(NOWHERE, worker("w"))
        assert not session.roster.links
        may_end.set()
        with pytest.raises(ExceptionGroup):
            await asyncio.wait_for(running, 60)


async def test_an_error_in_a_turn_ends_the_leadership(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leading(ledger) as (session, running):
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "turns"]
        monkeypatch.setattr(session, "_fold", _fail)
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(running, 60)
        assert task.done()
        assert ended.value.subgroup(AssertionError) is not None


async def test_an_error_in_a_workers_call_ends_the_leadership_too(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would answer INTERNAL and go on, with a core that is half changed."""
    async with leading(ledger) as (session, running):
        session.roster.register(NOWHERE, worker("w"))
        session.roster.link_opened(session.roster.links["w"])
        monkeypatch.setattr(Scheduler, "apply", _fail)
        with pytest.raises(AssertionError), session.called():
            session.roster.heartbeat("w", is_draining=True)
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(running, 60)
        assert ended.value.subgroup(AssertionError) is not None


async def test_a_pause_of_ours_is_not_a_workers_silence(ledger: Ledger) -> None:
    clock = JumpingClock()
    async with leading(ledger, clock, worker_timeout_ms=5000) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        link = session.roster.links["w"]
        clock.ahead_ns += 3_600_000_000_000
        await until(lambda: link.silent_ns, "a tick")
        assert session.roster.heartbeat("w", is_draining=False) is False
        assert link.silent_ns == 0


async def test_a_worker_that_says_nothing_is_forgotten(ledger: Ledger) -> None:
    async with leading(ledger, worker_timeout_ms=600) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        await until(lambda: not session.roster.links, "the worker is given up")
        assert session.roster.heartbeat("w", is_draining=False) is None


def break_off(session: LeaderSession, boot_id: str) -> WorkerLink:
    """A worker had a stream, and it broke under a request."""
    session.roster.register(NOWHERE, worker(boot_id))
    link = session.roster.links[boot_id]
    session.roster.link_opened(link)
    link._closed("UNAVAILABLE: reset", is_excused=False, is_refusal=False)
    assert link.broke
    return link


async def test_a_worker_without_a_stream_that_is_still_heard_of_lives(ledger: Ledger) -> None:
    async with leading(ledger, worker_timeout_ms=600) as (session, _):
        link = break_off(session, "w")

        def is_judged() -> bool:
            assert session.roster.heartbeat("w", is_draining=False) is False
            return not link.broke

        await until(is_judged, "the verdict")
        assert list(session.roster.links) == ["w"]


async def test_another_process_at_its_address_says_that_a_worker_is_dead(ledger: Ledger) -> None:
    async with leading(ledger) as (session, _):
        break_off(session, "w")
        with capture_logs() as logs:
            session.roster.register(NOWHERE, worker("successor"))
        (verdict,) = [entry for entry in logs if entry["event"] == "worker.judged"]
        assert (verdict["worker_id"], verdict["is_crash"]) == ("w", True)
        assert verdict["reason"] == "UNAVAILABLE: reset"
        assert list(session.roster.links) == ["successor"]


async def test_nobody_takes_a_workers_place_by_its_boot_id(ledger: Ledger) -> None:
    """Neither with a stream nor while it is dialled; once it is forgotten, it may be elsewhere."""
    async with leading(ledger, worker_timeout_ms=600) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        link = session.roster.links["w"]
        session.roster.link_opened(link)
        with pytest.raises(OutOfOrder, match=f"worker w is at {NOWHERE}, and cannot be at"):
            session.roster.register("127.0.0.1:10", worker("w"))
        assert session.roster.links == {"w": link}
        assert "w" in session.core.workers
        await until(lambda: not session.roster.links, "it is silent, and forgotten")
        session.roster.register("127.0.0.1:10", worker("w"))


async def test_what_the_core_is_told_is_recorded_though_nothing_comes_of_it(
    ledger: Ledger,
) -> None:
    """A worker whose stream opens and breaks for hours: not one record, beyond every bound."""
    async with leading(ledger) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        link = session.roster.links["w"]
        # Asked first: the record may be there as soon as anybody awaits.
        before = await journal_seq(ledger)
        for _ in range(INPUTS_MAX):
            session.roster.link_opened(link)
            session.roster.link_closed(link, "broken", is_crash=None)

        async def is_recorded() -> bool:
            return await journal_seq(ledger) > before

        await until(is_recorded, "a record of inputs alone")
        (record,) = await ledger.journal_read(before, block_ms=1, count=9)
        assert len(record.inputs) == 2 * INPUTS_MAX
        assert not record.token_ids


async def journal_seq(ledger: Ledger) -> int:
    lease = await ledger.leader()
    assert lease is not None
    return lease.journal_seq


async def test_a_result_is_a_sign_of_life(ledger: Ledger) -> None:
    async with leading(ledger) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        link = session.roster.links["w"]
        link.silent_ns = 1
        endless = StepTimings(forward_us=(1 << 64) - 1, sample_us=(1 << 64) - 1)
        before_ns = link.step_ns_max
        session.roster.step_arrived(link, StepResult(boot_id="another", timings=endless))
        assert link.silent_ns == 0
        assert link._rejections == 1
        assert (link.step_ns_max, link.expected_step_us(0)) == (before_ns, 0), "it is not believed"


async def test_books_are_looked_through_once_a_minute_and_one_worker_a_turn(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at every block takes long, and in a quiet cell every request's end makes it idle."""
    clock = JumpingClock()
    async with leading(ledger, clock, worker_timeout_ms=10**9) as (session, _):
        for boot_id in ("v", "w"):
            session.roster.register(f"unix:/nowhere/{boot_id}", worker(boot_id))
            session.roster.link_opened(session.roster.links[boot_id])
        check = session._idle_check
        await until(lambda: check._was_idle and not check._unchecked, "looked through")
        checked: list[str | None] = []
        monkeypatch.setattr(Scheduler, "check", lambda core, who=None: checked.append(who))
        for _ in range(5):
            check._was_idle = False  # as if a request had just ended
            session._turn()
        assert checked == [], "it was less than a minute ago"
        clock.ahead_ns += 61_000_000_000
        check._was_idle = False
        for count in range(1, 4):
            session._turn()
            assert len(checked) == count
        assert set(checked) == {None, "v", "w"}


async def test_a_worker_whose_step_is_overdue_is_given_nothing_until_it_answers(
    ledger: Ledger,
) -> None:
    """Its heartbeats go on: only its step does not come back."""
    clock = JumpingClock()
    async with leading(ledger, clock, worker_timeout_ms=10**9) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        link = session.roster.links["w"]
        session.roster.link_opened(link)
        core_worker = session.core.workers["w"]
        link.waited_ns = 10**15
        await until(lambda: not link.waited_ns, "a tick: it owes nothing")
        request = Request(id="r", sequence_id=1, prompt=(1,), max_tokens=9, arrived_ns=0)
        session.core.apply(Submit(request=request), 0)
        assert session.core.apply(MakePlan(worker_id="w"), 0).plan is not None
        assert not core_worker.is_late
        link.waited_ns = 10**15
        await until(lambda: core_worker.is_late, "a tick: it owes a step")


async def test_a_plan_for_which_it_was_early_is_made_in_time(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a timer: nothing else happens that would ask for it."""
    sent: list[Plan] = []
    monkeypatch.setattr(WorkerLink, "is_open", True)
    monkeypatch.setattr(WorkerLink, "send", lambda link, plan: sent.append(plan))
    async with leading(ledger, batch_gap_ms=1000, lease_steps_max=1) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        session.roster.link_opened(session.roster.links["w"])
        request = Request(
            id="r", sequence_id=1, prompt=(1,), max_tokens=9, arrived_ns=0, priority=FLEX_PRIORITY
        )
        session.core.apply(Submit(request=request), 0)
        assert session.core.apply(MakePlan(worker_id="w"), 0).plan is not None
        due_ns = session.now_ns() + 30_000_000
        session.core.workers["w"].step_end_ns = due_ns + HOLD_US * 1000
        session._ask_again("w")
        await until(lambda: sent, "the plan behind it")
        assert session.now_ns() >= due_ns
        # A store that is behind is counted as a reason, though nobody is asked.
        session._commits.steps_ahead = 10**9
        session._concerned["w"] = None
        session._plan(session.now_ns())
        assert session._meters._passed_over["plan", "store_behind"] == 1


async def test_many_that_end_at_once_keep_nobody_who_runs_from_plans(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record for each: the store takes as long as for steps, but none of them was computed."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Ledger, "commit_many", never)
    async with leading(ledger, uncommitted_steps_max=4) as (session, _):
        for number in range(1, 10):
            accepted = await ledger.submit(submit_record(str(number)), b"")
            await until(lambda: session.core.live_count, "it is taken in")
            session.tell(Cancel(sequence_id=accepted.sequence_id, choice=None))
        assert session.commit_backlog >= 9
        session._look_back()
        assert not session.core.is_store_behind


async def test_a_turn_with_many_plans_leaves_the_loop_to_others_in_between(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links, the inbox and the renewal of the lease: 64 plans may take longer than its life."""
    of_others = 0
    at_plan: list[int] = []
    monkeypatch.setattr("scheduler_svc.leader_session.PLAN_NS_MAX", 0)
    monkeypatch.setattr(WorkerLink, "run", lambda link: asyncio.Event().wait())
    monkeypatch.setattr(WorkerLink, "is_open", True)
    monkeypatch.setattr(WorkerLink, "send", lambda link, plan: at_plan.append(of_others))
    for number in range(64):
        await ledger.submit(submit_record(str(number)), b"")

    async def take_turns() -> None:
        nonlocal of_others
        while True:
            of_others += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    async with leading(ledger, worker_timeout_ms=10**9) as (session, _):
        for number in range(64):
            told = worker(str(number), features=[FEATURE_LOGPROBS])
            session.roster.register(f"unix:/nowhere/{number}", told)
            session.roster.link_opened(session.roster.links[str(number)])
        await until(lambda: at_plan and not session._concerned, "nobody is left to ask")
        assert len(at_plan) >= 64 / 4
        assert len(set(at_plan)) == len(at_plan), "somebody else had a turn before each"
    other.cancel()


async def test_a_fold_waits_for_the_ends_of_those_that_it_leaves_out(ledger: Ledger) -> None:
    """Or who dies in between has lost their tokens: they are still live, by the ledger."""
    first = (await ledger.submit(submit_record("a"), b"")).sequence_id
    play = await PlayLeader.elected(ledger)
    queue = CommitQueue(
        ledger, play.leader, SchedulerSettings(), SystemClock(), lambda commits: None
    )
    for token in range(BATCH_MAX):
        queue.put(Commit(play.record({first: [token]})))
    end = play.record({}, [stopped(first, BATCH_MAX)])
    queue.put(Commit(end, [play.ending("a", first)]))
    queue.put_fold(play.base + 1, {})
    await queue._commit_some()
    assert queue.committed_seq < end.seq
    successor = await ledger.elect("there", 2, seen=await ledger.leader())
    assert successor is not None
    recovered = await ledger.recover(successor)
    assert not recovered.damaged
    assert recovered.tokens[first].token_ids == list(range(BATCH_MAX))


async def test_a_hung_worker_gives_its_sequences_up_and_is_judged(ledger: Ledger) -> None:
    """It lives, for all we hear. Nobody answers where it is dialled, so it hangs still."""
    clock = JumpingClock()
    async with leading(ledger, clock, worker_timeout_ms=1_000) as (session, _):
        session.roster.register(NOWHERE, worker("w"))
        link = session.roster.links["w"]
        session.roster.link_opened(link)
        request = Request(id="r", sequence_id=1, prompt=(1,), max_tokens=9, arrived_ns=0)
        session.core.apply(Submit(request=request), 0)
        assert session.core.apply(MakePlan(worker_id="w"), 0).plan is not None
        link.waited_ns = 10**15
        with capture_logs() as logs:

            def is_said(event: str) -> list[Any]:
                session.roster.heartbeat("w", is_draining=False)
                return [entry for entry in logs if entry["event"] == event]

            await until(lambda: is_said("worker.lost"), "its sequences are taken back")
            (lost,) = is_said("worker.lost")
            assert lost["is_crash"] is None
            assert "a step has not ended for 1000000 s" in lost["reason"]
            assert [s.sequence_id for s in session.core.waiting] == [1]
            assert list(session.roster.links) == ["w"], "it is dialled on"
            await until(lambda: is_said("worker.judged"), "the verdict")
            (judged,) = is_said("worker.judged")
            assert judged["is_crash"] is True
        session.roster.link_opened(link)
        assert "w" in session.core.workers, "and it may come back"
