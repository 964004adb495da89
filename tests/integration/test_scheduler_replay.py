"""The journal is the decision log: replayed through a fresh core it gives every decision again."""

import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from kaiten.v1.common_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE_EXCEEDED,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
)
from kaiten.v1.ledger_pb2 import JournalRecord, SubmitRecord
from kaiten.v1.scheduler_service_pb2 import ConfigureRequest
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from ledger import InboxEntry
from scheduler_svc.replay import Compared, Replay
from tests.support.answers import Answer, until
from tests.support.cluster import Cluster, Flags

# Nothing is trimmed. Pools so small that rows are preempted, steps so small that prompts are cut.
SCHEDULER_FLAGS = {"fold_records": 1_000_000}
WORKER_FLAGS = {
    "step_ms": 4,
    "slots": 8,
    "step_tokens": 40,
    "block_size": 4,
    "kv_blocks": 60,
    "context_tokens": 200,
    "drain_s": 3.0,
}


def workers_at(folder: Path) -> Flags:
    """Of a cluster in this folder whose workers can be held."""
    return {**WORKER_FLAGS, "gates": folder / "gates"}


class Recording:
    """Submits to a cluster and keeps the bodies: the ledger forgets them with the request."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.entries: list[InboxEntry] = []
        self._cursor = "0-0"
        cluster.gates()

    async def submit(self, **options: Any) -> Answer:
        # Or the request might be over, and its body gone, before it is read.
        with self.cluster.held():
            answer = await self.cluster.submit(**options)
            for entry in await self.cluster.ledger.inbox_read(self._cursor, block_ms=1, count=100):
                self._cursor = entry.entry_id
                self.entries.append(entry)
        assert any(entry.sequence_id == answer.sequence_id for entry in self.entries)
        return answer

    async def journal_seq(self) -> int:
        lease = await self.cluster.ledger.leader()
        assert lease is not None
        return lease.journal_seq

    async def journal(self) -> list[JournalRecord]:
        records: list[JournalRecord] = []
        while page := await self.cluster.ledger.journal_read(
            records[-1].seq if records else 0, block_ms=1, count=256
        ):
            records += page
        for before, record in pairwise(records):
            said = record.after_seq if record.HasField("after_seq") else record.seq - 1
            assert said == before.seq, "a record is missing"
        return records

    async def compare(self, policy: str | None = None) -> Iterator[Compared]:
        replay = Replay(self.entries, policy)
        return chain.from_iterable(map(replay.feed, await self.journal()))


def assert_all_equal(comparisons: Iterable[Compared]) -> None:
    for compared in comparisons:
        assert compared.is_equal, f"record {compared.seq}: {compared}"


async def is_beyond(recording: Recording, seq: int) -> bool:
    return bool(await recording.cluster.ledger.journal_read(seq, block_ms=1, count=1))


def count_inputs(records: Sequence[JournalRecord]) -> Counter[str | None]:
    return Counter(item.WhichOneof("input") for record in records for item in record.inputs)


async def busy_mix(recording: Recording) -> None:
    """Everything a request can be or suffer, on two workers of which one dies and one drains."""
    cluster = recording.cluster
    shared = [11 + i for i in range(30)]
    # More at once than the pools hold.
    with cluster.held():
        for index in range(10):
            prompt = [*shared, 900 + index]
            await recording.submit(max_tokens=30 + index, prompt=prompt, n=1 + index % 3)
        queued = [await recording.submit(prompt_tokens=90, max_tokens=40) for _ in range(6)]
        await cluster.ledger.cancel(queued[4].record.id)
        late = await recording.submit(max_tokens=120, timeout_ms=100)
        await late.done()
    assert late.reasons == [FINISH_REASON_DEADLINE_EXCEEDED]
    await cluster.answers[0].has_tokens(3)
    cluster.workers[0].kill()
    cluster.workers[0].start()
    await cluster.answers[1].has_tokens(10)
    await cluster.ledger.cancel(
        cluster.answers[1].record.id, choice=1, reason=FINISH_REASON_STOP, output_tokens=2
    )
    cluster.workers[1].send(signal.SIGTERM)
    for _ in range(6):
        await recording.submit(max_tokens=20, logprobs=1)


@pytest.mark.parametrize("slot_tokens", [1, 4])
async def test_a_busy_mixed_journal_replays_to_the_same_decisions(
    tmp_path: Path, slot_tokens: int
) -> None:
    worker_flags = {**workers_at(tmp_path), "slot_tokens": slot_tokens}
    async with Cluster(
        tmp_path, workers=2, worker_flags=worker_flags, scheduler_flags=SCHEDULER_FLAGS
    ) as cluster:
        recording = Recording(cluster)
        await busy_mix(recording)
        await cluster.all_done()
        reasons = Counter(r for answer in cluster.answers for r in answer.reasons)
        assert reasons[FINISH_REASON_LENGTH] > 20
        assert reasons[FINISH_REASON_CANCELLED] == 1
        records = await recording.journal()
        comparisons = list(await recording.compare())
        assert_all_equal(comparisons)
        plans = [compared for compared in comparisons if compared.what.startswith("plan")]
        assert len(plans) == count_inputs(records)["plan"] > 60 // slot_tokens
        # Those of a busy machine there may be, too.
        assert set(count_inputs(records)) - {"worker_late", "store_behind"} == {
            *("configured", "submit", "cancel", "expire", "plan", "result"),
            *("worker_joined", "worker_lost", "worker_draining"),
        }
        inputs = [item.plan for record in records for item in record.inputs]
        assert any(plan.preempted for plan in inputs), "the pools are small enough to preempt"
        # Others of the record brought nothing that counts, and may have had the same tokens.
        own = [(r, r.inputs[-1].result.step) for r in records if r.token_ids]
        is_twice = [record.token_ids == step.token_ids for record, step in own]
        assert not any(is_twice), "each token stands once in a record"
        several = [len(set(record.sequence_ids)) < len(record.sequence_ids) for record in records]
        assert any(several) == (slot_tokens > 1)


async def test_a_journal_of_several_terms_replays_with_a_core_each(tmp_path: Path) -> None:
    # So that there is something left for each leader.
    worker_flags = {**workers_at(tmp_path), "step_ms": 24}
    async with Cluster(
        tmp_path, worker_flags=worker_flags, scheduler_flags=SCHEDULER_FLAGS
    ) as cluster:
        recording = Recording(cluster)
        for index in range(6):
            await recording.submit(max_tokens=50 + 5 * index, n=1 + index % 2)
        short = await recording.submit(max_tokens=50, n=2)
        await cluster.ledger.cancel(short.record.id, choice=0)
        for answer in cluster.answers:
            await answer.has_tokens(3)
        await until(lambda: bool(short.endings), "one choice of two has ended")
        for stop in (signal.SIGTERM, signal.SIGKILL):
            cluster.schedulers[0].send(stop)
            cluster.schedulers[0].join()
            seq = await recording.journal_seq()
            cluster.schedulers[0].start()
            await until(lambda seq=seq: is_beyond(recording, seq), "a record of the new leadership")
        await cluster.all_done()
        records = await recording.journal()
        assert len({record.epoch for record in records}) == 3
        assert_all_equal(await recording.compare())


async def test_the_static_policy_replays_too(tmp_path: Path) -> None:
    flags = {**SCHEDULER_FLAGS, "policy": "static"}
    async with Cluster(
        tmp_path, worker_flags=workers_at(tmp_path), scheduler_flags=flags
    ) as cluster:
        recording = Recording(cluster)
        with cluster.held():
            for index in range(12):
                await recording.submit(max_tokens=10 + index)
        await cluster.all_done()
        assert_all_equal(await recording.compare())
        others = await recording.compare("fcfs")
        assert not all(compared.is_equal for compared in others), "another policy is noticed"


def test_an_input_of_a_later_version_is_not_passed_over() -> None:
    record = JournalRecord(seq=1, epoch=1)
    record.inputs.add(now_ns=1)
    body = InboxEntry(entry_id="1-0", sequence_id=1, record=SubmitRecord(n=1))
    with pytest.raises(ValueError, match="does not know"):
        list(Replay([body]).feed(record))


async def test_what_an_operator_changes_at_run_time_is_replayed(tmp_path: Path) -> None:
    """Decodes sit steps out, the queue is looked at now and then: by flags, and then otherwise."""
    flags = {**SCHEDULER_FLAGS, "mix": "prefill_first", "order": "fair:shortest"}
    async with Cluster(
        tmp_path, worker_flags=workers_at(tmp_path), scheduler_flags=flags
    ) as cluster:
        recording = Recording(cluster)
        with cluster.held():
            for index in range(8):
                await recording.submit(max_tokens=30 + index)
        (leader,) = cluster.scheduler_addresses
        async with grpc.aio.insecure_channel(leader) as channel:
            stub = SchedulerServiceStub(channel)
            before = await recording.journal_seq()
            with pytest.raises(grpc.aio.AioRpcError, match="choose one of chunked") as caught:
                await stub.Configure(ConfigureRequest(settings={"mix": "orca"}))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError, match="deaths_max: Input should be less"):
                await stub.Configure(ConfigureRequest(settings={"deaths_max": str(1 << 32)}))
            chosen = {"mix": "", "cadence": "interval", "schedule_interval_steps": "3"}
            answer = await stub.Configure(ConfigureRequest(settings=chosen))
            assert (answer.configured.cadence, answer.configured.mix) == ("interval", "")
            assert answer.configured.order == "fair:shortest"
        for index in range(8):
            await recording.submit(max_tokens=10 + index)
        await cluster.all_done()
        records = await recording.journal()
        told = [i.configured for r in records for i in r.inputs if i.HasField("configured")]
        assert [one.mix for one in told] == ["prefill_first", ""]
        assert records[-1].seq > before
        assert_all_equal(await recording.compare())
