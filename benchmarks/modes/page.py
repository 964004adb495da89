"""The measured part of docs/scheduling.md, from the last lines of results/modes.jsonl."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.recording import RESULTS, ROOT

PAGE: Final = ROOT / "docs" / "scheduling.md"
FILE: Final = RESULTS / "modes.jsonl"
COLUMNS: Final = {
    "ttft_p50": "first token p50",
    "ttft_p99": "p99",
    "gap_p99": "gap p99",
    "tokens_per_s": "tokens/s",
    "plans_per_step": "plans per step",
    "preemptions": "preempted",
    "wait_max": "longest wait",
}
TIMES: Final = ("ttft_p50", "ttft_p99", "gap_p99", "gap_max", "wait_max")
CLAIMS: Final = ("stall_free", "intervals", "neighbour", "prefixes", "longest_waits")
# Laws that have a table of two figures each.
SHORT: Final = ("code", "long", "bursts", "prefix", "writing", "batch")


def text_of(name: str, value: float) -> str:
    """A cell: times in s or ms, others as they are, to three digits."""
    if name.endswith(TIMES):
        return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def line(figures: Mapping[str, float]) -> str:
    """Of the terminal."""
    return "  ".join(f"{text_of(name, figures[name]):>8}" for name in COLUMNS)


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def last(device: str) -> dict[str, Any]:
    """The newest line of a device."""
    lines = [json.loads(one) for one in FILE.read_text().splitlines()]
    return [one for one in lines if one["device"] == device][-1]  # type: ignore[no-any-return]


def chat_table(run: Mapping[str, Any]) -> str:
    """Every way on the conversation law, with all figures."""
    rows = [
        [way, *(text_of(name, figures[name]) for name in COLUMNS)]
        for way, figures in run["laws"]["chat"].items()
    ]
    return table(["way", *COLUMNS.values()], rows)


def laws_table(run: Mapping[str, Any]) -> str:
    """Every way on the other laws: the median first token, and the 99th percentile of gaps."""
    rows = [
        [
            way,
            *(
                " / ".join(
                    text_of(name, run["laws"][law][way][name]) for name in ("ttft_p50", "gap_p99")
                )
                for law in SHORT
            ),
        ]
        for way in run["laws"]["chat"]
    ]
    return table(["way", *SHORT], rows)


def presets_table(run: Mapping[str, Any]) -> str:
    """What each brings on its own law, and what it does to the others."""
    rows = []
    for name, one in run["presets"].items():
        percents = [f"{100 * (ratio - 1):+.0f}" for ratio in one["of_default"]]
        others = [
            f"{law} {100 * (figures['ttft_p50'] - 1):+.0f}/{100 * (figures['gap_p99'] - 1):+.0f}"
            f"/{100 * (figures['tokens_per_s'] - 1):+.0f}"
            for law, figures in one["others"].items()
            if law != one["law"]
        ]
        metric = COLUMNS[one["metric"]]
        rows.append(
            [f"`{name}`", f"{one['law']}: {metric}", ", ".join(percents), ", ".join(others)]
        )
    return table(["preset", "law and figure", "%, by seed", "elsewhere"], rows)


def claim_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Figures of a claim by case."""
    names = list(next(iter(rows.values())))
    cells = [[case, *(text_of(name, row[name]) for name in names)] for case, row in rows.items()]
    return table(["", *(name.replace("_", " ") for name in names)], cells)


def blocks() -> dict[str, str]:
    """By name of a block of the page."""
    cpu = last("cpu")
    claims = {f"claim-{name}": claim_table(cpu["claims"][name]) for name in CLAIMS}
    return claims | {
        "measured": chat_table(cpu),
        "laws": laws_table(cpu),
        "presets": presets_table(cpu),
        "presets-gpu": presets_table(last("gpu")),
    }


def written(text: str) -> str:
    """The page with its blocks anew."""
    for name, block in blocks().items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        new = rf"\g<1>{block}\n\g<2>"
        text, count = re.subn(pattern, new, text, flags=re.DOTALL)
        assert count == 1, f"{PAGE} has no block {name}"
    return text


def write(path: Path = PAGE) -> None:
    """In place."""
    path.write_text(written(path.read_text()))
