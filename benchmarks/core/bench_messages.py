"""What the messages of a step cost: their bytes, and CPU time to make and to read them.

    python -m benchmarks.core.bench_messages [--rows 64] [--save]

A steady batch of the core, a token per row and step. `make` is from our values to bytes and `read`
from bytes to values, by the code that the parts use; microseconds per step, medians of turns in
which all messages are measured one after the other. What a client reads is not ours, and told
beside it. A step is said once by the leader, once by the worker, and once by the journal, which
every gateway reads; each row's token goes to its own client.
"""

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import thread_time_ns
from typing import Any, Final, NamedTuple

from benchmarks.core.bench_scheduler import Bench
from benchmarks.recording import record
from gateway.grpc.convert import write_event
from gateway.http.json_reply import to_event
from gateway.openai.chat import ChatChunk, ChatChunkChoice, ChatDelta
from gateway.requests.stream import Delta
from gpu_worker.batch.plans import StepOutcome, StepTimings
from gpu_worker.batch.plans import StepResult as WorkerResult
from gpu_worker.service.wire import plan_from_proto, result_to_proto
from kaiten.client.results import delta_from_proto
from kaiten.v1 import worker_service_pb2
from kaiten.v1.common_pb2 import Leader
from kaiten.v1.inference_service_pb2 import GenerateResponse
from kaiten.v1.ledger_pb2 import JournalRecord, StepRecord
from ledger.tokens import tokens_of
from scheduler_svc.command_wire import input_to_proto
from scheduler_svc.core.commands import StepDone
from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.types import StepResult
from scheduler_svc.wire import check_values, plan_to_proto, step_from_proto

BOOT_ID: Final = "0123456789abcdef"
LEADER: Final = Leader(epoch=3, nonce=1 << 60)
TURNS: Final = 40
# Of each, in a turn: clocks tick in microseconds.
REPEATS: Final = 20
TIMINGS: Final = StepTimings(wait_us=9, forward_us=9_000, sample_us=90, tokens_computed=64, rows=64)
HEAD: Final[dict[str, Any]] = {
    "id": "chatcmpl-0123456789abcdef01234567",
    "created": 1_790_000_000,
    "model": "mini",
}


class Message(NamedTuple):
    make: Callable[[], bytes]
    read: Callable[[bytes], object]
    # How many of it a step brings.
    per_step: int = 1


class Kept(Bench):
    """The last plan, and the last step with what came of it."""

    plan: Plan
    result: StepResult

    def planned(self, plan: Plan) -> None:
        self.plan = plan

    def stepped(self, result: StepResult) -> None:
        self.result = result


def messages(rows: int) -> dict[str, Message]:
    bench = Kept("steady", rows, TURNS)
    bench.run()
    plan, result = bench.plan, bench.result
    outcome = StepOutcome(slots=result.slots, token_ids=tuple(range(5_000, 5_000 + rows)))
    worker_result = WorkerResult(
        plan_id=result.plan_id, step=0, outcome=outcome, is_last=True, timings=TIMINGS
    )
    # As minted: microseconds since 1970.
    sequence_ids = [1_790_000_000_000_000 + slot for slot in result.slots]
    timings = result_to_proto(worker_result, boot_id=BOOT_ID).timings

    def journal() -> bytes:
        item = JournalRecord(
            seq=1_000_000,
            epoch=3,
            unix_ns=1_790_000_000_000_000_000,
            sequence_ids=sequence_ids,
            positions=[200] * rows,
            token_ids=outcome.token_ids,
            step=StepRecord(worker_id=BOOT_ID, plan_id=result.plan_id, step=0, timings=timings),
        )
        item.inputs.append(input_to_proto(StepDone(result=result), 0, result.tokens))
        return item.SerializeToString()

    def step_of(raw: bytes) -> StepResult:
        message = worker_service_pb2.StepResult.FromString(raw)
        check_values(message, rows_max=rows, tokens_max=rows)
        return step_from_proto("w", message)

    delta = Delta(choice=0, position=200, token_ids=(5_000,), text=" warm", logprobs=())

    def response() -> bytes:
        message = GenerateResponse()
        write_event(message.event, delta, with_token_ids=False)
        return message.SerializeToString()

    def chunk() -> bytes:
        choice = ChatChunkChoice(0, ChatDelta(content=delta.text), None, None)
        return to_event(ChatChunk(**HEAD, choices=[choice]))

    return {
        "plan": Message(
            lambda: plan_to_proto(plan, LEADER, ()).SerializeToString(),
            lambda raw: plan_from_proto(worker_service_pb2.Plan.FromString(raw)),
        ),
        "step result": Message(
            lambda: result_to_proto(worker_result, boot_id=BOOT_ID).SerializeToString(), step_of
        ),
        "journal record": Message(
            journal, lambda raw: list(tokens_of(JournalRecord.FromString(raw)))
        ),
        "gRPC delta": Message(
            response,
            lambda raw: delta_from_proto(GenerateResponse.FromString(raw).event.delta),
            rows,
        ),
        "HTTP event": Message(chunk, lambda raw: json.loads(raw[6:]), rows),
    }


def spent_us(work: Callable[[], object]) -> float:
    began_ns = thread_time_ns()
    for _ in range(REPEATS):
        work()
    return (thread_time_ns() - began_ns) / REPEATS / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    args = parser.parse_args()
    found = messages(args.rows)
    raws = {name: each.make() for name, each in found.items()}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for _ in range(TURNS):
        for name, each in found.items():
            made_us = spent_us(each.make)
            read_us = spent_us(lambda: each.read(raws[name]))  # noqa: B023
            took[name].append((made_us * each.per_step, read_us * each.per_step))
    print(f"{'message':15} {'in a step':>9} {'bytes each':>10} {'make us':>8} {'read us':>8}")
    rows = []
    for name, each in found.items():
        make_us, read_us = (round(median(side), 1) for side in zip(*took[name], strict=True))
        size = len(raws[name])
        rows.append(
            {
                "message": name,
                "per_step": each.per_step,
                "bytes": size,
                "make_us": make_us,
                "read_us": read_us,
            }
        )
        print(f"{name:15} {each.per_step:9} {size:10} {make_us:8} {read_us:8}")
    record("messages", {"rows": args.rows, "results": rows}, save=args.save)


if __name__ == "__main__":
    main()
