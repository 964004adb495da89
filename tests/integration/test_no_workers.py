"""A cell without workers, as one that scales to zero has it: what is accepted waits for one."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from kaiten.v1.keda.external_scaler_pb2 import GetMetricsRequest, ScaledObjectRef
from kaiten.v1.keda.external_scaler_pb2_grpc import ExternalScalerStub
from tests.support.whole_stack import GOLDEN, WAIT_S, Door, WholeStack, wait_until

IN_ORDER = "the worker comes, goes and comes back"
REQUESTS = 100
PATIENCE_S = 4 * WAIT_S


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeStack]:
    """Everything but a worker; it has never had one."""
    folder = tmp_path_factory.mktemp("no-workers")
    # Longer than a worker takes to start on a slow machine.
    flags = {"accept_without_workers": PATIENCE_S, "keda_scaler": True}
    whole = WholeStack(folder, gateway_flags=flags)
    try:
        whole.store.start()
        whole.scheduler.start()
        whole.door.process.start()
        whole.door.wait_ready()
        yield whole
    finally:
        whole.close()


def ask(door: Door, seed: int) -> httpx.Response:
    # Each its own prompt, so that nobody gets another's answer unseen.
    body = {**GOLDEN, "prompt": f"{GOLDEN['prompt']} {seed}", "max_tokens": 4}
    return httpx.post(f"{door.openai}/completions", json=body, timeout=PATIENCE_S)


def texts(replies: list[httpx.Response]) -> list[str]:
    assert {reply.status_code for reply in replies} == {200}, replies[0].text
    return [str(reply.json()["choices"][0]["text"]) for reply in replies]


def one_line_batch(client: httpx.Client) -> str:
    """The id of a batch of a single line."""
    body = {**GOLDEN, "max_tokens": 4}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    sent = {"file": ("lines.jsonl", json.dumps(line).encode())}
    file = client.post("files", files=sent, data={"purpose": "batch"}).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
    batch = client.post("batches", json={**wanted, "completion_window": "24h"}).json()
    return str(batch["id"])


def ended(client: httpx.Client, batch: str) -> bool:
    return bool(client.get(f"batches/{batch}").json()["status"] == "completed")


def scale_to_zero(stack: WholeStack) -> None:
    """Of one worker, also where this is the only test that a process of tests has of these."""
    if not stack.worker.is_alive:
        stack.worker.start()
    wait_until(lambda: any(each.is_connected for each in stack.state().workers), "a worker")
    stack.worker.send(signal.SIGTERM)
    assert stack.worker.join() == 0
    wait_until(lambda: not any(each.is_connected for each in stack.state().workers), "no worker")


def send(stack: WholeStack, clients: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """All are accepted and wait."""
    sent = [clients.submit(ask, stack.door, seed) for seed in range(REQUESTS)]
    wait_until(lambda: stack.state().waiting == REQUESTS, "all are accepted")
    assert not any(each.done() for each in sent)
    return sent


def test_100_that_came_before_any_worker_and_100_after_the_last_are_answered(
    stack: WholeStack, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(REQUESTS) as clients:
        first = send(stack, clients)
        stack.worker.start()
        answers = texts([each.result() for each in first])
        scale_to_zero(stack)
        stack.door.wait_ready()
        again = send(stack, clients)
        stack.worker.start()
        assert texts([each.result() for each in again]) == answers
    stack.golden = stack.answer()
    stack.check()


def test_keda_is_told_when_a_first_worker_is_needed_and_when_none_is(stack: WholeStack) -> None:
    """As KEDA asks: a stream that wakes it, and between its messages the numbers."""
    scale_to_zero(stack)
    named = {"num_requests_waiting": "8", "queue_time_forecast_seconds": "0.5"}
    worker = ScaledObjectRef(
        name="worker",
        namespace="kaiten",
        scalerMetadata={"scalerAddress": stack.door.grpc, **named},
    )
    with (
        grpc.insecure_channel(stack.door.grpc) as channel,
        ThreadPoolExecutor(REQUESTS) as clients,
    ):
        keda = ExternalScalerStub(channel)

        def now(name: str) -> float:
            asked = GetMetricsRequest(scaledObjectRef=worker, metricName=name)
            (told,) = keda.GetMetrics(asked, timeout=WAIT_S).metricValues
            return float(told.metricValueFloat)

        pushed = (told.result for told in keda.StreamIsActive(worker, timeout=4 * WAIT_S))
        # What a gateway knows is of the leader's last renewal.
        assert False in pushed
        sent = send(stack, clients)
        assert True in pushed
        specs = keda.GetMetricSpec(worker, timeout=WAIT_S).metricSpecs
        assert {each.metricName: str(each.targetSizeFloat) for each in specs} == {
            "num_requests_waiting": "8.0",
            "queue_time_forecast_seconds": "0.5",
        }
        wait_until(lambda: now("num_requests_waiting") == REQUESTS, "all who wait are told of")
        wait_until(lambda: now("queue_time_forecast_seconds") > 0, "how long they will")
        stack.worker.start()
        texts([each.result() for each in sent])
        assert False in pushed
        assert now("num_requests_waiting") == 0
        # Of up to a second ago.
        wait_until(lambda: now("queue_time_forecast_seconds") == 0, "nobody to wait for")
        with pytest.raises(grpc.RpcError, match="metricName: must be one of"):
            now("s0-queue")


def test_a_gateway_that_drains_does_not_wait_for_keda(stack: WholeStack) -> None:
    leaving = stack.add_gateway(accept_without_workers=WAIT_S, keda_scaler=True, drain_s=3600)
    leaving.process.start()
    leaving.wait_ready()
    with grpc.insecure_channel(leaving.grpc) as channel:
        pushed = ExternalScalerStub(channel).StreamIsActive(ScaledObjectRef(), timeout=WAIT_S)
        next(pushed)
        leaving.process.send(signal.SIGTERM)
        assert not any(told.result for told in pushed), "it ends, and as it should"
    assert leaving.process.join() == 0
    stack.retire(leaving)


def test_one_that_no_worker_came_for_ends_with_an_error_that_says_so(stack: WholeStack) -> None:
    scale_to_zero(stack)
    hasty = stack.add_gateway(accept_without_workers=0.2)
    hasty.process.start()
    hasty.wait_ready()
    reply = ask(hasty, 0)
    assert (reply.status_code, reply.headers["x-should-retry"]) == (503, "true")
    said = "no worker came within 0.2 s, which is as long as a request waits for one"
    assert said in reply.json()["error"]["message"]
    wait_until(lambda: not stack.problem(), "nothing left of it")
    stack.retire(hasty)


def test_a_line_of_a_batch_waits_for_a_worker_as_long_as_its_batch_does(stack: WholeStack) -> None:
    """Who drives it has a bound for who is live, and one that came after the line has passed it."""
    scale_to_zero(stack)
    hasty = stack.add_gateway(accept_without_workers=0.2)
    hasty.process.start()
    hasty.wait_ready()
    # The other gateway, which waits for minutes, must not be the one who drives it.
    stack.door.process.send(signal.SIGSTOP)
    try:
        with httpx.Client(base_url=f"{hasty.openai}/", timeout=WAIT_S) as client:
            batch = one_line_batch(client)
            wait_until(lambda: stack.state().waiting == 1, "its line is accepted")
            assert ask(hasty, 0).status_code == 503
            assert client.get(f"batches/{batch}").json()["request_counts"]["failed"] == 0
            stack.worker.start()
            wait_until(lambda: ended(client, batch), "the batch is over")
            counts = client.get(f"batches/{batch}").json()["request_counts"]
    finally:
        stack.door.process.send(signal.SIGCONT)
    assert counts == {"total": 1, "completed": 1, "failed": 0}
    wait_until(lambda: not stack.problem(), "nothing left of it")
