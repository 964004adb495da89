"""The `bench` command's face: light to import, so that `kaiten --help` stays quick."""

import sys
from typing import Annotated

from cyclopts import App, Parameter

from kaiten.bench.options import BenchOptions

app = App(name="bench", help="Put load on a server and measure what comes back.")

DEFAULTS = BenchOptions()
Where = (
    "host:port of a kaiten gateway (grpcs://… with TLS), or http(s)://… of any OpenAI-compatible"
    " server"
)


@app.default
def bench(
    address: Annotated[str, Parameter(help=Where)] = "127.0.0.1:50051",
    /,
    *,
    options: BenchOptions = DEFAULTS,
    list_workloads: Annotated[
        bool, Parameter(negative=(), show_default=False, help="show the laws")
    ] = False,
) -> int:
    """One target, one run. Latencies count from when the schedule wanted the request sent."""
    return _run([address], options, 1, is_list=list_workloads)


@app.command
def compare(
    first: Annotated[str, Parameter(help=f"{Where}; NAME=ADDRESS names it")],
    second: Annotated[str, Parameter(help="the other one")],
    /,
    *more: str,
    repeats: Annotated[int, Parameter(help="rounds")] = 3,
    options: BenchOptions = DEFAULTS,
) -> int:
    """Several targets in turns, A B A B …: medians over the rounds, with their range."""
    return _run([first, second, *more], options, repeats, is_list=False)


def _run(addresses: list[str], options: BenchOptions, repeats: int, *, is_list: bool) -> int:
    try:
        from kaiten.bench import command
    except ImportError as error:
        print(f"{error.name} is missing: pip install 'kaiten[bench]'", file=sys.stderr)
        return 1
    if is_list:
        command.list_workloads()
        return 0
    return command.bench(addresses, options, repeats)
