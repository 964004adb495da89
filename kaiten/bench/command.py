"""`kaiten bench` and `kaiten bench compare`: run the plan, show the figures, keep them."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kaiten.api_key import HOW_TO_GIVE, api_key
from kaiten.bench.figures import Target as Good
from kaiten.bench.figures import figures_of
from kaiten.bench.laws import LAWS
from kaiten.bench.options import BenchOptions, OptionsError, check, smallest
from kaiten.bench.outcomes import AskError, Outcome
from kaiten.bench.plan import Plan, make_plan
from kaiten.bench.report import ROWS, Run, by_name, figure, page, ratio_text
from kaiten.bench.runner import Load
from kaiten.bench.targets import Target, target_of
from kaiten.console import console

SCHEMA_VERSION: Final = 1
HINTS: Final = {
    "unavailable": "\nis a server listening there? host:port is asked over gRPC, "
    "http://host:port over HTTP; start one with: kaiten serve",
    "unauthenticated": f"\n{HOW_TO_GIVE}",
    "http 401": f"\n{HOW_TO_GIVE}",
}


def list_workloads() -> None:
    """The laws, one a line."""
    for name, law in LAWS.items():
        print(f"{name:20} {law.says} ({law.count} requests, seed {law.seed})")


def bench(addresses: Sequence[str], options: BenchOptions, repeats: int) -> int:
    """Put the load on each target, round after round: A B A B. Exit code 1 when all failed."""
    named = dict(_named(text, index) for index, text in enumerate(addresses))
    try:
        check(options)
        if repeats < 1:
            raise OptionsError(f"--repeats must be at least 1, got {repeats}")
        if len(named) != len(addresses):
            raise OptionsError("two targets have the same name")
        make_plan(options)  # so that a wrong workload is named before a server is asked
        runs = asyncio.run(_measure(named, options, repeats, _key(options)))
    except OptionsError as error:
        console().print(Text(str(error), style="red"))
        return 2
    except AskError as error:
        text = Text(f"cannot start: {error.detail or error.kind}", style="red")
        console().print(text.append(HINTS.get(error.kind, "")), soft_wrap=True)
        return 1
    # First: whoever looks may leave, as head does, and it took long.
    are_kept = _keep(runs, options)
    _show(runs)
    return 0 if are_kept and all(run.figures.requests_ok for run in runs) else 1


def _named(text: str, index: int) -> tuple[str, str]:
    """`NAME=ADDRESS`, or an address whose name is its letter."""
    name, equals, address = text.partition("=")
    return (name, address) if equals and "/" not in name else (chr(ord("A") + index), text)


def _key(options: BenchOptions) -> str | None:
    try:
        return api_key(options.api_key_file)
    except ValueError as error:
        raise OptionsError(str(error)) from error


def _target(address: str, options: BenchOptions, key: str | None) -> Target:
    try:
        return target_of(
            address, model=options.model, is_plain=options.plain, api_key=key, tls=options.tls
        )
    except ValueError as error:
        raise OptionsError(str(error)) from error


async def _measure(
    named: Mapping[str, str], options: BenchOptions, repeats: int, key: str | None
) -> list[Run]:
    targets = {name: _target(address, options, key) for name, address in named.items()}
    try:
        for target in targets.values():
            await target.prepare()
        plan = make_plan(
            options,
            vocab_size=smallest([target.vocab_size for target in targets.values()]),
            context_tokens=smallest([target.context_tokens for target in targets.values()]),
        )
        return await _rounds(targets, plan, options, repeats)
    finally:
        for target in targets.values():
            await target.close()


async def _rounds(
    targets: Mapping[str, Target], plan: Plan, options: BenchOptions, repeats: int
) -> list[Run]:
    if plan.shortened:
        print(f"{plan.shortened} requests were cut to the context", file=sys.stderr)
    runs = []
    for target in targets.values():
        await _warm(target, plan, options)
    for turn in range(repeats):
        for name, target in targets.items():
            label = f"{name} {turn + 1}/{repeats}" if repeats > 1 or len(targets) > 1 else name
            with _progress(label, plan) as on_done:
                outcomes = await run_plan(target, plan, options, on_done)
            figures = figures_of(outcomes, good_of(options))
            runs.append(Run(name=name, says=target.says, outcomes=tuple(outcomes), figures=figures))
    return runs


async def run_plan(
    target: Target,
    plan: Plan,
    options: BenchOptions,
    on_done: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """One round against one target."""
    load = Load(target, timeout_s=options.timeout_s, on_done=on_done)
    if plan.due is None:
        assert options.concurrency is not None
        return await load.closed_loop(plan.jobs, options.concurrency)
    return await load.open_loop(plan.jobs, plan.due)


def good_of(options: BenchOptions) -> Good:
    return Good(
        ttft_s=options.good_ttft_s,
        tpot_s=options.good_tpot_s,
        latency_s=options.good_latency_s,
    )


async def _warm(target: Target, plan: Plan, options: BenchOptions) -> None:
    """With other tokens than the jobs': a warm prefix cache would be a gift."""
    jobs = [
        replace(job, prompt=job.prompt[::-1], output_tokens=min(job.output_tokens, 8))
        for job in plan.jobs[: options.warmup]
    ]
    if jobs:
        load = Load(target, timeout_s=options.timeout_s)
        failed = next((o for o in await load.closed_loop(jobs, 1) if not o.is_ok), None)
        if failed is not None:
            hint = " (--vocab-size and --context-tokens fit the load to a model)"
            text = f"the warm-up failed: {failed.error}: {failed.detail}"
            raise AskError(failed.error, text + hint * failed.error.startswith("http 4"))


@contextmanager
def _progress(label: str, plan: Plan) -> Iterator[Callable[[Outcome], None]]:
    """A bar on a terminal, nothing in a file."""
    tokens = errors = 0
    started_s = time.perf_counter()
    bar = Progress(
        TextColumn("{task.description:8}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console(is_unfailing=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(label, total=len(plan.jobs), state="")

        def on_done(outcome: Outcome) -> None:
            nonlocal tokens, errors
            tokens += outcome.output_tokens
            errors += not outcome.is_ok
            rate = tokens / (time.perf_counter() - started_s)
            state = f"{rate:.0f} tok/s" + (f", [red]{errors} errors[/red]" if errors else "")
            bar.update(task, advance=1, state=state)

        yield on_done


def _show(runs: Sequence[Run]) -> None:
    groups = by_name(runs)
    first, *others = groups
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in groups:
        table.add_column(name, justify="right")
    for name in others:
        table.add_column(f"{name} / {first}", justify="right")
    for label, unit, value_of, _ in ROWS:
        values = {name: [value_of(run.figures) for run in group] for name, group in groups.items()}
        base = median(values[first])
        cells = [_cell(each) for each in values.values()]
        cells += [ratio_text(median(values[name]), base) for name in others]
        table.add_row(f"{label} ({unit})", *cells)
    console(stderr=False).print(table)
    for run in runs:
        for kind, count in run.figures.errors.items():
            console().print(Text(f"{run.name}: {count} × {kind}", style="red"))
        if run.figures.wrong_length:
            text = f"{run.figures.wrong_length} answers of another length than asked"
            console().print(Text(f"{run.name}: {text}", style="yellow"))


def _cell(values: Sequence[float]) -> str:
    middle = figure(median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({figure(min(values))}…{figure(max(values))})"


def _keep(runs: Sequence[Run], options: BenchOptions) -> bool:
    """Each file that was asked for. False: one cannot be written, which is said."""
    are_kept, told = True, console(is_unfailing=True)
    for flag, path, write in (
        ("--report", options.report, _write_report),
        ("--jsonl", options.jsonl, _append_lines),
    ):
        if path is None:
            continue
        try:
            write(path, runs, options)
        except OSError as error:
            are_kept = False
            text = f"{flag} {path} cannot be written: {error.strerror}"
            told.print(Text(text, style="red"), soft_wrap=True)
    return are_kept


def _write_report(path: Path, runs: Sequence[Run], options: BenchOptions) -> None:
    facts = {
        "workload": options.workload,
        "load": f"{options.concurrency} askers" if options.concurrency else options.arrivals,
        "requests": len(runs[0].outcomes),
        "on": time.strftime("%Y-%m-%d %H:%M"),
    }
    title = "kaiten bench" if len(by_name(runs)) == 1 else "kaiten bench compare"
    path.write_text(page(runs, title=title, facts=facts), encoding="utf-8")
    console(is_unfailing=True).print(f"report: {path}", highlight=False)


def _append_lines(path: Path, runs: Sequence[Run], options: BenchOptions) -> None:
    """One per request and one per run, told apart by `kind`."""
    asked = {key: value for key, value in asdict(options).items() if value is not None}
    base = {"schema": SCHEMA_VERSION, "options": json.loads(json.dumps(asked, default=str))}
    with path.open("a", encoding="utf-8") as file:
        for run in runs:
            for outcome in run.outcomes:
                line = {"kind": "request", "name": run.name, **asdict(outcome)}
                file.write(json.dumps(line) + "\n")
            figures = run.figures.to_json()
            line = {"kind": "run", **base, "name": run.name, "target": run.says, **figures}
            file.write(json.dumps(line) + "\n")
