"""The `kaiten` command. Each command imports what it needs by itself: `--help` stays quick."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from kaiten.cli import asking, become, packages
from kaiten.cli.asking import MaxTokens, System, Temperature, chat_of
from kaiten.cli.config_file import from_file, without_empty
from kaiten.cli.mistakes import explained, whole_numbers
from kaiten.console import shown_default
from kaiten.local import services
from kaiten.local.part_options import GatewayOptions, WorkerOptions
from kaiten.local.ports import PORT_MAX
from kaiten.local.scheduling import Scheduling
from kaiten.start_error import StartError, expanded

app: App = App(
    name="kaiten",
    help="Serve large language models with continuous batching.",
    version=packages.version_here,
    default_parameter=Parameter(negative=(), show_default=shown_default),
    error_formatter=lambda error: explained(error, app),
    config=(without_empty, from_file, whole_numbers),
)
app.register_install_completion_command(
    help="Complete commands and flags in this shell, from its next start on."
)
USE = Group("Use a running stack", sort_key=1)
PARTS = Group("Run one part", sort_key=2)
for command in asking.COMMANDS:
    app.command(command, group=USE)
app.command(
    "kaiten.bench.cli:app",
    name="bench",
    group=USE,
    help="Put load on a server and measure what comes back.",
)

PORT = Number(gte=0, lte=PORT_MAX)
Model = Annotated[
    str | None, Parameter(name="--model", help="folder or hub id; default: the shipped one")
]
HttpPort = Annotated[
    int,
    Parameter(
        name=("--http-port", "--port"),
        help="OpenAI HTTP API; 0 picks a free port",
        validator=PORT,
    ),
]
Workers = Annotated[
    int,
    Parameter(
        name=("--workers", "--data-parallel-size"),
        help="worker processes, each with the whole model",
        validator=Number(gte=1, lte=1024),
    ),
]
RedisUrl = Annotated[
    str | None,
    Parameter(
        env_var="KAITEN_REDIS_URL",
        help="use this store, start none; a password belongs into the variable: flags can be seen",
    ),
]
ConfigFile = Annotated[
    Path | None,
    Parameter(help="TOML file of these flags, without their dashes; flags go before it"),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    Parameter(help="of every part's log; default: info"),
]
MetricsPort = Annotated[
    int | None,
    Parameter(
        help="Prometheus pages of schedulers and workers, on loopback: this port and those after"
        " it; 0 picks free ones; default: none. The gateway's is /metrics of the HTTP API",
        validator=PORT,
    ),
]
# Of each part its own; the groups are those of `kaiten serve --help`.
WORKERS = Parameter(name="*", group=Group("Workers", sort_key=2))
GATEWAY = Parameter(name="*", group=Group("Gateway", sort_key=3))
SCHEDULING = Parameter(
    name="*", group=Group("Scheduling", sort_key=4, help="see docs/scheduling.md")
)
WORKER_DEFAULTS, GATEWAY_DEFAULTS, SCHEDULING_DEFAULTS = (
    WorkerOptions(),
    GatewayOptions(),
    Scheduling(),
)


@app.command
def serve(
    model: Model = None,
    *,
    served_model_name: Annotated[str | None, Parameter(help="default: the folder or id")] = None,
    revision: Annotated[str | None, Parameter(help="branch, tag or commit of a hub id")] = None,
    host: Annotated[str, Parameter(help="listen here; 0.0.0.0: everywhere")] = "127.0.0.1",
    http_port: HttpPort = 8000,
    grpc_port: Annotated[
        int, Parameter(help="gRPC API; 0 picks a free port", validator=PORT)
    ] = 50051,
    workers: Workers = 1,
    data_dir: Annotated[Path, Parameter(help="the store's files, logs and lock")] = Path(".kaiten"),
    redis_url: RedisUrl = None,
    cell: Annotated[str, Parameter(help="which cell of a shared store")] = "0",
    log_level: LogLevel = None,
    config: ConfigFile = None,
    metrics_port: MetricsPort = None,
    worker: Annotated[WorkerOptions, WORKERS] = WORKER_DEFAULTS,
    gateway: Annotated[GatewayOptions, GATEWAY] = GATEWAY_DEFAULTS,
    scheduling: Annotated[Scheduling, SCHEDULING] = SCHEDULING_DEFAULTS,
) -> int:
    """Serve a model: store, scheduler, workers and gateway as processes under one supervisor."""
    from kaiten.cli.serve import serve as serve_stack
    from kaiten.local import model_source, stack

    options = stack.ServeOptions(
        model=model_source.resolve(model, served_model_name, revision),
        data_dir=expanded(data_dir).resolve(),
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        workers=workers,
        redis_url=redis_url,
        cell=cell,
        log_level=log_level,
        metrics_port=metrics_port,
        worker=worker,
        gateway=gateway,
        scheduling=scheduling,
    )
    return asyncio.run(serve_stack(options))


@app.command
def run(
    model: Model = None,
    *,
    revision: Annotated[str | None, Parameter(help="branch, tag or commit of a hub id")] = None,
    workers: Workers = 1,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    worker: Annotated[WorkerOptions, WORKERS] = WORKER_DEFAULTS,
) -> int:
    """Serve a model for as long as you talk to it. Ctrl-C stops an answer, Ctrl-D leaves."""
    from kaiten.cli.run import run as run_stack
    from kaiten.local import model_source

    return run_stack(
        model_source.resolve(model, None, revision),
        workers=workers,
        worker=worker,
        chat=chat_of(system, max_tokens, temperature),
    )


@app.command(group=USE)
def keygen(
    tenant: Annotated[str, Parameter(help="whose key it will be")],
    /,
    *,
    role: Annotated[
        Literal["tenant", "operator"],
        Parameter(help="operator: sees the live core and the archive, every tenant's"),
    ] = "tenant",
) -> int:
    """Mint an API key. The key goes to stderr, its entry for the gateway's keys file to stdout."""
    from kaiten.cli.keygen import mint

    try:
        key, entry = mint(tenant, role)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"key (shown once): {key}", file=sys.stderr)
    print(entry, end="")
    return 0


@app.command(group=USE)
def doctor(
    *,
    grpc_port: Annotated[int, Parameter(help="port you mean to use", validator=PORT)] = 50051,
    http_port: Annotated[
        int,
        Parameter(name=("--http-port", "--port"), help="port you mean to use", validator=PORT),
    ] = 8000,
    json: Annotated[bool, Parameter(help="every finding, as JSON")] = False,
    bench: Annotated[
        bool, Parameter(help="time this CPU and steps of --model on it: ten seconds, or more")
    ] = False,
    model: Model = None,
) -> int:
    """Check this machine: what works, what does not, and what to do about it."""
    from kaiten.cli.doctor import run
    from kaiten.local import model_source

    timed = model_source.resolve(model).folder if bench else None
    return run(grpc_port=grpc_port, http_port=http_port, as_json=json, bench=timed)


Rest = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


@app.command(group=USE, help_flags=[], version_flags=[])
def archive(*arguments: Rest) -> NoReturn:
    """Read what schedulers have decided: ls, cat, verify, steps. Flags: `kaiten archive --help`."""
    become("archive", arguments)


@app.command(group=USE, help_flags=[], version_flags=[])
def profile(*arguments: Rest) -> NoReturn:
    """See what a worker does in its next steps, as a trace. Flags: `kaiten profile --help`."""
    become("profile", arguments)


@app.command(group=PARTS, help_flags=[], version_flags=[])
def gateway(*arguments: Rest) -> NoReturn:
    """The front door: gRPC and OpenAI HTTP. Flags: `kaiten gateway --help`."""
    become("gateway", arguments)


@app.command(group=PARTS, help_flags=[], version_flags=[])
def scheduler(*arguments: Rest) -> NoReturn:
    """The one that decides each batch. Flags: `kaiten scheduler --help`."""
    become("scheduler", arguments)


@app.command(group=PARTS, help_flags=[], version_flags=[])
def worker(*arguments: Rest) -> NoReturn:
    """The one that computes. Flags: `kaiten worker --help`."""
    become("worker", arguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script. Users never see a traceback of their own mistake."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in services.MODULES:
            become(arguments[0], arguments[1:])
        code = app(arguments, result_action="return_value")
    except StartError as error:
        from kaiten.cli.display import show_start_error

        show_start_error(error)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
