"""The box that ends a start: what is served, how much fits, where, how long each part took."""

import asyncio
import json
import shlex
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

import grpc
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from kaiten.api_key import VARIABLE
from kaiten.local.ports import LOOPBACK
from kaiten.local.stack import Stack
from kaiten.public_tls import PublicTls
from kaiten.v1 import (
    common_pb2,
    model_service_pb2,
    model_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)

ASK_S: Final = 5.0
AGAIN_S: Final = 0.2
AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_AnswerT = TypeVar("_AnswerT")
# The variables that `kaiten chat` and its like read.
CERT: Final = "KAITEN_TLS_CERT"
KEY: Final = "KAITEN_TLS_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the running services say of themselves."""

    model: model_service_pb2.Model
    workers: tuple[common_pb2.WorkerDescription, ...]

    @property
    def places(self) -> int:
        """Tokens whose keys and values fit into all pools together."""
        return sum(worker.block_count * worker.block_size for worker in self.workers)

    @property
    def slots(self) -> int:
        return sum(worker.slots_max for worker in self.workers)


async def ask(stack: Stack) -> Facts:
    """Ask the gateway for its model and each worker for its pool. AioRpcError: one refuses."""
    workers = [await _until_answered(_describe, each) for each in stack.worker_addresses]
    model = await _until_answered(_model, stack.private_address)
    return Facts(
        model=model or model_service_pb2.Model(name=workers[0].model), workers=tuple(workers)
    )


async def _until_answered(
    ask: Callable[[grpc.aio.Channel], Awaitable[_AnswerT]], address: str
) -> _AnswerT:
    """Who has died since it was ready is started again, which takes a while."""
    while True:
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                return await ask(channel)
        except grpc.aio.AioRpcError as error:
            if error.code() not in AWAY:
                raise
        await asyncio.sleep(AGAIN_S)


async def _model(channel: grpc.aio.Channel) -> model_service_pb2.Model | None:
    """None: the gateway wants an API key, and this command has none."""
    stub = model_service_pb2_grpc.ModelServiceStub(channel)
    try:
        listed = await stub.ListModels(model_service_pb2.ListModelsRequest(), timeout=ASK_S)
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAUTHENTICATED:
            raise
        return None
    model: model_service_pb2.Model = listed.models[0]
    return model


async def _describe(channel: grpc.aio.Channel) -> common_pb2.WorkerDescription:
    stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
    answer = await stub.Describe(worker_service_pb2.DescribeRequest(), timeout=ASK_S)
    worker: common_pb2.WorkerDescription = answer.worker
    return worker


def show(console: Console, lines: Iterable[tuple[str, str]]) -> None:
    """The box. The snippets come after it, without a frame, so that they can be copied."""
    table = Table.grid(padding=(0, 2))
    for key, value in lines:
        table.add_row(f"[bold]{key}", escape(value))
    console.print(Panel(table, title="kaiten is ready", title_align="left", border_style="green"))


def rows(
    stack: Stack, facts: Facts, took_s: Mapping[str, float], *, has_keys: bool
) -> list[tuple[str, str]]:
    """The lines of the box."""
    worker = facts.workers[0]
    blocks = sum(each.block_count for each in facts.workers)
    pool = f"{_counted(blocks, 'block')} × {worker.block_size}"
    of_host = sum(each.capabilities.host_block_count for each in facts.workers)
    groups = worker.capabilities.layer_groups
    is_windowed = any(group.window_tokens for group in groups)
    if len(groups) > 1:
        pool += f" tokens of {max(group.layer_count for group in groups)} layers"
    else:
        pool += f" = {facts.places} tokens"
    keys = f"on; export yours as {VARIABLE} for the lines below"
    count = f" × {len(facts.workers)} workers" if len(facts.workers) > 1 else ""
    return [
        ("model", f"{facts.model.name} ({worker.architecture})"),
        ("dtype", f"{worker.dtype} on {worker.device}{count}"),
        ("KV pool", f"{pool} in {worker.kv_dtype}"),
        *([("host memory", f"{_counted(of_host, 'KV block')} more")] if of_host else []),
        *([("a context", context_cost(facts))] if is_windowed else []),
        (
            "concurrency",
            f"{_counted(facts.slots, 'sequence')}, {worker.context_tokens_max} tokens each at most",
        ),
        ("HTTP", stack.http_url),
        ("gRPC", stack.grpc_address),
        *([("metrics", _metrics(stack))] if stack.metrics_ports else []),
        *([("API keys", keys)] if has_keys else []),
        *([("TLS", _tls(stack.tls))] if stack.tls else []),
        ("started", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took_s.items())),
    ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _tls(tls: PublicTls) -> str:
    asked = f"; clients show theirs: export {CERT} and {KEY}" if tls.wants_client_cert else ""
    return f"{tls.cert}{asked}"


def _metrics(stack: Stack) -> str:
    """Where Prometheus looks: at every process but the store."""
    pages = (f"{LOOPBACK}:{port}" for port in stack.metrics_ports)
    return ", ".join((f"{stack.http_url}/metrics", *pages))


def context_cost(facts: Facts) -> str:
    """What the longest sequence holds at once, by kind of layer group."""
    worker, layers, blocks = facts.workers[0], Counter[int](), Counter[int]()
    for group in worker.capabilities.layer_groups:
        layers[group.window_tokens] += group.layer_count
        blocks[group.window_tokens] += group.blocks_max
    told = (
        f"{_counted(blocks[window], 'block')} in {_counted(layers[window], 'layer')}"
        + (f" with a window of {window}" if window else "")
        for window in layers
    )
    fits = sum(each.block_count // blocks.total() for each in facts.workers)
    return f"{worker.context_tokens_max} tokens hold {', '.join(told)}; {fits} fit at once"


def _python() -> str:
    """The interpreter that has kaiten: the one on PATH may be another."""
    path, here = Path(sys.executable), Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def snippets(stack: Stack, model: str, *, can_chat: bool, has_keys: bool) -> str:
    """Three ways to say hello, to be pasted as they are; with keys on, the caller's is exported."""
    body: dict[str, object] = {"model": model, "max_tokens": 64}
    if can_chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "Once upon a time"
    grpc_body = json.dumps({"text": "Once upon a time", "sampling": {"maxTokens": 64}})
    header = key = ""
    if has_keys:
        # In double quotes: the shell puts the key in.
        header = f' -H "authorization: Bearer ${VARIABLE}"'
        key = f', api_key=os.environ["{VARIABLE}"]'
    trust = _Trust.of(stack.tls)
    imports = "import os\n" if "os.environ" in key + trust.python else ""
    return f"""\
curl{trust.curl} {stack.http_url}/v1/{path}{header} -H 'content-type: application/json' \\
  -d '{json.dumps(body)}'

grpcurl{trust.grpcurl}{header} -d '{grpc_body}' \\
  {stack.grpc_address} kaiten.v1.InferenceService/Generate

{_python()} - <<'PY'
{imports}from kaiten.client import {trust.imported}Client
with Client("{stack.grpc_address}"{key}{trust.python}) as client:
    for delta in client.generate("Once upon a time", max_tokens=64):
        print(delta.text, end="", flush=True)
PY
"""


class _Trust(NamedTuple):
    """What each snippet says of certificates: ours is trusted as such, the caller's is exported."""

    curl: str = ""
    grpcurl: str = " -plaintext"
    python: str = ""
    imported: str = ""

    @classmethod
    def of(cls, tls: PublicTls | None) -> Self:
        if tls is None:
            return cls()
        cert = shlex.quote(str(tls.cert))
        own = python = ""
        if tls.wants_client_cert:
            own = f' {{dash}}cert "${CERT}" {{dash}}key "${KEY}"'
            python = f', cert=os.environ["{CERT}"], key=os.environ["{KEY}"]'
        return cls(
            curl=f" --cacert {cert}" + own.format(dash="--"),
            grpcurl=f" -cacert {cert}" + own.format(dash="-"),
            python=f", tls=TLS(ca={str(tls.cert)!r}{python})",
            imported="TLS, ",
        )
