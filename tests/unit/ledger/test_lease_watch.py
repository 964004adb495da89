"""When a standby may take the lease: by its own clock, and only for time it really watched."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from ledger import Candidate, Leader, Lease, StoreLost
from ledger.leadership import POLLS_PER_TTL, LeaseWatch
from service_kit.errors import Unavailable
from tests.support.answers import until

TTL_NS = 8_000
POLL_NS = TTL_NS // POLLS_PER_TTL


def lease(renew_seq: int, *, epoch: int = 1, nonce: int = 7) -> Lease:
    return Lease(
        epoch=epoch, nonce=nonce, address="", renew_seq=renew_seq, journal_seq=0, folded_seq=0
    )


def test_nobody_holds_it() -> None:
    assert LeaseWatch(ttl_ns=TTL_NS).may_take(None, 0)
    assert LeaseWatch(ttl_ns=TTL_NS).may_take(lease(5, nonce=0), 0)


def test_a_silent_holder_is_given_exactly_the_ttl() -> None:
    watch = LeaseWatch(ttl_ns=TTL_NS)
    answers = [watch.may_take(lease(5), poll * POLL_NS) for poll in range(POLLS_PER_TTL + 1)]
    assert answers == [False] * POLLS_PER_TTL + [True]


def test_a_failed_poll_starts_the_watch_again() -> None:
    watch = LeaseWatch(ttl_ns=TTL_NS)
    for poll in range(POLLS_PER_TTL):
        assert not watch.may_take(lease(5), poll * POLL_NS)
    watch.missed()
    for poll in range(POLLS_PER_TTL):
        assert not watch.may_take(lease(5), (POLLS_PER_TTL + poll) * POLL_NS)


def test_time_asleep_is_not_time_watched() -> None:
    watch = LeaseWatch(ttl_ns=TTL_NS)
    assert not watch.may_take(lease(5), 0)
    # Stopped for a hundred TTLs: the leader may have been stopped with us.
    assert not watch.may_take(lease(5), 100 * TTL_NS)


@given(
    steps=st.lists(st.tuples(st.integers(0, 3 * POLL_NS), st.booleans()), max_size=60),
)
def test_never_within_a_ttl_of_the_last_sign_of_life(steps: list[tuple[int, bool]]) -> None:
    watch = LeaseWatch(ttl_ns=TTL_NS)
    now_ns, renew_seq, seen_ns = 0, 0, 0
    for wait_ns, is_renewed in steps:
        now_ns += wait_ns
        if is_renewed:
            renew_seq += 1
            seen_ns = now_ns
        if watch.may_take(lease(renew_seq), now_ns):
            assert now_ns - seen_ns >= TTL_NS


class ScriptedLedger:
    """Answers polls from a list; grants every election."""

    def __init__(self, polls: list[Lease | Exception | None]) -> None:
        self.polls = polls
        self.elections: list[tuple[str, int, Lease | None]] = []
        self.ended: list[bool] = []
        self.resigned: list[Leader] = []
        # Elections wait for it.
        self.answers = asyncio.Event()
        self.answers.set()

    async def leader(self) -> Lease | None:
        answer = self.polls.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def elect(
        self,
        address: str,
        nonce: int,
        *,
        seen: Lease | None = None,
        has_ended: bool = False,
        above_epoch: int = 0,
    ) -> Leader | None:
        self.elections.append((address, nonce, seen))
        self.ended.append(has_ended)
        await self.answers.wait()
        return Leader(epoch=9, nonce=nonce, journal_seq=4)

    async def resign(self, leader: Leader) -> None:
        self.resigned.append(leader)


class JumpingClock:
    """Sleeping takes no time at all, only its own."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    async def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


async def test_a_candidate_outlasts_an_unreachable_store_and_watches_anew() -> None:
    polls: list[Lease | Exception | None] = [lease(5)] * POLLS_PER_TTL
    polls += [Unavailable("away")]
    polls += [lease(5)] * (POLLS_PER_TTL + 1)
    ledger = ScriptedLedger(polls)
    leader = await Candidate(ledger, JumpingClock(), 3.0, address="me:1").campaign()
    assert polls == []
    assert [(address, seen) for address, _, seen in ledger.elections] == [("me:1", lease(5))]
    assert leader.nonce == ledger.elections[0][1] != 0


async def test_a_leader_that_has_ended_is_succeeded_at_once() -> None:
    """Whoever else has ended says nothing of this one."""
    ledger = ScriptedLedger([lease(5)] * 3)
    candidate = Candidate(ledger, JumpingClock(), 3600.0)
    candidate.has_ended(lease(5).nonce)
    await candidate.campaign()
    assert (ledger.elections[0][2], ledger.ended) == (lease(5), [True])
    assert len(ledger.polls) == 2
    ledger = ScriptedLedger([lease(5)] * 3 + [None])
    candidate = Candidate(ledger, JumpingClock(), 3600.0)
    candidate.has_ended(lease(5).nonce + 1)
    await candidate.campaign()
    assert (ledger.elections[0][2], ledger.ended) == (None, [False])


async def test_a_lost_store_ends_the_campaign() -> None:
    ledger = ScriptedLedger([lease(5), StoreLost()])
    try:
        await Candidate(ledger, JumpingClock(), 3.0).campaign()
    except StoreLost:
        assert ledger.elections == []
    else:
        raise AssertionError("campaigned on a lost store")


async def test_who_is_told_to_stop_while_it_is_elected_does_not_keep_the_lease() -> None:
    ledger = ScriptedLedger([None])
    ledger.answers.clear()
    campaign = asyncio.create_task(Candidate(ledger, JumpingClock(), 3.0).campaign())
    await until(lambda: ledger.elections, "an election")
    campaign.cancel()
    await asyncio.sleep(0)
    ledger.answers.set()
    await asyncio.wait({campaign})
    assert campaign.cancelled()
    assert [leader.nonce for leader in ledger.resigned] == [ledger.elections[0][1]]
