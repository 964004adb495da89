"""Start, readiness, drain and the loss of other parts, told truthfully."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import redis.asyncio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from gateway.cell.ledger_session import LedgerLink
from gateway.cell.readiness import Readiness
from gateway.openai.batches.driver import BatchDriver
from gateway.openai.conversations.keeper import ConversationKeeper
from gateway.tenants import KeysFile
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import model_service_pb2 as model_pb
from kaiten.v1.common_pb2 import SamplingParams
from service_kit.errors import ConfigError
from tests.fakes.scripted_scheduler import ScriptedScheduler
from tests.support.gateway_stack import (
    MODEL,
    WAIT_S,
    running_gateway,
    running_stack,
    text_of,
    until,
)
from tests.support.store_server import own_store
from tests.support.tokenizers import write_model_folder

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_becomes(channel: "grpc.aio.Channel", service: str, status: int) -> None:
    """Wait for it: a look at the store that took long is a moment of not serving."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with asyncio.timeout(WAIT_S):
        while (await HealthStub(channel).Check(request)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_readiness_follows_the_cell(tmp_path: Path, redis_url: str, cell: str) -> None:
    async with running_stack(
        tmp_path / "model", redis_url, cell, leader_quiet_s_max=1.0, stalled_ms_max=100
    ) as stack:
        readiness = stack.gateway.service.generation_service.readiness
        record = stack.scheduler.cell
        await until(lambda: readiness.problem == "", "readiness")
        for service in ("", "kaiten.v1.InferenceService", "kaiten.v1.ModelService"):
            await health_becomes(stack.gateway.channel, service, SERVING)
        record.workers_ready = 0
        await until(lambda: readiness.problem == "no worker is ready", "no worker")
        await health_becomes(stack.gateway.channel, "", NOT_SERVING)
        record.workers_expected = 1
        await until(lambda: readiness.problem == "", "a new leader that knows of one")
        record.workers_expected, record.problem = 0, "none is registered"
        await until(
            lambda: readiness.problem == "no worker is ready: none is registered", "and not of any"
        )
        record.problem = ""
        record.workers_ready, record.stalled_ms = 1, 500
        await until(lambda: "nothing was committed for 500 ms" in readiness.problem, "stalled")
        record.stalled_ms = 0
        await until(lambda: readiness.problem == "", "readiness again")
        record.model.vocab_size += 1
        await until(lambda: "another model" in readiness.problem, "another model")
        record.model.vocab_size -= 1
        record.model.tokenizer_digest = hashlib.sha256(b"as many tokens, other texts").hexdigest()
        await until(lambda: "tokenizer.json" in readiness.problem, "another tokenizer")
        tokenizer = (tmp_path / "model" / "tokenizer.json").read_bytes()
        record.model.tokenizer_digest = hashlib.sha256(tokenizer).hexdigest()
        await until(lambda: readiness.problem == "", "the same tokenizer")
        stack.scheduler.stop_renewing()
        await until(lambda: "no scheduler leads" in readiness.problem, "no leader")
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
            for path in ("/ready", "/readyz"):
                reply = await http.get(path)
                assert (reply.status_code, "leads" in reply.json()["reason"]) == (503, True)
            for path in ("/health", "/livez"):
                assert (await http.get(path)).status_code == 200


async def test_a_gateway_before_its_cell_says_so_and_recovers(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    folder = write_model_folder(tmp_path / "model")
    async with running_gateway(folder, redis_url, cell) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(gateway.inference.Generate(pb.GenerateRequest(text="x"))))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http:
            reply = await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        ledger = gateway.service.link.ledger
        vocab_size = gateway.card.vocab_size
        async with ScriptedScheduler(ledger, vocab_size=vocab_size):
            watch = gateway.service.generation_service.readiness.watch
            await until(lambda: watch.worker is not None, "the cell's record")
            sampling = SamplingParams(max_tokens=3)
            request = pb.GenerateRequest(text="x", sampling=sampling)
            call = gateway.inference.Generate(request, timeout=WAIT_S)
            kinds = [response.event.WhichOneof("event") async for response in call]
            assert kinds[-1] == "done"


async def test_who_accepts_without_workers_is_ready_once_somebody_leads(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    folder = write_model_folder(tmp_path / "model")
    async with (
        running_gateway(
            folder, redis_url, cell, accept_without_workers=2.5, leader_quiet_s_max=WAIT_S
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=WAIT_S) as http,
    ):
        readiness = gateway.service.generation_service.readiness
        body = {"input": "x", "max_output_tokens": 1, "background": True}
        await until(lambda: "no scheduler has led" in readiness.problem, "no leader")
        assert (await http.post("/v1/responses", json=body)).status_code == 503
        ledger, vocab_size = gateway.service.link.ledger, gateway.card.vocab_size
        scheduler = ScriptedScheduler(ledger, vocab_size=vocab_size)
        scheduler.cell.ClearField("model")
        scheduler.cell.workers_ready = 0
        # A leader always says something.
        scheduler.cell.weights_digest = "none"
        async with scheduler:
            await until(lambda: not readiness.problem, "ready without a worker")
            assert (await http.post("/v1/responses", json=body)).status_code == 200
            await until(lambda: bool(scheduler.submits), "the request")
            assert [each.worker_wait_ms for each in scheduler.submits] == [2500]
            scheduler.cell.model.vocab_size = vocab_size + 1
            await until(lambda: "another model" in readiness.problem, "another model")
            assert (await http.post("/v1/responses", json=body)).status_code == 503


async def served(http: httpx.AsyncClient) -> str:
    """Why the model is not served; empty when it is. /ready and /v1/models say the same."""
    ready = await http.get("/ready")
    models, model = await http.get("/v1/models"), await http.get(f"/v1/models/{MODEL}")
    assert models.status_code == model.status_code == ready.status_code
    if ready.status_code == 200:
        assert [each["id"] for each in models.json()["data"]] == [model.json()["id"]] == [MODEL]
        return ""
    reason = str(ready.json()["reason"])
    for reply in (models, model):
        assert reply.json()["error"]["message"] == f"unavailable: {reason}"
        for name in ("x-should-retry", "retry-after"):
            assert reply.headers[name] == ready.headers[name]
    return reason


async def test_models_are_listed_exactly_while_they_are_served(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    folder = write_model_folder(tmp_path / "model")
    async with (
        running_gateway(
            folder, redis_url, cell, leader_quiet_s_max=WAIT_S, stalled_ms_max=100
        ) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=WAIT_S) as http,
    ):
        readiness = gateway.service.generation_service.readiness

        async def becomes(reason: str) -> None:
            await until(lambda: reason in readiness.problem, reason)
            assert reason in await served(http)

        async def becomes_served() -> None:
            await until(lambda: not readiness.problem, "served")
            assert await served(http) == ""

        async def ask() -> int:
            """Whether a request would be accepted, which is not the same as served."""
            body = {"input": "x", "max_output_tokens": 1, "background": True}
            return (await http.post("/v1/responses", json=body)).status_code

        await becomes("no scheduler has led this cell yet")
        assert await ask() == 503
        ledger, vocab_size = gateway.service.link.ledger, gateway.card.vocab_size
        scheduler = ScriptedScheduler(ledger, vocab_size=vocab_size)
        scheduler.cell.ClearField("model")
        async with scheduler:
            await becomes("no worker is ready")
            assert await ask() == 503
            scheduler.cell.model.vocab_size = vocab_size
            await becomes_served()
            # The first one, and not asked again: it is served.
            reply = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert reply.status_code == 200
            scheduler.cell.workers_ready = 0
            await becomes("no worker is ready")
            assert await ask() == 200, "it waits for a worker to come back"
            scheduler.cell.workers_ready, scheduler.cell.stalled_ms = 1, 500
            await becomes("nothing was committed for 500 ms")
            assert await ask() == 200
            scheduler.cell.stalled_ms, scheduler.cell.model.vocab_size = 0, vocab_size + 1
            await becomes("another model")
            assert await ask() == 503, "it would be computed by another model"
            scheduler.cell.model.vocab_size = vocab_size
            await becomes_served()
            readiness.drain()
            await becomes("this gateway is draining")
            assert await ask() == 503


async def test_models_name_the_limits(tmp_path: Path, redis_url: str, cell: str) -> None:
    folder = write_model_folder(
        tmp_path / "model", generation={"temperature": 0.5, "top_k": 7, "eos_token_id": [2, 5]}
    )
    async with running_stack(folder, redis_url, cell) as stack:
        stack.scheduler.cell.model.context_tokens_max = 100
        limits = stack.gateway.service.generation_service
        await until(lambda: limits.limits.context_tokens_max == 100, "the cell's limit")
        reply = await stack.gateway.models.ListModels(model_pb.ListModelsRequest())
        [model] = reply.models
        assert (model.name, model.context_tokens_max, model.choices_max) == (MODEL, 100, 16)
        assert (model.sampling_defaults.temperature, model.sampling_defaults.top_k) == (0.5, 7)
        assert list(model.eos_token_ids) == [2, 5]
        assert model.workers_ready == 1
        stack.says("x")
        await stack.generate(text="x")
        sampling = stack.scheduler.submits[0].sampling
        assert (sampling.temperature, sampling.top_k) == (0.5, 7)
        assert list(sampling.stop_token_ids) == [2, 5]


async def test_reflection_lists_the_services(tmp_path: Path, redis_url: str, cell: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    async with running_gateway(folder, redis_url, cell) as gateway:
        address = f"127.0.0.1:{gateway.service.grpc_port}"

        def ask() -> tuple[set[str], set[str]]:
            with grpc.insecure_channel(address) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                file = database.FindFileContainingSymbol("kaiten.v1.InferenceService")
                methods = {method.name for method in file.service[0].method}
                return set(database.get_services()), methods

        services, methods = await asyncio.to_thread(ask)
    assert {"kaiten.v1.InferenceService", "kaiten.v1.ModelService"} <= services
    assert methods == {"Generate", "GenerateBatch", "Attach", "Cancel", "GetRequest", "Explain"}


async def test_drain_lets_streams_end_and_refuses_new_ones(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell, drain_s=WAIT_S) as stack:
        stack.says("to the end")
        stack.scheduler.is_open.clear()
        call = stack.gateway.inference.Generate(pb.GenerateRequest(text="x"), timeout=WAIT_S)
        events = aiter(call)
        first = await anext(events)
        draining = asyncio.create_task(stack.gateway.service.drain())
        await until(
            lambda: stack.gateway.service.generation_service.readiness.is_draining, "draining"
        )
        await health_becomes(stack.gateway.channel, "", NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.generate(text="y")
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=60) as http:
            reply = await http.post("/v1/completions", json={"model": MODEL, "prompt": "y"})
        assert reply.status_code == 503
        # Who looks after batches looks again in the middle of it, and goes on.
        stack.gateway.service._batches.kick()
        await until(lambda: not stack.gateway.service._batches._kicked.is_set(), "a look")
        assert not draining.done()
        stack.scheduler.is_open.set()
        rest = [response.event async for response in events]
        assert text_of([first.event, *rest]) == "to the end"
        await asyncio.wait_for(draining, 60)


async def test_drain_sends_what_is_left_elsewhere_and_cancels_nothing(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell, drain_s=0.2) as stack:
        stack.says("finished elsewhere")
        stack.scheduler.is_open.clear()
        request = pb.GenerateRequest(text="x", request_id="moves")
        call = stack.gateway.inference.Generate(request, timeout=WAIT_S)
        events = aiter(call)
        await anext(events)
        async with running_gateway(tmp_path / "model", redis_url, cell) as other:
            there = other.service.generation_service.readiness
            await until(lambda: not there.problem, "readiness")
            await asyncio.wait_for(stack.gateway.service.drain(), 60)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext_all(events)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            stack.scheduler.is_open.set()
            attach = other.inference.Attach(pb.AttachRequest(request_id="moves"), timeout=WAIT_S)
            assert text_of([r.event async for r in attach]) == "finished elsewhere"
        assert stack.scheduler.cancels == []


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (LedgerLink, "run"),
        (Readiness, "run"),
        (BatchDriver, "run"),
        (ConversationKeeper, "run"),
        (KeysFile, "follow"),
    ],
)
async def test_a_loop_that_ends_unasked_ends_the_gateway(
    loop: type,
    name: str,
    tmp_path: Path,
    redis_url: str,
    cell: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def over(*_: object) -> None:
        pass

    monkeypatch.setattr(loop, name, over)
    keys = tmp_path / "keys"
    keys.write_text(
        f'[[keys]]\ntenant = "a"\ndigest = "sha256:{hashlib.sha256(b"k").hexdigest()}"\n'
    )
    write_model_folder(tmp_path / "model")

    async def serve_to_the_end() -> None:
        async with running_gateway(tmp_path / "model", redis_url, cell, api_keys_file=keys):
            serving = [one for one in asyncio.all_tasks() if "GatewayService.serve" in repr(one)]
            if serving:
                await asyncio.wait(serving, timeout=WAIT_S)

    with pytest.raises(ExceptionGroup) as ended:
        await serve_to_the_end()
    (error,) = ended.value.exceptions
    assert isinstance(error, RuntimeError)
    assert "over ended" in str(error)


async def test_deadline_without_a_scheduler_ends_as_deadline_exceeded(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell, request_timeout_s=4) as stack:
        stack.scheduler.is_open.clear()
        async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as http:
            # Both at once, of more time than it takes to accept them on a slow machine.
            body = {"model": MODEL, "prompt": "x"}
            posting = asyncio.create_task(http.post("/v1/completions", json=body))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext_all(stack.gateway.inference.Generate(pb.GenerateRequest(text="x")))
            reply = await posting
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
        stack.scheduler.is_open.set()
        await until(lambda: len(stack.scheduler.cancels) == 2, "the cancels")
        # Less what it took here.
        assert all(0 < record.timeout_ms <= 4000 for record in stack.scheduler.submits)


async def flush(url: str) -> None:
    """Everything gone, the store's nonce included: to its clients another store."""
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.flushall()


async def anext_all(call: Any) -> list[Any]:
    """Read to the end, or to the error."""
    return [response async for response in call]


async def test_the_grpc_deadline_travels(tmp_path: Path, redis_url: str, cell: str) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell) as stack:
        stack.says("x")
        await stack.generate(text="x")
        # Without one it would be 0, for none.
        assert 0 < stack.scheduler.submits[0].timeout_ms <= WAIT_S * 1000


async def test_a_deadline_can_be_given_by_http(tmp_path: Path, redis_url: str, cell: str) -> None:
    """Shorter or longer than the gateway's own; a stream ends with an event that tells."""
    body = {"model": MODEL, "prompt": "x"}
    async with (
        running_stack(tmp_path / "model", redis_url, cell, request_timeout_s=60) as stack,
        httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as http,
    ):
        for wrong in ("0", "0.0", "-1", "1e3", "nan", "soon", "1.0001", "12345678", "१"):
            header = {b"x-request-timeout-s": wrong.encode()}
            reply = await http.post("/v1/completions", json=body, headers=header)
            assert reply.status_code == 400, wrong
            assert reply.json()["error"]["param"] == "x-request-timeout-s"
        stack.says("x")
        headers = {"x-request-timeout-s": "90.5"}
        assert (await http.post("/v1/completions", json=body, headers=headers)).is_success
        stack.scheduler.is_open.clear()
        headers = {"x-request-timeout-s": "3.5"}
        reply, stream = await asyncio.gather(
            *(
                http.post("/v1/completions", json=body | {"stream": is_streaming}, headers=headers)
                for is_streaming in (False, True)
            )
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
        last = stream.text.split("\n\n")[-3:]
        assert '"code":"deadline_exceeded"' in last[0]
        assert last[1:] == ["data: [DONE]", ""]
        stack.scheduler.is_open.set()
        await until(lambda: len(stack.scheduler.submits) == 3, "the last one")
        given_ms = [record.timeout_ms for record in stack.scheduler.submits]
        # Less what it took here.
        for given, asked in zip(given_ms, (90500, 3500, 3500), strict=True):
            assert 0 < given <= asked


async def test_a_flushed_store_fails_streams_and_serves_again(tmp_path: Path, cell: str) -> None:
    with own_store(tmp_path / "store") as store:
        folder = write_model_folder(tmp_path / "model")
        async with running_stack(folder, store.url, cell) as stack:
            stack.scheduler.is_open.clear()
            call = stack.gateway.inference.Generate(pb.GenerateRequest(text="x"), timeout=WAIT_S)
            events = aiter(call)
            await anext(events)
            await stack.scheduler.stop()
            await flush(store.url)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext_all(events)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            link = stack.gateway.service.link
            await until(lambda: link.problem == "", "a new store")
            ledger = link.ledger
            async with ScriptedScheduler(ledger, vocab_size=stack.gateway.card.vocab_size):
                request = pb.GenerateRequest(text="x", sampling=SamplingParams(max_tokens=3))
                again = stack.gateway.inference.Generate(request, timeout=WAIT_S)
                assert (await anext_all(again))[-1].event.HasField("done")


async def test_a_wrong_store_is_refused_at_start(tmp_path: Path, cell: str) -> None:
    folder = write_model_folder(tmp_path / "model")
    settings = {"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"}
    with own_store(tmp_path / "store", **settings) as store:
        gateway = running_gateway(folder, store.url, cell)
        with pytest.raises(ConfigError, match="noeviction"):
            await gateway.__aenter__()


def test_the_process_starts_without_torch_stays_small_and_stops_on_sigterm(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    folder = write_model_folder(tmp_path / "model")
    command = [sys.executable, "-P", "-m", "gateway", "--model", str(folder), "--cell", cell]
    command += ["--redis-url", redis_url, "--grpc-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if json.loads(line)["event"] == "service.ready":
                break
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        rss_bytes = sum(member.memory_info().rss for member in family)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stderr.read()
    assert rss_bytes < 200e6
