"""What the services cost: the whole stack beside the bare worker loop, in turns.

    python -m benchmarks.serving.service_cost [--model FOLDER] [--rounds 3] [--save]

bare    `bare_loop`: scheduler core, rows and device in one process, nothing else
stack   `kaiten serve` as a user runs it, asked over gRPC by a client on the same cores

Both serve the ragged jobs, once all at once and once by 16 askers, greedy, exact lengths; A B A B,
every turn in fresh processes, medians. `kept` is the stack's throughput over the bare loop's. CPU
time is told per process and output token; what of the wall clock is not computing, the
compute thread spent on its books or waiting for a plan.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.peers.checkpoint import write_checkpoint
from benchmarks.recording import ROOT, record
from benchmarks.serving.stack import WHOLE_JOURNAL, Stack, cpu_s, journal_seq, rss_mb, serving
from kaiten.bench.figures import Figures, figures_of
from kaiten.bench.options import BenchOptions
from kaiten.bench.outcomes import Frame, Outcome
from kaiten.bench.plan import make_plan
from kaiten.bench.runner import Load
from kaiten.bench.targets import target_of
from kaiten.bench.workload import Job
from ledger import Ledger

TIMEOUT_S = 600.0
STEP_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What both sides are measured with. `loads` are jobs and how many ask for them."""

    model: Path
    dtype: str
    threads: int
    slots: int
    gather_ms: float
    loads: tuple[tuple[int, tuple[Job, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What the worker's compute thread said of its steps: forward pass and sampling together."""

    count: int
    computing_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One load served once by one side."""

    figures: Figures
    cpu_s: Mapping[str, float]
    rss_mb: Mapping[str, float]
    steps: Steps


def main() -> None:
    chosen = _arguments()
    with tempfile.TemporaryDirectory(prefix="kaiten-models-") as scratch:
        model = chosen.model or write_checkpoint(Path(scratch) / "125m", "125m", chosen.dtype)
        asked = Asked(
            model=model,
            dtype=chosen.dtype,
            threads=chosen.threads,
            slots=chosen.slots,
            gather_ms=chosen.gather_ms,
            loads=tuple(
                # Other tokens each time: nothing is found in the prefix cache.
                (concurrency, make_plan(BenchOptions(count=chosen.count, seed=42 + index)).jobs)
                for index, concurrency in enumerate(chosen.concurrency)
            ),
        )
        turns: dict[str, list[list[Turn]]] = {"bare": [], "stack": []}
        for number in range(chosen.rounds):
            for side, run in (("bare", bare), ("stack", stack)):
                turns[side].append(run(asked))
                print(f"round {number + 1}: {side} {_speeds(turns[side][-1])}", file=sys.stderr)
    for index, (concurrency, jobs) in enumerate(asked.loads):
        sides = {side: [turn[index] for turn in each] for side, each in turns.items()}
        _keep(concurrency, jobs, sides, asked, chosen)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="default: a random one of the 125m shape")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--gather-ms", type=float, default=0.0, help="of the stack's worker")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    return parser.parse_args()


def _speeds(turns: Sequence[Turn]) -> str:
    return ", ".join(f"{turn.figures.output_tokens_per_s:.1f} tok/s" for turn in turns)


# The bare loop


def bare(asked: Asked) -> list[Turn]:
    """Every load by a process of its own."""
    return [_bare(asked, concurrency, jobs) for concurrency, jobs in asked.loads]


def _bare(asked: Asked, concurrency: int, jobs: Sequence[Job]) -> Turn:
    with tempfile.TemporaryDirectory(prefix="kaiten-bare-") as folder:
        told, log = Path(folder) / "jobs.json", Path(folder) / "log"
        content = [{"prompt": job.prompt, "output_tokens": job.output_tokens} for job in jobs]
        told.write_text(json.dumps(content))
        command = [sys.executable, "-m", "benchmarks.serving.bare_loop"]
        command += ["--model", str(asked.model), "--dtype", asked.dtype, "--jobs", str(told)]
        command += ["--threads", str(asked.threads), "--slots", str(asked.slots)]
        command += ["--out", f"{folder}/out.json", "--concurrency", str(concurrency)]
        command += ["--step-tokens", str(STEP_TOKENS)]
        with log.open("w") as errors:
            done = subprocess.run(command, cwd=ROOT, stdout=errors, stderr=errors, check=False)
        if done.returncode:
            raise RuntimeError(f"the bare loop ended with {done.returncode}:\n{log.read_text()}")
        run = json.loads((Path(folder) / "out.json").read_text())
    figures = figures_of([_told(*each) for each in zip(jobs, run["stories"], strict=True)])
    return Turn(
        figures=_checked(figures),
        cpu_s={"bare_loop": run["cpu_s"]},
        rss_mb={"bare_loop": run["rss_mb"]},
        steps=Steps(**run["steps"]),
    )


def _told(job: Job, story: Mapping[str, object]) -> Outcome:
    due_s, arrivals_s = story["due_s"], story["arrivals_s"]
    assert isinstance(due_s, float)
    assert isinstance(arrivals_s, list)
    return Outcome(
        index=job.index,
        due_s=due_s,
        sent_s=due_s,
        done_s=arrivals_s[-1],
        frames=tuple(Frame(at_s=at_s, tokens=1) for at_s in arrivals_s),
        prompt_tokens=len(job.prompt),
        output_tokens=len(arrivals_s),
        output_tokens_asked=job.output_tokens,
    )


def _checked(figures: Figures) -> Figures:
    if figures.errors or figures.wrong_length:
        raise RuntimeError(f"errors {figures.errors}, {figures.wrong_length} wrong lengths")
    return figures


# The whole stack


def stack(asked: Asked) -> list[Turn]:
    """Every load by a stack of its own."""
    return [_stack(asked, concurrency, jobs) for concurrency, jobs in asked.loads]


def _stack(asked: Asked, concurrency: int, jobs: Sequence[Job]) -> Turn:
    flags = ["--dtype", asked.dtype, "--slots", str(asked.slots), "--threads", str(asked.threads)]
    # Exactly the bare loop's, not what the worker finds to end in time.
    flags += ["--step-tokens", str(STEP_TOKENS), "--gather-ms", str(asked.gather_ms)]
    with serving(str(asked.model), *flags, environ=WHOLE_JOURNAL) as running:
        return asyncio.run(_ask(running, concurrency, jobs))


async def _ask(running: Stack, concurrency: int, jobs: Sequence[Job]) -> Turn:
    target = target_of(running.grpc)
    await target.prepare()
    await target.ask(replace(jobs[0], prompt=(5,) * 16, output_tokens=8), lambda _: None, TIMEOUT_S)
    seq = await journal_seq(running)
    before = cpu_s(running.pid)
    outcomes = await Load(target, timeout_s=TIMEOUT_S).closed_loop(jobs, concurrency)
    after = cpu_s(running.pid)
    await target.close()
    return Turn(
        figures=_checked(figures_of(outcomes)),
        cpu_s={name: round(after[name] - before[name], 3) for name in after},
        rss_mb=rss_mb(running.pid),
        steps=await _steps(running, seq),
    )


async def _steps(running: Stack, after_seq: int) -> Steps:
    """Sums over the steps that the journal records after a record, prefill chunks included."""
    ledger = await Ledger.connect(running.store_url)
    records = await ledger.journal_read(after_seq, block_ms=1, count=100_000)
    await ledger.close()
    told = [each.result.step for r in records for each in r.inputs if each.HasField("result")]
    took_us = [step.timings.forward_us for step in told if step.timings.forward_us]
    if not took_us:
        raise RuntimeError("the journal tells no step's time")
    return Steps(count=len(took_us), computing_s=sum(took_us) / 1e6)


# Figures


def _side(turns: Sequence[Turn]) -> dict[str, object]:
    """Medians of one side; processes in the order of what they cost."""
    names = {name for turn in turns for name in turn.cpu_s}
    cost = {
        name: median(turn.cpu_s.get(name, 0.0) / turn.figures.output_tokens * 1e3 for turn in turns)
        for name in names
    }
    figures = [turn.figures for turn in turns]
    return {
        "tokens_per_s": round(median(each.output_tokens_per_s for each in figures), 1),
        "all_tokens_per_s": [round(each.output_tokens_per_s, 1) for each in figures],
        "wall_s": round(median(each.wall_s for each in figures), 2),
        "latency_mean_s": round(median(each.latency_s.mean for each in figures), 3),
        "ttft_mean_s": round(median(each.ttft_s.mean for each in figures), 3),
        "cpu_ms_per_token": {
            name: round(cost[name], 4) for name in sorted(cost, key=cost.__getitem__, reverse=True)
        },
        "cores_busy": round(
            median(sum(turn.cpu_s.values()) / turn.figures.wall_s for turn in turns), 2
        ),
        "steps": {
            key: round(median(asdict(turn.steps)[key] for turn in turns), 2)
            for key in ("count", "computing_s")
        },
        "rss_mb": turns[-1].rss_mb,
    }


def _keep(
    concurrency: int,
    jobs: Sequence[Job],
    sides: Mapping[str, Sequence[Turn]],
    asked: Asked,
    chosen: argparse.Namespace,
) -> None:
    found = {side: _side(turns) for side, turns in sides.items()}
    speeds = {
        side: median(turn.figures.output_tokens_per_s for turn in turns)
        for side, turns in sides.items()
    }
    figures: dict[str, object] = {
        "dtype": asked.dtype,
        "threads": asked.threads,
        "slots": asked.slots,
        "gather_ms": asked.gather_ms,
        "requests": len(jobs),
        "concurrency": concurrency,
        "rounds": chosen.rounds,
        "kept": round(speeds["stack"] / speeds["bare"], 3),
        **found,
    }
    record("service_cost", figures, save=chosen.save)


if __name__ == "__main__":
    main()
