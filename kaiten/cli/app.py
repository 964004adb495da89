"""The `kaiten` command. Each command imports what it needs by itself: `--help` stays quick."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NoReturn

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from kaiten.api_key import ApiKeyFile, api_key_of
from kaiten.cli import become, packages
from kaiten.cli.config_file import from_file
from kaiten.cli.mistakes import explained
from kaiten.console import shown_default
from kaiten.local import services
from kaiten.local.part_options import GatewayOptions, WorkerOptions
from kaiten.local.scheduling import Scheduling
from kaiten.start_error import StartError, expanded
from kaiten.tls_options import NO_TLS, TlsOptions

if TYPE_CHECKING:
    from kaiten.cli.chat.state import Chat

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"

app: App = App(
    name="kaiten",
    help="Serve large language models with continuous batching.",
    version=packages.version_here,
    default_parameter=Parameter(negative=(), show_default=shown_default),
    error_formatter=lambda error: explained(error, app),
    config=from_file,
)
app.register_install_completion_command(
    help="Complete commands and flags in this shell, from its next start on."
)
USE = Group("Use a running stack", sort_key=1)
PARTS = Group("Run one part", sort_key=2)
app.command(
    "kaiten.bench.cli:app",
    name="bench",
    group=USE,
    help="Put load on a server and measure what comes back.",
)

Address = Annotated[
    str, Parameter(help="host:port of a gateway's gRPC API; https:// before it: with TLS")
]
Watched = Annotated[
    tuple[str, ...],
    Parameter(help="host:port of a gateway, or of schedulers; repeatable", negative=()),
]
Model = Annotated[
    str | None, Parameter(name="--model", help="folder or hub id; default: the shipped one")
]
HttpPort = Annotated[
    int,
    Parameter(name=("--http-port", "--port"), help="OpenAI HTTP API; 0 picks a free port"),
]
Workers = Annotated[
    int,
    Parameter(
        name=("--workers", "--data-parallel-size"),
        help="worker processes, each with the whole model",
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
System = Annotated[str | None, Parameter(help="a system message")]
MaxTokens = Annotated[int | None, Parameter(help="tokens of an answer at most")]
Temperature = Annotated[float | None, Parameter(help="0 is greedy")]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None,
    Parameter(help="of every part's log; default: info"),
]
MetricsPort = Annotated[
    int | None,
    Parameter(
        help="Prometheus pages of schedulers and workers, on loopback: this port and those after"
        " it; 0 picks free ones; default: none. The gateway's is /metrics of the HTTP API"
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
    grpc_port: Annotated[int, Parameter(help="gRPC API; 0 picks a free port")] = 50051,
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
def generate(
    prompt: Annotated[str | None, Parameter(help="a text; none: standard input")] = None,
    /,
    *,
    file: Annotated[Path | None, Parameter(help="the prompt is in this file")] = None,
    json: Annotated[bool, Parameter(help="all of the answer, as a line of JSON")] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key_file: ApiKeyFile = None,
    tls: TlsOptions = NO_TLS,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: Annotated[float | None, Parameter(help="nucleus")] = None,
    top_k: Annotated[int | None, Parameter(help="likeliest tokens to choose from")] = None,
    seed: Annotated[int | None, Parameter(help="same seed, same text")] = None,
    stop: Annotated[tuple[str, ...], Parameter(help="end at this text; repeatable")] = (),
    json_schema: Annotated[Path | None, Parameter(help="the answer keeps to this file's")] = None,
    grammar: Annotated[Path | None, Parameter(help="or to this file's: Lark or GBNF")] = None,
    regex: Annotated[str | None, Parameter(help="or to this expression, as a whole")] = None,
) -> int:
    """Continue a text, streaming it to the terminal."""
    from kaiten.cli.generate import generate as generate_text
    from kaiten.cli.generate import prompt_of, structured_of

    try:
        text = prompt_of(prompt, file)
        structured = structured_of(json_schema, grammar, regex)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return generate_text(
        *tls.of_or_exit(address),
        text,
        api_key=api_key_of(api_key_file),
        as_json=json,
        options={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "seed": seed,
            "stop": stop,
            "structured_outputs": structured,
        },
    )


@app.command(group=USE)
def chat(
    *,
    address: Address = DEFAULT_ADDRESS,
    api_key_file: ApiKeyFile = None,
    tls: TlsOptions = NO_TLS,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
) -> int:
    """Talk to the model. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."""
    from kaiten.cli.chat.command import converse
    from kaiten.cli.complaint import RESUME_S
    from kaiten.client import Client

    where, trusted = tls.of_or_exit(address)
    key = api_key_of(api_key_file)
    with Client(where, resume_s=RESUME_S, api_key=key, tls=trusted or False) as client:
        return converse(client, chat_of(system, max_tokens, temperature), where)


@app.command(group=USE)
def batch(
    file: Annotated[Path, Parameter(help="a request per line, as OpenAI's batches have them")],
    /,
    *,
    url: Annotated[str, Parameter(help="of the HTTP API")] = "http://127.0.0.1:8000",
    api_key_file: ApiKeyFile = None,
    tls: TlsOptions = NO_TLS,
    cancel: Annotated[bool, Parameter(help="end the one that was begun; keep its answers")] = False,
) -> int:
    """Have the lines of a file answered, behind all that is live. Killed, run it again."""
    packages.require("batch")
    from kaiten.cli.batch import batch as run_batch

    where, trusted = tls.of_or_exit(url)
    scheme = "http" if trusted is None else "https"
    key = api_key_of(api_key_file)
    return run_batch(f"{scheme}://{where}", trusted, file, api_key=key, cancels=cancel)


def chat_of(system: str | None, max_tokens: int | None, temperature: float | None) -> "Chat":
    """A conversation that begins with these settings."""
    from kaiten.cli.chat.state import Chat

    given = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    return Chat(system=system or "", options=options)


OF_ARCHIVES: Final = "of the past: a folder of archives, or a gateway's host:port; repeatable"


@app.command(group=USE)
def explain(
    request_id: Annotated[str, Parameter(help="as its answer has it")],
    /,
    *,
    address: Annotated[str, Parameter(help="host:port of a gateway")] = DEFAULT_ADDRESS,
    api_key_file: ApiKeyFile = None,
    tls: TlsOptions = NO_TLS,
    tenant: Annotated[str, Parameter(help="whose it is, for operators; default: the key's")] = "",
    archive: Annotated[tuple[str, ...], Parameter(help=OF_ARCHIVES, negative=())] = (),
    until: Annotated[
        str, Parameter(help="of archives, the newest of this id before then: 2026-11-22T17:00")
    ] = "",
    json: Annotated[bool, Parameter(help="what is told, as JSON")] = False,
) -> int:
    """See where the time of a request went: for what it waited, who was in its steps."""
    from kaiten.cli import explain as told

    if archive:
        return told.explain_archived(
            archive, request_id, tenant, api_key_file, until=until, as_json=json
        )
    where, trusted = tls.of_or_exit(address)
    key = api_key_of(api_key_file)
    return told.explain(where, trusted, request_id, tenant=tenant, api_key=key, as_json=json)


@app.command(group=USE)
def trace(
    request_id: Annotated[str, Parameter(help="as its answer has it")],
    /,
    *,
    address: Annotated[str, Parameter(help="host:port of a gateway")] = DEFAULT_ADDRESS,
    api_key_file: ApiKeyFile = None,
    tls: TlsOptions = NO_TLS,
    tenant: Annotated[str, Parameter(help="whose it is, for operators; default: the key's")] = "",
    ui: Annotated[str, Parameter(help="of Jaeger, for the link")] = "http://127.0.0.1:16686",
    json: Annotated[bool, Parameter(help="what is told, as JSON")] = False,
) -> int:
    """See a request's spans as a waterfall, and the trace's id to look them up by."""
    from kaiten.cli.live.trace import trace as trace_request

    where, trusted = tls.of_or_exit(address)
    key = api_key_of(api_key_file)
    return trace_request(
        where, trusted, request_id, tenant=tenant, api_key=key, ui=ui, as_json=json
    )


@app.command(group=USE)
def watch(
    *,
    address: Watched = (DEFAULT_ADDRESS,),
    api_key_file: ApiKeyFile = None,
    tls: TlsOptions = NO_TLS,
    interval_ms: Annotated[
        int, Parameter(help="between two looks", validator=Number(gte=100, lte=60_000))
    ] = 1000,
    once: Annotated[bool, Parameter(help="one look")] = False,
    blocks: Annotated[bool, Parameter(help="with the KV map: whose is which block")] = False,
    json: Annotated[bool, Parameter(help="what is told, as lines of JSON")] = False,
) -> int:
    """See the batch live: who runs on which worker, who waits, and why."""
    from kaiten.cli.watch import watch as watch_core

    return watch_core(
        [tls.of_or_exit(each) for each in address],
        api_key=api_key_of(api_key_file),
        interval_ms=interval_ms,
        once=once,
        with_blocks=blocks,
        as_json=json,
    )


@app.command(group=USE)
def top(
    *,
    address: Watched = (DEFAULT_ADDRESS,),
    api_key_file: ApiKeyFile = None,
    tls: TlsOptions = NO_TLS,
    interval_ms: Annotated[
        int, Parameter(help="between two looks", validator=Number(gte=100, lte=60_000))
    ] = 500,
) -> int:
    """See slots, workers, queue and KV live, as in `top`. b: KV blocks, space: hold, q: quit."""
    packages.require("top")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print("kaiten top needs a terminal; kaiten watch does without", file=sys.stderr)
        return 2
    from kaiten.cli.live.top import top as show

    gateways = [tls.of_or_exit(each) for each in address]
    return show(gateways, api_key=api_key_of(api_key_file), interval_ms=interval_ms)


@app.command(group=USE)
def ps(
    *,
    address: Watched = (DEFAULT_ADDRESS,),
    api_key_file: ApiKeyFile = None,
    tls: TlsOptions = NO_TLS,
    json: Annotated[bool, Parameter(help="a line of JSON for each")] = False,
) -> int:
    """List the requests that live: whose, how far, how old, and why they wait."""
    from kaiten.cli.live.ps import ps as list_requests

    gateways = [tls.of_or_exit(each) for each in address]
    return list_requests(gateways, api_key=api_key_of(api_key_file), as_json=json)


@app.command(group=USE)
def healthcheck(
    address: Annotated[str, Parameter(help="host:port of any part's gRPC port")],
    /,
    *,
    service: Annotated[str, Parameter(help="a gRPC service; default: the process")] = "",
    tls: TlsOptions = NO_TLS,
) -> int:
    """Exit with 0 when the part at ADDRESS is serving, else 1. For container health checks."""
    from kaiten.local.health import state_of

    where, credentials = tls.of_or_exit(address)
    state = asyncio.run(state_of(where, service, tls=credentials))
    print(f"{address} {service}{': ' if service else ''}{state}")
    return 0 if state == "serving" else 1


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
    grpc_port: Annotated[int, Parameter(help="port you mean to use")] = 50051,
    http_port: Annotated[
        int, Parameter(name=("--http-port", "--port"), help="port you mean to use")
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
