"""What the user of `kaiten bench` may choose, and the jobs and times that follow from it."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from kaiten.api_key import ApiKeyFile
from kaiten.tls_options import NO_TLS, TlsOptions

WORK = Group("Workload", sort_key=3)
LOAD = Group("Load", sort_key=4)
GOOD = Group("What is good", sort_key=5)
KEEP = Group("Output", sort_key=6)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Flags of `kaiten bench` and `kaiten bench compare`."""

    workload: Annotated[
        str, Parameter(group=WORK, help="a law (see --list-workloads), or a trace file")
    ] = "ragged"
    count: Annotated[
        int | None, Parameter(group=WORK, help="requests; default: the law's own, a whole trace")
    ] = None
    seed: Annotated[int | None, Parameter(group=WORK, help="default: the law's own")] = None
    scale: Annotated[float, Parameter(group=WORK, help="all lengths times this")] = 1.0
    context_tokens: Annotated[
        int | None, Parameter(group=WORK, help="cut prompt + output to this; default: ask")
    ] = None
    vocab_size: Annotated[
        int | None, Parameter(group=WORK, help="token ids are below; default: ask, else 32000")
    ] = None
    arrivals: Annotated[
        str,
        Parameter(
            group=LOAD,
            help="open loop: at-once, fixed:RATE, poisson:RATE, gamma:RATE:CV, trace[:SPEED]",
        ),
    ] = "at-once"
    concurrency: Annotated[
        int | None, Parameter(group=LOAD, help="closed loop instead: so many askers")
    ] = None
    timeout_s: Annotated[float, Parameter(group=LOAD, help="of each request")] = 600.0
    warmup: Annotated[int, Parameter(group=LOAD, help="requests before, not counted")] = 2
    api_key_file: Annotated[ApiKeyFile, Parameter(group=LOAD)] = None
    tls: Annotated[TlsOptions, Parameter(name="*", group=LOAD)] = NO_TLS
    model: Annotated[str, Parameter(group=LOAD, help="HTTP: default is the first listed")] = ""
    plain: Annotated[
        bool,
        Parameter(
            group=LOAD, show_default=False, help="HTTP: text prompts and standard fields only"
        ),
    ] = False
    good_ttft_s: Annotated[float | None, Parameter(group=GOOD, help="first token within")] = None
    good_tpot_s: Annotated[
        float | None, Parameter(group=GOOD, help="mean time per later token within")
    ] = None
    good_latency_s: Annotated[float | None, Parameter(group=GOOD, help="whole within")] = None
    report: Annotated[Path | None, Parameter(group=KEEP, help="write an HTML page")] = None
    jsonl: Annotated[
        Path | None, Parameter(group=KEEP, help="append requests and figures as JSON lines")
    ] = None


class OptionsError(Exception):
    """The choices do not go together, or name nothing; a sentence for the user."""


def check(options: BenchOptions) -> None:
    """Everything that can be said without asking a server."""
    positive = {
        "--count": options.count,
        "--scale": options.scale,
        "--context-tokens": options.context_tokens,
        "--vocab-size": options.vocab_size,
        "--concurrency": options.concurrency,
        "--timeout-s": options.timeout_s,
    }
    for flag, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise OptionsError(f"{flag} must be above 0, got {value:g}")
    if options.warmup < 0:
        raise OptionsError(f"--warmup must be at least 0, got {options.warmup}")
    if options.concurrency is not None and options.arrivals != "at-once":
        raise OptionsError("--concurrency is a closed loop: it excludes --arrivals")
    for flag, path in (("--report", options.report), ("--jsonl", options.jsonl)):
        if path is not None and (why := _why_not_written(path)):
            raise OptionsError(f"{flag} {path}: {why}")


def _why_not_written(path: Path) -> str:
    """Said before the load, not after it. "" when the file can be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.is_dir():
        return "it is a folder; name a file"
    is_writable = os.access(path if path.exists() else folder, os.W_OK)
    return "" if is_writable else "it cannot be written by this user"


def smallest(values: Sequence[int | None]) -> int | None:
    """What all of them allow; None when none says."""
    known = [value for value in values if value is not None]
    return min(known, default=None)
