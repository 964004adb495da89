"""kaiten beside what a user would pick instead: same machine, weights and jobs, in turns.

    python -m benchmarks.peers.side_by_side [--peers kaiten,hf-continuous,hf-static16,hf-one:1]
        [--repeats 3] [--shape 125m] [--dtype bf16] [--save] [--report FILE]
        [--with vllm=PYTHON --with llama-server=FILE --with openvino=PYTHON
         --with optimum=PYTHON --with gguf=PYTHON --with llama-quantize=FILE]

A peer written `name:1` runs in the first round only. Every peer starts afresh in every round and
the answers' lengths are checked. "CPU s" is what the peer's processes took for the jobs, without
their asker's where that is another process; with --threads 1 it has a floor of its own. "Same
tokens" compares the first answers with those of transformers one by one, else with the first
peer's. The floor is measured at the beginning and the end.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.peers.checkpoint import SHAPES, write_checkpoint
from benchmarks.peers.floor import Ideal, Machine, ideal, measure, shape_of
from benchmarks.peers.running import PEERS, Round, run_peer, versions_of
from benchmarks.peers.setting import PeerError, Setting
from benchmarks.peers.tokens import agreement
from benchmarks.recording import record
from kaiten.bench.options import BenchOptions
from kaiten.bench.plan import make_plan
from kaiten.bench.report import page

STEP_TOKENS = 512
DEFAULT_PEERS = "kaiten,hf-continuous,hf-static16,hf-one:1"
COLUMNS = (
    "peer", "tok/s", "range", "kaiten is", "of floor", "latency mean", "p99", "TTFT mean",
    "frame p50", "p99", "CPU s", "of CPU floor", "peak MB", "start s", "same tokens",
)  # fmt: skip


def main() -> int:
    chosen = _arguments()
    peers = {name: int(times or chosen.repeats) for name, times in _pairs(chosen.peers, ":")}
    with tempfile.TemporaryDirectory(prefix="kaiten-models-") as scratch:
        folder = chosen.models or Path(scratch)
        model = write_checkpoint(
            folder / f"llama-{chosen.shape}-{chosen.dtype}", chosen.shape, chosen.dtype
        )
        setting = Setting(
            model=model,
            dtype=chosen.dtype,
            threads=chosen.threads,
            slots=chosen.slots,
            jobs=make_plan(BenchOptions(count=chosen.count)).jobs,
            pythons=dict(_pairs(",".join(chosen.programs), "=")),
        )
        return _compare(peers, setting, chosen)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=DEFAULT_PEERS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="125m")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--with", dest="programs", action="append", default=[])
    parser.add_argument("--models", type=Path, help="keep the checkpoints here")
    parser.add_argument("--report", type=Path, help="write an HTML page with plots")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    for name, times in _pairs(chosen.peers, ":"):
        if name not in PEERS:
            parser.error(f"--peers: no peer {name!r}; there are {', '.join(PEERS)}")
        if times and not (times.isdecimal() and int(times)):
            parser.error(f"--peers: {name}:{times} names no number of rounds, 1 or more")
    for name, program in _pairs(",".join(chosen.programs), "="):
        if not shutil.which(program):
            parser.error(f"--with {name}={program}: there is no such program")
    return chosen


def _pairs(text: str, mark: str) -> list[tuple[str, str]]:
    words = (word.partition(mark) for word in text.split(",") if word)
    return [(name, value) for name, _, value in words]


def _compare(peers: Mapping[str, int], setting: Setting, chosen: argparse.Namespace) -> int:
    machines = [measure(setting.dtype, setting.threads)]
    rounds: dict[str, list[Round]] = {name: [] for name in peers}
    failed: dict[str, str] = {}
    for turn in range(max(peers.values())):
        for name, times in peers.items():
            if turn >= times or name in failed:
                continue
            try:
                rounds[name].append(run_peer(name, setting))
            except PeerError as error:
                failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr)
                continue
            tokens_per_s = rounds[name][-1].run.figures.output_tokens_per_s
            print(f"round {turn + 1}: {name} {tokens_per_s:.1f} tok/s", file=sys.stderr)
    machines.append(measure(setting.dtype, setting.threads))
    best = Machine(
        read_bytes_per_s=max(machine.read_bytes_per_s for machine in machines),
        flops_per_s=max(machine.flops_per_s for machine in machines),
    )
    floor = ideal(
        setting.jobs,
        shape_of(setting.model),
        best,
        setting.dtype,
        slots=setting.slots,
        step_tokens=STEP_TOKENS,
    )
    measured = {name: each for name, each in rounds.items() if each}
    _show(measured, floor, best, setting.threads)
    _keep(measured, floor, best, setting, chosen)
    return 1 if failed else 0


def _same_tokens(rounds: Mapping[str, Sequence[Round]]) -> dict[str, float]:
    """How far each peer's first answers go the way of the reference's."""
    reference = (rounds.get("hf-one") or next(iter(rounds.values())))[0].tokens
    return {name: agreement(each[0].tokens, reference) for name, each in rounds.items()}


def _medians(rounds: Sequence[Round]) -> dict[str, float]:
    figures = [each.run.figures for each in rounds]
    speeds = [each.output_tokens_per_s for each in figures]
    return {
        "tokens_per_s": median(speeds),
        "tokens_per_s_min": min(speeds),
        "tokens_per_s_max": max(speeds),
        "latency_mean_s": median(each.latency_s.mean for each in figures),
        "latency_p50_s": median(each.latency_s.p50 for each in figures),
        "latency_p99_s": median(each.latency_s.p99 for each in figures),
        "ttft_mean_s": median(each.ttft_s.mean for each in figures),
        "ttft_p99_s": median(each.ttft_s.p99 for each in figures),
        "inter_frame_p50_ms": median(each.inter_frame_s.p50 for each in figures) * 1e3,
        "inter_frame_p99_ms": median(each.inter_frame_s.p99 for each in figures) * 1e3,
        "inter_token_p50_ms": median(each.inter_token_s.p50 for each in figures) * 1e3,
        "inter_token_p99_ms": median(each.inter_token_s.p99 for each in figures) * 1e3,
        "cpu_s": median(each.cpu_s for each in rounds),
        "peak_mb": max(each.peak_mb for each in rounds),
        "start_s": median(each.start_s for each in rounds),
        "rounds": len(rounds),
    }


def _show(
    rounds: Mapping[str, Sequence[Round]], floor: Ideal, machine: Machine, threads: int
) -> None:
    ours = _medians(rounds["kaiten"])["tokens_per_s"] if "kaiten" in rounds else 0.0
    same = _same_tokens(rounds) if rounds else {}
    lines = [COLUMNS]
    for name, each in rounds.items():
        m = _medians(each)
        lines.append(
            (
                name,
                f"{m['tokens_per_s']:.1f}",
                f"{m['tokens_per_s_min']:.0f}-{m['tokens_per_s_max']:.0f}",
                f"{ours / m['tokens_per_s']:.2f}x" if ours else "-",
                f"{m['tokens_per_s'] / floor.output_tokens_per_s:.3f}",
                f"{m['latency_mean_s']:.2f} s",
                f"{m['latency_p99_s']:.2f} s",
                f"{m['ttft_mean_s']:.2f} s",
                f"{m['inter_frame_p50_ms']:.1f} ms",
                f"{m['inter_frame_p99_ms']:.0f} ms",
                f"{m['cpu_s']:.1f}",
                f"{floor.wall_s / max(m['cpu_s'], 0.01):.3f}" if threads == 1 else "-",
                f"{m['peak_mb']:.0f}",
                f"{m['start_s']:.1f}",
                f"{same[name]:.0%}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells))
    print(
        f"floor: {floor.output_tokens_per_s:.0f} tok/s, latency mean {floor.latency_mean_s:.2f} s"
        f" ({machine.read_bytes_per_s / 1e9:.1f} GB/s, {machine.flops_per_s / 1e9:.0f} GF/s)"
    )


def _keep(
    rounds: Mapping[str, Sequence[Round]],
    floor: Ideal,
    machine: Machine,
    setting: Setting,
    chosen: argparse.Namespace,
) -> None:
    medians = {name: _medians(each) for name, each in rounds.items()}
    ours = medians.get("kaiten", {}).get("tokens_per_s", 0.0)
    same = _same_tokens(rounds) if rounds else {}
    # With one thread the floor is one of CPU time.
    cpu_floor_s = floor.wall_s if setting.threads == 1 else 0.0
    peers = {
        name: {key: round(value, 4) for key, value in each.items()}
        | {
            "kaiten_over_this": round(ours / each["tokens_per_s"], 3),
            "of_floor": round(each["tokens_per_s"] / floor.output_tokens_per_s, 4),
            "same_tokens": round(same[name], 4),
            "of_cpu_floor": round(cpu_floor_s / max(each["cpu_s"], 0.01), 4),
        }
        for name, each in medians.items()
    }
    asked = {
        "shape": chosen.shape,
        "dtype": setting.dtype,
        "threads": setting.threads,
        "slots": setting.slots,
        "requests": len(setting.jobs),
        "output_tokens": sum(job.output_tokens for job in setting.jobs),
    }
    programs = {"peer_versions": versions_of(setting.pythons)}
    figures = {
        **asked,
        **programs,
        "machine": asdict(machine),
        "floor": asdict(floor),
        "peers": peers,
    }
    record("side_by_side", figures, save=chosen.save)
    if chosen.report:
        runs = [each.run for turns in rounds.values() for each in turns]
        chosen.report.write_text(page(runs, title="side by side", facts=asked), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
