"""A primary dies or freezes under 64 streams, in a cluster and under Sentinels: another comes, and
what was promised holds.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kaiten.v1.common_pb2 import FINISH_REASON_LENGTH
from kaiten.v1.ledger_pb2 import JournalRecord
from ledger import DamagedLedger, Ledger, LedgerLimits
from service_kit.errors import ConfigError, NotFound, Unavailable
from tests.stores.conftest import Lent
from tests.support.answers import Answer, until
from tests.support.cluster import Cluster, gold
from tests.support.play_leader import submit_record
from tests.support.store_group import Group, StoreCluster
from tests.support.store_server import StoreServer

pytestmark = pytest.mark.stores

Lend = Callable[[Group], Lent]
STREAMS = 64
TOKENS = 150
# Longer than any failover takes, on a machine that does other things.
PATIENT = LedgerLimits(retry_s=60.0)
WORKER = {"slots": STREAMS, "step_ms": 10, "kv_blocks": 2048}


@pytest.fixture(params=["store_cluster", "sentinel_group"])
def group(request: pytest.FixtureRequest) -> Group:
    found: Group = request.getfixturevalue(request.param)
    return found


async def in_thread(call: Callable[[], StoreServer]) -> StoreServer:
    """The streams go on meanwhile."""
    return await asyncio.to_thread(call)


@pytest.mark.parametrize(
    ("is_killed", "replicas_min"),
    [
        pytest.param(True, 1, id="kill-1"),
        pytest.param(False, 1, id="freeze-1", marks=pytest.mark.slow),
        pytest.param(True, 0, id="kill-0", marks=pytest.mark.slow),
        pytest.param(False, 0, id="freeze-0", marks=pytest.mark.slow),
    ],
)
async def test_64_streams_go_on_at_the_next_primary(
    group: Group, lent: Lend, tmp_path: Path, is_killed: bool, replicas_min: int
) -> None:
    """Whatever the setting, no stream is wrong; with it none is lost."""
    async with Cluster(
        tmp_path / "cell",
        store=lent(group),
        limits=replace(PATIENT, replicas_min=replicas_min),
        scheduler_flags={"store_replicas_min": replicas_min},
        worker_flags={**WORKER, "gates": tmp_path / "cell" / "gates"},
    ) as cluster:
        # No stream is over before the next primary is there, however late it is seen.
        cluster.gates(140)
        answers = await cluster.submit_many(STREAMS, max_tokens=TOKENS)
        for answer in answers:
            await answer.has_tokens(10)
        old = group.primary
        if is_killed:
            old.kill()
        else:
            old.freeze()
        new = await in_thread(lambda: group.promoted(old))
        assert new is not old
        cluster.open_gates()
        if is_killed:
            old.start()
        else:
            old.thaw()
        if replicas_min:
            await cluster.all_done()
        else:
            cluster.is_checked = False
            await all_end_well(answers)
        later = await cluster.submit(max_tokens=5)
        await later.done()
        if replicas_min:
            assert {each.reasons[0] for each in answers} == {FINISH_REASON_LENGTH}


def before(gate: int, answer: Answer) -> int:
    """Tokens of those that can be shown while nobody computes this position."""
    return gate + 1 - len(answer.record.prompt_token_ids)


async def all_end_well(answers: list[Answer]) -> None:
    """Each as it should, or with an error that says that it was lost: never wrong."""
    for answer in answers:
        with contextlib.suppress(NotFound, DamagedLedger):
            await answer.done()
        for sequence_id, output in answer.outputs.items():
            assert output == gold(sequence_id, TOKENS)[: len(output)]


@pytest.mark.slow
async def test_what_no_replica_has_is_lost_and_said_and_never_wrong(
    store_cluster: StoreCluster, lent: Lend, tmp_path: Path
) -> None:
    """Nobody was asked to wait for the replica, and it was not listening."""
    group = store_cluster
    async with Cluster(
        tmp_path / "cell",
        store=lent(group),
        limits=PATIENT,
        worker_flags={**WORKER, "gates": tmp_path / "cell" / "gates"},
    ) as cluster:
        cluster.is_checked = False
        cluster.gates(20, 40)
        kept = await cluster.submit(max_tokens=60)
        await kept.has_tokens(10)
        await kept.has_tokens(before(20, kept))
        primary, replica = group.shard()
        group.cut_off(primary, replica)
        (tmp_path / "cell" / "gates" / "20").unlink()
        lost = await cluster.submit(max_tokens=60)
        await kept.has_tokens(30)
        await lost.has_tokens(10)
        primary.kill()
        replica.thaw()
        await in_thread(lambda: group.promoted(primary))
        cluster.open_gates()
        # Shown, and then it never happened: the same once more, and on.
        await kept.done()
        assert kept.outputs[kept.sequence_id] == gold(kept.sequence_id, 60)
        await lost.fails_with(NotFound)
        other = await cluster.submit(max_tokens=10)
        await other.done()
        assert other.sequence_id > lost.sequence_id
        assert other.outputs[other.sequence_id] == gold(other.sequence_id, 10)


@pytest.mark.parametrize("ack", [pytest.param("memory", marks=pytest.mark.slow), "disk"])
async def test_what_no_replica_has_is_not_promised_and_not_shown(
    store_cluster: StoreCluster, lent: Lend, tmp_path: Path, ack: str
) -> None:
    group = store_cluster
    limits = replace(PATIENT, replicas_min=1, replicas_ack=ack)  # type: ignore[arg-type]
    async with Cluster(
        tmp_path / "cell",
        store=lent(group),
        limits=limits,
        scheduler_flags={"store_replicas_min": 1, "store_replicas_ack": ack},
        worker_flags={**WORKER, "gates": tmp_path / "cell" / "gates"},
    ) as cluster:
        cluster.gates(20)
        kept = await cluster.submit(max_tokens=60)
        await kept.has_tokens(10)
        await kept.has_tokens(before(20, kept))
        shown = kept.token_count
        primary, replica = group.shard()
        group.cut_off(primary, replica)
        cluster.open_gates()
        hasty = await Ledger.connect(group.url, cell="0", limits=replace(limits, retry_s=0.2))
        with pytest.raises(Unavailable, match=r"1 replicas of the store must have .*, 0 do"):
            await hasty.submit(submit_record("late"), b"h")
        await hasty.close()
        # It may say as often as it likes that it has more.
        await until(lambda: kept.silence_s > 1.0, "silence")
        assert kept.token_count == shown
        primary.kill()
        replica.thaw()
        await in_thread(lambda: group.promoted(primary))
        primary.start()
        await kept.done()


async def test_a_replica_that_would_lose_requests_is_refused_before_it_leads(
    group: Group, lent: Lend
) -> None:
    lent(group)
    replica = group.shard()[1]
    ledger = await Ledger.connect(group.url)
    info = await ledger.check()
    assert info.replicas == len(group.shard()) - 1
    group.admin(replica).config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(
        ConfigError, match=rf"replica 127.0.0.1:{replica.port}: maxmemory-policy must be noeviction"
    ):
        await ledger.check()
    group.admin(replica).config_set("maxmemory-policy", "noeviction")
    await ledger.check()
    await ledger.close()


async def test_a_promise_on_disk_does_not_wait_for_the_replicas_next_second(
    group: Group, lent: Lend
) -> None:
    """Which is when a replica that was asked too early tells what it has there."""
    url = lent(group).url
    ledger = await Ledger.connect(url, cell="0", limits=replace(PATIENT, replicas_min=1))
    leader = await ledger.elect("me", 1, seen=await ledger.leader(), has_ended=True)
    assert leader is not None
    waits_s = []
    for seq in range(leader.journal_seq + 1, leader.journal_seq + 10):
        started_s = time.monotonic()
        await ledger.commit(leader, JournalRecord(seq=seq))
        waits_s.append(time.monotonic() - started_s)
    await ledger.close()
    # Milliseconds; it was all of the second each time, which no luck makes half of it.
    assert min(waits_s) < 0.5
