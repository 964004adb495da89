"""One HTML file that stands by itself: figures as tables, distributions and the run as pictures."""

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from kaiten.bench import charts
from kaiten.bench.charts import Line, Look, look_of, sample
from kaiten.bench.figures import Figures, frame_gaps_s
from kaiten.bench.outcomes import Outcome

STYLE: Final = """
:root{color-scheme:light dark;
--fg:#1b1f24;--dim:#667080;--bg:#fff;--card:#f6f7f9;--rule:#dfe3e8;--wait:#c6ccd4;--bad:#c62828;
--yellow:#d9c700}
@media(prefers-color-scheme:dark){:root{--fg:#e6e9ee;--dim:#98a2b0;--bg:#14171b;--card:#1d2127;
--rule:#333a43;--wait:#4a525d;--bad:#ef6c6c;--yellow:#f0e442}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1280px;padding:28px 22px 60px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:22px;margin:0}h2{font-size:15px;margin:0 0 6px}p{margin:4px 0;color:var(--dim)}
.top{display:grid;grid-template-columns:repeat(auto-fit,minmax(250px,1fr));gap:10px;margin:20px 0}
.top div{background:var(--card);border-radius:8px;padding:10px 14px}
.top b{display:block;font-size:21px;font-variant-numeric:tabular-nums}
.top span{color:var(--dim);font-size:12.5px}
.grid{display:grid;gap:14px;margin:14px 0;
grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr))}
.grid section{min-width:0;background:var(--card);border-radius:8px;padding:12px 14px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;margin:16px 0;font-variant-numeric:tabular-nums}
th,td{padding:5px 6px;text-align:right;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--dim);font-weight:500;font-size:13px}th:first-child,td:first-child{text-align:left}
td{white-space:nowrap}td small{display:block;color:var(--dim)}
svg{width:100%;height:auto;display:block}svg text{font-size:10.5px;fill:var(--dim)}
svg .n{font-size:11.5px}svg .g{stroke:var(--rule);stroke-width:1}
.key{position:sticky;top:0;background:var(--bg);padding:6px 0;color:var(--fg)}
.key span{display:inline-block;white-space:nowrap;margin-right:18px}
svg.sample{display:inline-block;width:36px;height:8px;margin-right:6px;vertical-align:middle}
.bad{color:var(--bad)}details{margin-top:22px;color:var(--dim)}pre{white-space:pre-wrap;font-size:12px}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything about one target in one round."""

    name: str
    says: str
    outcomes: tuple[Outcome, ...]
    figures: Figures


# Name, unit, how to get it from figures, and whether more is better.
Row = tuple[str, str, Callable[[Figures], float], bool]
ROWS: Final[tuple[Row, ...]] = (
    ("output throughput", "tok/s", lambda f: f.output_tokens_per_s, True),
    ("requests", "1/s", lambda f: f.requests_per_s, True),
    ("latency mean", "s", lambda f: f.latency_s.mean, False),
    ("latency p50", "s", lambda f: f.latency_s.p50, False),
    ("latency p99", "s", lambda f: f.latency_s.p99, False),
    ("TTFT mean", "s", lambda f: f.ttft_s.mean, False),
    ("TTFT p50", "s", lambda f: f.ttft_s.p50, False),
    ("TTFT p99", "s", lambda f: f.ttft_s.p99, False),
    ("inter-frame p50", "ms", lambda f: f.inter_frame_s.p50 * 1e3, False),
    ("inter-frame p99", "ms", lambda f: f.inter_frame_s.p99 * 1e3, False),
    ("inter-token p50", "ms", lambda f: f.inter_token_s.p50 * 1e3, False),
    ("inter-token p99", "ms", lambda f: f.inter_token_s.p99 * 1e3, False),
    ("goodput", "1/s", lambda f: f.goodput_requests_per_s, True),
)


def by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Rounds of each target, targets in the order they first ran."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.name, []).append(run)
    return found


def page(runs: Sequence[Run], *, title: str, facts: Mapping[str, object]) -> str:
    """The whole file. Pictures show each target's round of median throughput."""
    groups = by_name(runs)
    shown = {name: typical(rounds) for name, rounds in groups.items()}
    looks = {name: look_of(index) for index, name in enumerate(groups)}
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(' · '.join(f'{key} {value}' for key, value in facts.items()))}</p>",
    ]
    body += [_headline(next(iter(shown.values())).figures)] if len(groups) == 1 else []
    only = runs[0].figures if len(runs) == 1 else None
    body += [_spreads(only) if only else _table(groups, looks), _errors(runs)]
    body += [_key(looks)] if len(groups) > 1 else []
    body += [_pictures(shown, looks), _targets(shown), _raw(runs)]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><body>{''.join(body)}</body></html>"
    )


def typical(rounds: Sequence[Run]) -> Run:
    """The round of median throughput (the lower one of an even number)."""
    return sorted(rounds, key=lambda run: run.figures.output_tokens_per_s)[(len(rounds) - 1) // 2]


def figure(value: float) -> str:
    """Three digits that mean something."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def ratio_text(value: float, base: float) -> str:
    """`1.25×`, or a dash when there is nothing to divide by."""
    return f"{value / base:.2f}×" if base > 0 else "–"


def _headline(figures: Figures) -> str:
    gaps = figures.inter_frame_s
    tiles = [
        (f"{figure(figures.output_tokens_per_s)} tok/s", "output throughput"),
        (f"{figure(figures.ttft_s.p50)} / {figure(figures.ttft_s.p99)} s", "TTFT p50 / p99"),
        (
            f"{figure(figures.latency_s.p50)} / {figure(figures.latency_s.p99)} s",
            "latency p50 / p99",
        ),
        (
            f"{figure(gaps.p50 * 1e3)} / {figure(gaps.p99 * 1e3)} ms",
            "between frames p50 / p99",
        ),
        (
            f"{figure(figures.goodput_requests_per_s)} per s",
            f"goodput: {figures.goodput_share:.0%} of requests were good",
        ),
        (f"{figures.requests_ok} of {figures.requests}", "requests ended well"),
    ]
    return "".join(
        [
            '<div class="top">',
            *(f"<div><b>{b}</b><span>{s}</span></div>" for b, s in tiles),
            "</div>",
        ]
    )


def _key(looks: Mapping[str, Look]) -> str:
    """Stays in sight above the pictures."""
    entries = (f"<span>{_named(name, look)}</span>" for name, look in looks.items())
    return f'<p class="key">{"".join(entries)}</p>'


def _named(name: str, look: Look) -> str:
    return f"{sample(look)}{html.escape(name)}"


def _spreads(figures: Figures) -> str:
    """One run in full."""
    rows = (
        ("time to first token (s)", figures.ttft_s, 1.0),
        ("latency (s)", figures.latency_s, 1.0),
        ("between frames (ms)", figures.inter_frame_s, 1e3),
        ("between tokens (ms)", figures.inter_token_s, 1e3),
        ("time per later token (ms)", figures.tpot_s, 1e3),
        ("sent late by the client (ms)", figures.send_late_s, 1e3),
    )
    heads = "".join(f"<th>{head}</th>" for head in ("mean", "p50", "p90", "p99", "max", "count"))
    lines = [f"<table><tr><th></th>{heads}</tr>"]
    for label, found, scale in rows:
        values = (found.mean, found.p50, found.p90, found.p99, found.max)
        cells = "".join(f"<td>{figure(value * scale)}</td>" for value in values)
        lines.append(f"<tr><td>{label}</td>{cells}<td>{found.count:,}</td></tr>")
    return "".join([*lines, "</table>"])


def _table(groups: Mapping[str, Sequence[Run]], looks: Mapping[str, Look]) -> str:
    """A row per target; those after the first also in multiples of the first."""
    heads = "".join(f"<th>{label} ({unit})</th>" for label, unit, _, _ in ROWS)
    lines = [f'<div class="wide"><table><tr><th></th>{heads}</tr>']
    first = next(iter(groups))
    for name, rounds in groups.items():
        cells = []
        for _, _, value_of, _ in ROWS:
            values = [value_of(run.figures) for run in rounds]
            base = median(value_of(run.figures) for run in groups[first])
            ratio = "" if name == first else f"<small>{ratio_text(median(values), base)}</small>"
            cells.append(f"<td>{_cell(values)}{ratio}</td>")
        lines.append(f"<tr><td>{_named(name, looks[name])}</td>{''.join(cells)}</tr>")
    note = f"; × is a multiple of {html.escape(first)}" if len(groups) > 1 else ""
    return "".join([*lines, f"</table></div><p>medians and ranges of rounds{note}</p>"])


def _cell(values: Sequence[float]) -> str:
    """The median; with several rounds also the range."""
    middle = figure(median(values))
    if len(values) == 1:
        return middle
    return f"{middle}<small>{figure(min(values))}–{figure(max(values))}</small>"


def _errors(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        if run.figures.wrong_length:
            lines.append(
                f"{run.name}: {run.figures.wrong_length} answers of another length than asked"
            )
        for kind, count in run.figures.errors.items():
            detail = next(each.detail for each in run.outcomes if each.error == kind)
            lines.append(f"{run.name}: {count} × {kind}: {detail[:160]}")
    return "".join(f'<p class="bad">{html.escape(line)}</p>' for line in lines)


def _pictures(shown: Mapping[str, Run], looks: Mapping[str, Look]) -> str:
    def lines(points: Callable[[Run], charts.Points], *, is_step: bool = True) -> list[Line]:
        return [
            Line(name=name, points=points(run), look=looks[name], is_step=is_step)
            for name, run in shown.items()
        ]

    ttft = lines(lambda run: charts.distribution(o.ttft_s for o in run.outcomes if o.frames))
    latency = lines(lambda run: charts.distribution(o.latency_s for o in run.outcomes if o.is_ok))
    gaps = lines(
        lambda run: charts.distribution((g for o in run.outcomes for g in frame_gaps_s(o)), 1e3)
    )
    rate = lines(lambda run: charts.token_rate(run.outcomes), is_step=False)
    flight = lines(lambda run: charts.in_flight(run.outcomes))
    cards = [
        ("Time to first token", charts.chart(ttft, "seconds", "share of requests", 1.0)),
        ("Latency", charts.chart(latency, "seconds", "share of requests", 1.0)),
        ("Gaps between frames", charts.chart(gaps, "milliseconds", "share of gaps", 1.0)),
        ("Throughput", charts.chart(rate, "seconds", "tokens per second")),
        ("Requests due and not done", charts.chart(flight, "seconds", "requests")),
    ]
    # One scale for all, so that rows can be compared.
    until_s = max((o.done_s for run in shown.values() for o in run.outcomes), default=0.0)
    cards += [
        (f"Every request{f' of {name}' if len(shown) > 1 else ''}: waiting, then streaming",
         charts.stories(run.outcomes, looks[name].colour, until_s))
        for name, run in shown.items()
    ]  # fmt: skip
    sections = (f"<section><h2>{html.escape(name)}</h2>{svg}</section>" for name, svg in cards)
    return f'<div class="grid">{"".join(sections)}</div>'


def _targets(shown: Mapping[str, Run]) -> str:
    lines = (f"<p>{html.escape(name)}: {html.escape(run.says)}</p>" for name, run in shown.items())
    return f"<details open><summary>How each was asked</summary>{''.join(lines)}</details>"


def _raw(runs: Sequence[Run]) -> str:
    lines = (json.dumps({"name": run.name, **run.figures.to_json()}) for run in runs)
    text = html.escape("\n".join(lines))
    return f"<details><summary>All figures as JSON lines</summary><pre>{text}</pre></details>"
