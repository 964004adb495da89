"""What was expected of an H200 before any GPU had run this: a figure's goal, the field's, a guess.

`goal` is what we want of it, `field` what others reach by their own word or a public reading,
`predicted` what a careful reading of the code came to. None of the three is a measurement of ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Of figure `key` in the rows of `table` that have all of `where`."""

    table: str
    where: dict[str, Any]
    key: str
    # The least and the most; None: nobody said.
    goal: tuple[float, float] | None = None
    field: tuple[float, float] | None = None
    predicted: tuple[float, float] | None = None

    def rows(self, found: Sequence[Row]) -> list[Row]:
        return [
            row
            for row in found
            if row["table"] == self.table
            and self.key in row
            and all(row.get(name) == value for name, value in self.where.items())
        ]


_MOST: Final = float("inf")
_NEAR: Final = 0.2


def _near(value: float) -> tuple[float, float]:
    """As the reading said of its own guesses."""
    return value * (1 - _NEAR), value * (1 + _NEAR)


def _step(model: str, rows: int, predicted: float, field: tuple[float, float]) -> Expected:
    return Expected(
        table="decode steps",
        where={"what": model, "rows": rows},
        key="of_floor",
        goal=(0.85, _MOST) if rows > 1 else None,
        field=field,
        predicted=_near(predicted),
    )


def _attention(what: str, goal: float, predicted: tuple[float, float]) -> Expected:
    return Expected(
        table="decode attention",
        where={"what": what},
        key="of_bandwidth",
        goal=(goal, _MOST),
        field=(0.85, 0.9),
        predicted=predicted,
    )


EXPECTED: Final = (
    _step("qwen3 0.6b", 1, 0.23, (0.25, 0.3)),
    _step("qwen3 0.6b", 64, 0.48, (0.6, 0.7)),
    _step("qwen3 0.6b", 256, 0.68, (0.6, 0.7)),
    _step("llama 8b", 1, 0.69, (0.75, 0.8)),
    _step("llama 8b", 64, 0.64, (0.6, 0.7)),
    _step("llama 8b", 256, 0.71, (0.6, 0.7)),
    # Launched operator by operator, a step with a prompt in it waits for the host.
    Expected(
        table="mixed steps",
        where={"what": "qwen3 0.6b"},
        key="step_ms",
        goal=(0, 5),
        predicted=(8, 15),
    ),
    Expected(table="mixed steps", where={}, key="idle_percent", goal=(0, 2)),
    _attention("16 x 2k", 0.88, (0.55, 0.75)),
    _attention("64 x 2k", 0.88, (0.72, 0.85)),
    _attention("256 x 2k", 0.88, (0.72, 0.85)),
    _attention("2 x 32k + 30 x 4k", 0.75, (0.72, 0.85)),
    _attention("1 x 128k + 31 x 4k", 0.75, (0.72, 0.85)),
    Expected(
        table="prefill attention",
        where={"what": "kaiten"},
        key="tflops",
        field=(580, 600),
        predicted=(300, 380),
    ),
    # Half the bytes: how much sooner each further token of context is read.
    Expected(
        table="fp8 KV",
        where={"what": "slope beside bf16"},
        key="ratio",
        field=(1 / 2, 1 / 1.9),
        predicted=(1 / 1.5, 1 / 1.2),
    ),
    Expected(
        table="idle in steady decode", where={}, key="idle_percent", goal=(0, 2), predicted=(3, 6)
    ),
    Expected(table="beside transformers", where={"what": "sdpa"}, key="kaiten_is", goal=(1, _MOST)),
    Expected(table="crowd", where={"what": "gRPC, 2 ms"}, key="of_in_process", goal=(0.95, _MOST)),
)


def compared(found: Sequence[Row]) -> list[Row]:
    """Each figure of which something was expected, beside that, and which of it came true."""
    return [
        {
            "figure": _name(each, row),
            "measured": row[each.key],
            "floor_ms": row.get("floor_ms"),
            "goal": _text(each.goal),
            "field": _text(each.field),
            "predicted": _text(each.predicted),
            "so": _verdict(row[each.key], each),
        }
        for each in EXPECTED
        for row in each.rows(found)
    ]


def _name(each: Expected, row: Row) -> str:
    words = (each.table, row.get("what"), row.get("shape"), row.get("context"), row.get("rows"))
    return ", ".join(str(word) for word in words if word is not None) + f": {each.key}"


def _text(span: tuple[float, float] | None) -> str | None:
    if span is None:
        return None
    low, high = span
    return f"≥ {low:.3g}" if high == _MOST else f"{low:.3g} to {high:.3g}"


def _verdict(value: float, each: Expected) -> str:
    """Below and above are of numbers, not of good and bad."""
    said = []
    for name, span in (("goal", each.goal), ("predicted", each.predicted)):
        if span is not None:
            low, high = span
            place = "below" if value < low else "above" if value > high else "within"
            said.append(f"{place} {name}")
    return ", ".join(said)
