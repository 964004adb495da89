"""Who may call what: every RPC and every route of a gateway that has keys, each in this table."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import pytest

from gateway.app import OPERATIONS
from gateway.cell.operators import SERVICE
from gateway.grpc import inference
from gateway.grpc.operators import OperatorServicer
from gateway.main import GatewayService
from kaiten.v1 import inference_service_pb2, model_service_pb2, scheduler_service_pb2
from service_kit.grpc_server import add_health, add_reflection
from tests.support.gateway_stack import WAIT_S, Stack, running_stack

ANYBODY, TENANT, OPERATOR = "anybody", "tenant", "operator"
# A method or a route that is not here fails the test: whoever adds one says who may call it.
RPCS: Final = {
    "/kaiten.v1.InferenceService/Generate": TENANT,
    "/kaiten.v1.InferenceService/GenerateBatch": TENANT,
    "/kaiten.v1.InferenceService/Attach": TENANT,
    "/kaiten.v1.InferenceService/Cancel": TENANT,
    "/kaiten.v1.InferenceService/GetRequest": TENANT,
    "/kaiten.v1.InferenceService/Explain": TENANT,
    "/kaiten.v1.ModelService/ListModels": TENANT,
    "/kaiten.v1.ModelService/Tokenize": TENANT,
    "/kaiten.v1.ModelService/Detokenize": TENANT,
    "/kaiten.v1.SchedulerService/Watch": OPERATOR,
    "/kaiten.v1.SchedulerService/ReadArchive": OPERATOR,
    "/grpc.health.v1.Health/Check": ANYBODY,
    "/grpc.health.v1.Health/Watch": ANYBODY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ANYBODY,
}
ROUTES: Final = {
    "POST /v1/responses": TENANT,
    "POST /v1/responses/input_tokens": TENANT,
    "GET /v1/responses/{id}": TENANT,
    "DELETE /v1/responses/{id}": TENANT,
    "POST /v1/responses/{id}/cancel": TENANT,
    "GET /v1/responses/{id}/input_items": TENANT,
    "POST /v1/conversations": TENANT,
    "GET /v1/conversations/{id}": TENANT,
    "POST /v1/conversations/{id}": TENANT,
    "DELETE /v1/conversations/{id}": TENANT,
    "POST /v1/conversations/{id}/items": TENANT,
    "GET /v1/conversations/{id}/items": TENANT,
    "GET /v1/conversations/{id}/items/{item_id}": TENANT,
    "DELETE /v1/conversations/{id}/items/{item_id}": TENANT,
    "POST /v1/files": TENANT,
    "GET /v1/files": TENANT,
    "GET /v1/files/{id}": TENANT,
    "GET /v1/files/{id}/content": TENANT,
    "DELETE /v1/files/{id}": TENANT,
    "POST /v1/batches": TENANT,
    "GET /v1/batches": TENANT,
    "GET /v1/batches/{id}": TENANT,
    "POST /v1/batches/{id}/cancel": TENANT,
    "POST /v1/chat/completions": TENANT,
    "POST /v1/completions": TENANT,
    "GET /v1/requests/{id}/explain": TENANT,
    "GET /v1/watch": OPERATOR,
    "POST /v1/rehearsals": OPERATOR,
    "GET /v1/archive": OPERATOR,
    "GET /v1/models": TENANT,
    "GET /v1/models/{name:path}": TENANT,
    "POST /tokenize": TENANT,
    "POST /detokenize": TENANT,
    "GET /health": ANYBODY,
    "GET /livez": ANYBODY,
    "GET /ready": ANYBODY,
    "GET /readyz": ANYBODY,
    "GET /metrics": ANYBODY,
    "GET /version": ANYBODY,
    "GET /openapi.json": ANYBODY,
    "GET /docs": ANYBODY,
    "GET /": ANYBODY,
    "GET /dashboard": ANYBODY,
}
# Between schedulers and workers: a gateway answers them as if they were not.
INNER: Final = {
    f"/{SERVICE}/{method.name}"
    for method in scheduler_service_pb2.DESCRIPTOR.services_by_name["SchedulerService"].methods
} - RPCS.keys()
CALLERS: Final = {"": ANYBODY, "wrong": ANYBODY, "tenant": TENANT, "operator": OPERATOR}
RANK: Final = (ANYBODY, TENANT, OPERATOR)


@pytest.fixture
async def stack(
    tmp_path: Path, redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    monkeypatch.setattr("gateway.wrong_keys.WAIT_S_MAX", 0.0)
    monkeypatch.setattr("gateway.cell.leader.LEADERLESS_S_MAX", 0.0)
    keys = tmp_path / "keys.toml"
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("tenant", "operator")}
    keys.write_text(
        f'[[keys]]\ntenant = "a"\ndigest = "sha256:{digest["tenant"]}"\n'
        f'[[keys]]\ntenant = "a"\ndigest = "sha256:{digest["operator"]}"\nrole = "operator"\n'
    )
    async with running_stack(tmp_path / "model", redis_url, cell, api_keys_file=keys) as running:
        yield running


class Recorder:
    """Stands for a server: which methods are put on it."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        for handler in handlers:
            self.methods |= dict(handler._method_handlers)


def methods_of(service: GatewayService) -> dict[str, Any]:
    server: Any = Recorder()
    inference.add_to(server, service.generation_service, service._keyring, batch_max=1)
    OperatorServicer(service._operators, service._keyring).add_to(server)
    add_health(server)
    add_reflection(server, inference.SERVICE_NAMES)
    return dict(server.methods)


async def code_of(channel: "grpc.aio.Channel", path: str, key: str, *, streams: bool) -> str:
    """How an empty call ends; "OK" at its first answer."""
    method = channel.unary_stream if streams else channel.unary_unary
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    call = method(path)(b"", metadata=metadata, timeout=WAIT_S)
    try:
        await (anext(aiter(call)) if streams else call)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    except StopAsyncIteration:
        return "OK"
    finally:
        call.cancel()
    return "OK"


REFUSALS: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED")


async def test_every_rpc_asks_who_calls(stack: Stack) -> None:
    known = methods_of(stack.gateway.service)
    assert set(known) == set(RPCS)
    for path, least in RPCS.items():
        for key, rank in CALLERS.items():
            streams = known[path].response_streaming
            code = await code_of(stack.gateway.channel, path, key, streams=streams)
            if RANK.index(rank) >= RANK.index(least):
                assert code not in REFUSALS, (path, key)
                continue
            refusal = "PERMISSION_DENIED" if rank == TENANT else "UNAUTHENTICATED"
            assert code == refusal, (path, key)
    assert stack.scheduler.submits == []


async def test_what_is_between_the_parts_is_not_at_the_door(stack: Stack) -> None:
    described = {inference_service_pb2.DESCRIPTOR, model_service_pb2.DESCRIPTOR}
    names = {
        f"/{service.full_name}/{method.name}"
        for file in described
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert names <= set(RPCS)
    assert INNER
    for path in INNER:
        code = await code_of(stack.gateway.channel, path, "operator", streams=False)
        assert code == "UNIMPLEMENTED", path


async def test_every_route_asks_who_calls(stack: Stack) -> None:
    assert {f"{each.method} {each.path}" for each in OPERATIONS} == set(ROUTES)
    async with httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as http:
        for route, least in ROUTES.items():
            method, path = route.replace("{name:path}", "x").replace("{id}", "x").split()
            for key, rank in CALLERS.items():
                headers = {"authorization": f"Bearer {key}"} if key else {}
                reply = await http.request(method, path, headers=headers)
                is_refused = RANK.index(rank) < RANK.index(least)
                assert (reply.status_code in (401, 403)) == is_refused, (route, key)
        said = (await http.get("/metrics")).text
    assert stack.scheduler.submits == []
    wrong = sum(least != ANYBODY for least in ROUTES.values())
    assert f"kaiten_gateway_wrong_keys_total {wrong}.0" in said
