"""Commands that ask a running stack. Each imports what it needs by itself: `--help` stays quick."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter
from cyclopts.validators import Number

from kaiten.api_key import ApiKeyFile, api_key_of
from kaiten.cli import packages
from kaiten.tls_options import NO_TLS, TlsOptions

if TYPE_CHECKING:
    from kaiten.cli.chat.state import Chat

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
OF_ARCHIVES: Final = "of the past: a folder of archives, or a gateway's host:port; repeatable"

Address = Annotated[
    str, Parameter(help="host:port of a gateway's gRPC API; https:// before it: with TLS")
]
Watched = Annotated[
    tuple[str, ...],
    Parameter(help="host:port of a gateway, or of schedulers; repeatable", negative=()),
]
System = Annotated[str | None, Parameter(help="a system message")]
MaxTokens = Annotated[int | None, Parameter(help="tokens of an answer at most")]
Temperature = Annotated[float | None, Parameter(help="0 is greedy")]


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
    from kaiten.cli.live import explain as told

    if archive:
        return told.explain_archived(
            archive, request_id, tenant, api_key_file, until=until, as_json=json
        )
    where, trusted = tls.of_or_exit(address)
    key = api_key_of(api_key_file)
    return told.explain(where, trusted, request_id, tenant=tenant, api_key=key, as_json=json)


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
    from kaiten.cli.live.watch import watch as watch_core

    return watch_core(
        [tls.of_or_exit(each) for each in address],
        api_key=api_key_of(api_key_file),
        interval_ms=interval_ms,
        once=once,
        with_blocks=blocks,
        as_json=json,
    )


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


COMMANDS: Final = (generate, chat, batch, explain, trace, watch, top, ps, healthcheck)
