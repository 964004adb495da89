"""Line charts as inline SVG: no script, no font, no link to anywhere."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kaiten.bench.outcomes import Outcome

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 38
# Told apart by colour-blind eyes too (after Okabe and Ito); the page defines the last two for light
# and dark.
COLOURS: Final = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "var(--fg)", "var(--yellow)",
)  # fmt: skip
# Once all colours are used: solid, dashed, dotted.
DASHES: Final = ("", "7 3", "1.8 2.2")
POINTS_MAX: Final = 240
WINDOWS: Final = 40
ROWS_MAX: Final = 400

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one target is drawn all over a page."""

    colour: str
    dash: str

    @property
    def stroke(self) -> str:
        """Attributes of an SVG path."""
        dashes = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        return f'fill="none" stroke="{self.colour}" stroke-width="1.8"{dashes}'


def look_of(index: int) -> Look:
    """Of the index-th target; the first 24 differ."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return Look(colour=COLOURS[index % len(COLOURS)], dash=dash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    points: Points
    look: Look
    is_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """From values to places in the picture."""

    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        return LEFT + value / self.x_max * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.y_max * (HEIGHT - TOP - BOTTOM)


def ticks(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at most `top`, about `count` of them."""
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [step * index for index in range(math.floor(top / step * 1.001) + 1)]


def chart(lines: Sequence[Line], x_name: str, y_name: str, y_max: float | None = None) -> str:
    """One picture. Empty lines are drawn as nothing."""
    points = [point for line in lines for point in line.points]
    axes = Axes(
        x_max=max((x for x, _ in points), default=0.0) or 1.0,
        y_max=y_max or max((y for _, y in points), default=0.0) * 1.06 or 1.0,
    )
    drawn = (f'<path d="{_path(line, axes)}" {line.look.stroke}/>' for line in lines)
    parts = [*_grid(axes), _names(x_name, y_name), *drawn]
    return _svg(parts, f"{y_name} over {x_name}")


def stories(outcomes: Sequence[Outcome], colour: str, until_s: float) -> str:
    """A row per request: grey while it waits for its first token, coloured while it streams."""
    shown = sorted(outcomes, key=lambda outcome: (outcome.due_s, outcome.index))[:ROWS_MAX]
    axes = Axes(x_max=until_s or 1.0, y_max=float(len(shown)) or 1.0)
    tall = (HEIGHT - TOP - BOTTOM) / max(len(shown), 1)
    parts = [*_grid(axes), _names("seconds", "request, by arrival")]
    for row, outcome in enumerate(shown):
        first_s = outcome.frames[0].at_s if outcome.frames else outcome.done_s
        y = axes.y(row + 1)
        bars = [(outcome.due_s, first_s, "var(--wait)")]
        bars.append((first_s, outcome.done_s, colour if outcome.is_ok else "var(--bad)"))
        for start_s, end_s, fill in bars:
            width = max(axes.x(end_s) - axes.x(start_s), 0.3)
            parts.append(
                f'<rect x="{axes.x(start_s):.1f}" y="{y:.2f}" width="{width:.1f}"'
                f' height="{tall * 0.86:.2f}" fill="{fill}"/>'
            )
    return _svg(parts, "requests over time")


def sample(look: Look) -> str:
    """A piece of the line, for a legend."""
    path = f'<path d="M0,4H36" {look.stroke}/>'
    return f'<svg class="sample" viewBox="0 0 36 8" aria-hidden="true">{path}</svg>'


def distribution(numbers: Iterable[float], scale: float = 1.0) -> Points:
    """Share of numbers at most so large, thinned to what a picture can show."""
    values = [number * scale for number in numbers]
    if not values:
        return []
    shares = np.linspace(0, 1, min(len(values), POINTS_MAX))
    return [(0.0, 0.0), *zip(np.quantile(values, shares).tolist(), shares.tolist(), strict=True)]


def token_rate(outcomes: Sequence[Outcome]) -> Points:
    """Tokens per second in each of `WINDOWS` windows."""
    end_s = max((outcome.done_s for outcome in outcomes), default=0.0)
    if end_s <= 0:
        return []
    counts = [0] * WINDOWS
    for outcome in outcomes:
        for frame in outcome.frames:
            counts[min(int(frame.at_s / end_s * WINDOWS), WINDOWS - 1)] += frame.tokens
    width_s = end_s / WINDOWS
    return [(index * width_s, count / width_s) for index, count in enumerate(counts)]


def in_flight(outcomes: Sequence[Outcome]) -> Points:
    """Requests due and not done."""
    # At the same moment whoever comes is counted before whoever goes.
    moves = sorted(
        move for outcome in outcomes for move in ((outcome.due_s, -1), (outcome.done_s, 1))
    )
    points: Points = [(0.0, 0.0)]
    for at_s, change in moves:
        points.append((at_s, points[-1][1] - change))
    return points


def _path(line: Line, axes: Axes) -> str:
    written: list[str] = []
    for x, y in line.points:
        if written and line.is_step:
            written.append(f"H{axes.x(x):.1f}V{axes.y(y):.1f}")
        else:
            written.append(f"{'L' if written else 'M'}{axes.x(x):.1f},{axes.y(y):.1f}")
    return "".join(written)


def _grid(axes: Axes) -> list[str]:
    parts = []
    for value in ticks(axes.y_max):
        y = axes.y(value)
        parts.append(
            f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(axes.x_max):
        x, y = axes.x(value), HEIGHT - BOTTOM
        parts.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 15}" text-anchor="middle">{value:g}</text>')
    return parts


def _names(x_name: str, y_name: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return (
        f'<text class="n" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f'{html.escape(x_name)}</text><text class="n" text-anchor="middle"'
        f' transform="translate(11 {middle}) rotate(-90)">{html.escape(y_name)}</text>'
    )


def _svg(parts: Iterable[str], says: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(says)}">'
        f"{''.join(parts)}</svg>"
    )
