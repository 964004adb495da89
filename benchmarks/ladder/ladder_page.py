"""The ladder as a table and a plot, for docs/continuous-batching.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ladder import page


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One crowd on one rung; medians over the rounds."""

    crowd: str
    rung: str
    seats: int
    tokens_per_s: float
    latency_mean_s: float
    latency_p99_s: float
    # Tokens that somebody asked for, of what every seat could have computed in the steps taken.
    occupancy: float
    # Tokens computed and thrown away, of all computed.
    padding_waste: float
    kv_waste: float
    steps: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Continuous over static with equal seats; latencies as ratios too, smaller is better."""

    crowd: str
    seats: int
    law: float
    law_to_the_end: float
    in_steps: float
    in_throughput: float
    latency_mean: float
    latency_p99: float


def table(cells: Sequence[Cell], gains: Sequence[Gain], kv_waste_long: float) -> str:
    """Markdown: the rungs, then the gains beside their law."""
    lines = [
        "| lengths | rung | seats | tok/s | × | latency mean | p99 | seats used | padding waste"
        " | KV waste | steps |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    first: dict[str, Cell] = {}
    for cell in cells:
        base = first.setdefault(cell.crowd, cell)
        name = cell.crowd if base is cell else ""
        lines.append(
            f"| {name} | {cell.rung} | {cell.seats} | {cell.tokens_per_s:.0f}"
            f" | {cell.tokens_per_s / base.tokens_per_s:.2f}"
            f" | {cell.latency_mean_s:.2f} s | {cell.latency_p99_s:.2f} s | {cell.occupancy:.0%}"
            f" | {cell.padding_waste:.0%} | {cell.kv_waste:.1%} | {cell.steps} |"
        )
    lines += [
        "",
        "| lengths | seats | E[max] / E[length] | law to the end | measured in steps | of the law"
        " | measured in tok/s | of the law | latency mean | p99 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {gain.crowd} | {gain.seats} | {gain.law:.2f} | {gain.law_to_the_end:.2f}"
        f" | {gain.in_steps:.2f} | {gain.in_steps / gain.law_to_the_end:.2f}"
        f" | {gain.in_throughput:.2f} | {gain.in_throughput / gain.law_to_the_end:.2f}"
        f" | × {gain.latency_mean:.2f} | × {gain.latency_p99:.2f} |"
        for gain in gains
    ]
    lines += [
        "",
        f"With 512-token prompts, where a block is small beside a context, {kv_waste_long:.1%} of"
        " the KV memory taken held no token.",
    ]
    return "\n".join(lines)


def draw(cells: Sequence[Cell], gains: Sequence[Gain], path: Path) -> None:
    """Throughput and latency by crowd and rung, and the gain beside its law."""
    rungs = list(dict.fromkeys(cell.rung for cell in cells))
    crowds = list(dict.fromkeys(cell.crowd for cell in cells))
    colours = dict(zip(rungs, ("#9aa5b1", "#56b4e9", "#e69f00", "#0072b2"), strict=True))
    figure, axes = page.subplots(1, 3, figsize=(13, 3.9))
    by = {(cell.crowd, cell.rung): cell for cell in cells}
    for index, rung in enumerate(rungs):
        places = [place + (index - 1.5) * 0.2 for place in range(len(crowds))]
        row = [by[crowd, rung] for crowd in crowds]
        axes[0].bar(places, [c.tokens_per_s for c in row], 0.19, label=rung, color=colours[rung])
        axes[1].bar(places, [c.latency_mean_s for c in row], 0.19, color=colours[rung])
        for place, cell in zip(places, row, strict=True):
            axes[1].plot(
                [place, place], [cell.latency_mean_s, cell.latency_p99_s],
                color=colours[rung], marker="_", markersize=5, linewidth=1,
            )  # fmt: skip
    axes[0].set_title("output tokens per second", loc="left", fontsize=10)
    axes[1].set_title("latency in s: mean (bar) and p99 (whisker)", loc="left", fontsize=10)
    for axis in axes[:2]:
        axis.set_xticks(range(len(crowds)), crowds)
    figure.legend(loc="outside lower left", ncols=4, fontsize=9, frameon=False)
    _draw_law(axes[2], gains)
    page.save(figure, path)


def _draw_law(axis: object, gains: Sequence[Gain]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    top = max(max(gain.law_to_the_end, gain.in_throughput) for gain in gains) * 1.15
    axis.plot([1, top], [1, top], color="#9aa5b1", linewidth=1)
    seats = sorted({gain.seats for gain in gains})
    for count, colour in zip(seats, ("#e69f00", "#0072b2"), strict=True):
        mine = [gain for gain in gains if gain.seats == count]
        axis.scatter(
            [gain.law_to_the_end for gain in mine], [gain.in_throughput for gain in mine],
            color=colour, label=f"{count} seats",
        )  # fmt: skip
        for gain in mine:
            axis.annotate(
                gain.crowd, (gain.law_to_the_end, gain.in_throughput), fontsize=8,
                xytext=(6, -9), textcoords="offset points",
            )  # fmt: skip
    axis.set_title(
        "gain of continuous over static: tok/s measured, over law", loc="left", fontsize=10
    )
    axis.set_xlabel("law: longest of each batch / steps without an empty seat")
    axis.legend(frameon=False, fontsize=9)
