"""How fast is the ledger: commits back to back and pipelined, and what a follower spends per token.

    python -m benchmarks.core.bench_ledger [--url redis://…] [--save]

Without --url it starts a server of its own: append-only, fsync at every commit. Every step commits
one token of each of 256 sequences.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.recording import record
from kaiten.v1.common_pb2 import TokenLogprobs
from kaiten.v1.ledger_pb2 import JournalRecord, SequenceLogprobs, SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import Commit, Follower, Leader, Ledger
from tests.support.store_server import StoreServer

SEQUENCES = 256
COMMITS = 1000
BATCH = 16
RECORDS_FOLLOWED = 500
SUBMITS = 1000
SAMPLING = RowSampling(max_tokens=16)
FSYNCS = 200


def record_of(
    seq: int, sequence_ids: range, *, base: int = 0, with_logprobs: bool = False
) -> JournalRecord:
    logprobs = TokenLogprobs(logprob=-1.5)
    return JournalRecord(
        seq=seq,
        sequence_ids=sequence_ids,
        positions=[seq - base - 1] * len(sequence_ids),
        token_ids=[(seq * 7919 + sequence_id) % 32_000 for sequence_id in sequence_ids],
        logprobs=[SequenceLogprobs(sequence_id=each, logprobs=logprobs) for each in sequence_ids]
        if with_logprobs
        else (),
    )


def fsync_ms() -> float:
    """The yardstick of the same run: append a commit's bytes to a file and make them durable."""
    data = record_of(1, range(1, SEQUENCES + 1)).SerializeToString()
    taken_ms = []
    with tempfile.TemporaryFile() as file:
        for _ in range(FSYNCS):
            started = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            taken_ms.append((time.perf_counter() - started) * 1e3)
    return round(statistics.median(taken_ms), 3)


async def one_by_one(ledger: Ledger, leader: Leader) -> dict[str, float]:
    """Latency of a commit when nothing else is going on."""
    sequence_ids = range(1, SEQUENCES + 1)
    taken_ms = []
    for seq in range(leader.journal_seq + 1, leader.journal_seq + COMMITS + 1):
        step = record_of(seq, sequence_ids, base=leader.journal_seq)
        started = time.perf_counter()
        await ledger.commit(leader, step)
        taken_ms.append((time.perf_counter() - started) * 1e3)
    percentiles = statistics.quantiles(taken_ms, n=100)
    return {
        "commit_ms_p50": round(percentiles[49], 3),
        "commit_ms_p99": round(percentiles[98], 3),
    }


async def pipelined(ledger: Ledger, leader: Leader, from_seq: int) -> dict[str, float]:
    """Throughput when BATCH commits share a round trip; building the records is not counted."""
    sequence_ids = range(1, SEQUENCES + 1)
    records = [
        record_of(from_seq + i, sequence_ids, base=leader.journal_seq) for i in range(COMMITS)
    ]
    started = time.perf_counter()
    for start in range(0, COMMITS, BATCH):
        batch = [Commit(step) for step in records[start : start + BATCH]]
        await ledger.commit_many(leader, batch)
    taken_s = time.perf_counter() - started
    return {
        "pipelined_commits_per_s": round(COMMITS / taken_s),
        "pipelined_tokens_per_s": round(COMMITS * SEQUENCES / taken_s),
    }


async def submits(ledger: Ledger, run: int = 0) -> dict[str, float]:
    """Accepted requests per second from 16 concurrent callers, 512 prompt tokens each.

    `run` is of each whose store has requests of another.
    """
    names = iter(range(SUBMITS))

    async def caller() -> None:
        for index in names:
            request = SubmitRecord(
                id=f"bench:{run}:{index}", n=1, prompt_token_ids=range(512), sampling=SAMPLING
            )
            await ledger.submit(request, b"hash")

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(16)))
    return {"submits_per_s": round(SUBMITS / (time.perf_counter() - started))}


def dispatch_us(ledger: Ledger, share: float, *, with_logprobs: bool = False) -> float:
    """CPU time per token of decoding and handing out records of which `share` is followed here."""
    sequence_ids = range(1, SEQUENCES + 1)
    packed = [
        record_of(seq, sequence_ids, with_logprobs=with_logprobs).SerializeToString()
        for seq in range(1, RECORDS_FOLLOWED + 1)
    ]
    follower = Follower(ledger)
    follower.start_at(0)
    followed = sequence_ids[: round(SEQUENCES * share)]
    subscriptions = [follower.subscribe([sequence_id], from_seq=0) for sequence_id in followed]
    started = time.process_time()
    for data in packed:
        follower.take(JournalRecord.FromString(data))
    taken_s = time.process_time() - started
    got = sum(len(s.pending[0].token_ids) for s in subscriptions)
    assert got == len(followed) * RECORDS_FOLLOWED, "the benchmark followed nothing"
    return round(taken_s * 1e6 / (RECORDS_FOLLOWED * SEQUENCES), 3)


async def awake_us(ledger: Ledger) -> float:
    """The same with one consumer task per sequence, each woken by every record: the worst case."""
    sequence_ids = range(1, SEQUENCES + 1)
    records = [record_of(seq, sequence_ids) for seq in range(1, RECORDS_FOLLOWED + 1)]
    follower = Follower(ledger)
    follower.start_at(0)
    got = 0

    async def consume(sequence_id: int) -> None:
        nonlocal got
        with follower.subscribe([sequence_id], from_seq=0) as subscription:
            async for update in subscription:
                got += len(update.token_ids)
                if update.position + len(update.token_ids) == RECORDS_FOLLOWED:
                    return

    consumers = [asyncio.create_task(consume(sequence_id)) for sequence_id in sequence_ids]
    await asyncio.sleep(0)
    started = time.process_time()
    for step in records:
        follower.take(step)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*consumers)
    taken_s = time.process_time() - started
    assert got == RECORDS_FOLLOWED * SEQUENCES
    return round(taken_s * 1e6 / got, 3)


async def measure(url: str) -> dict[str, object]:
    ledger = await Ledger.connect(url, cell=f"bench-{time.time_ns()}")
    info = await ledger.check()
    leader = await ledger.elect("bench", 1)
    assert leader is not None
    numbers: dict[str, object] = {"fsync_ms_p50": fsync_ms()}
    numbers |= await one_by_one(ledger, leader)
    numbers |= await pipelined(ledger, leader, leader.journal_seq + COMMITS + 1)
    numbers |= await submits(ledger)
    numbers["follow_us_per_token_all_ours"] = dispatch_us(ledger, 1.0)
    numbers["follow_us_per_token_half_ours"] = dispatch_us(ledger, 0.5)
    numbers["follow_us_per_token_none_ours"] = dispatch_us(ledger, 1 / SEQUENCES)
    numbers["follow_us_per_token_logprobs"] = dispatch_us(ledger, 1.0, with_logprobs=True)
    numbers["follow_us_per_token_awake"] = await awake_us(ledger)
    await ledger.close()
    server = f"{info.server} {info.version}, appendfsync {info.appendfsync}"
    return {"sequences": SEQUENCES, "server": server, **numbers}


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, StoreServer(Path(folder)) as server:
        yield server.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a durable Redis or Valkey; a cell of its own is used")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    options = parser.parse_args()
    with contextlib.nullcontext(options.url) if options.url else own_server() as url:
        record("ledger", asyncio.run(measure(url)), save=options.save)


if __name__ == "__main__":
    main()
