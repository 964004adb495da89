"""Each way of computing the same beside its alternative: what kernels/variants.py wants to know.

Timed in turns (`turns`); a line per case, and at the end one per variant that says what its default
should be. Beside them what is no variant yet: splits of half the size.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.mixed import Mixed
from benchmarks.gpu.models import random_weights, shapes
from benchmarks.gpu.steps import Batch, quick_on_cpu
from benchmarks.gpu.turns import decision, figures
from kernels import variants
from kernels.attention import decode_attention, plan, triton_launch

OF_DECODES: Final = ("decode-in-one", "programmatic-launch")
OF_MIXED: Final = "chunks-beside-decodes"
SPLITS: Final = "splits of 512"


def each(bench: Bench) -> None:
    verdicts: dict[str, list[str]] = {}
    with quick_on_cpu(bench):
        _decodes(bench, verdicts)
        _mixed(bench, verdicts)
    for name, found in verdicts.items():
        is_default = _is_default(name)
        bench.row(
            "variants decided", what=name, default="on" if is_default else "off",
            should_be=decision(found, is_default=is_default), cases=len(found),
        )  # fmt: skip


def _decodes(bench: Bench, verdicts: dict[str, list[str]]) -> None:
    """Steps of a full batch; all ways in the same turns, each with a recording of its own."""
    shape, context = shapes(bench)[-1], bench.sized(1024, 24)
    weights = random_weights(shape, bench)
    for rows in (2,) if bench.is_tiny else (1, 64):
        bench.free()
        usual = Batch(shape, weights, rows, context, bench)
        batches = {"usual": usual}
        for name in (*OF_DECODES, SPLITS):
            with otherwise(name):
                batches[name] = Batch(shape, weights, rows, context, bench, usual.pages)

        def step_s(name: str, batches: dict[str, Batch] = batches) -> float:
            with otherwise(name):
                return batches[name].step_s()

        found = bench.in_turns({name: partial(step_s, name) for name in batches})
        for name in (*OF_DECODES, SPLITS):
            taken, without = (name, "usual") if not _is_default(name) else ("usual", name)
            of = {"taken": found[taken], "without": found[without]}
            _say(bench, verdicts, name, shape.name, rows, context, of)


def _mixed(bench: Bench, verdicts: dict[str, list[str]]) -> None:
    """Steps of a chunk beside decodes, each way recorded with room for its parts."""
    shape = shapes(bench)[-1]
    weights = random_weights(shape, bench)
    bench.free()
    ways = {"taken": True, "without": False}
    made: dict[str, Mixed] = {}
    pages: Tensor | None = None
    for way, is_taken in ways.items():
        with variants.forced(OF_MIXED, is_taken):
            made[way] = Mixed(shape, weights, bench, pages)
        pages = made[way].pages

    def step_s(way: str) -> float:
        with variants.forced(OF_MIXED, ways[way]):
            return made[way].step_s()

    found = bench.in_turns({way: partial(step_s, way) for way in ways})
    one = made["taken"]
    what = f"{shape.name}, a chunk of {one.chunk}"
    _say(bench, verdicts, OF_MIXED, what, one.rows, one.context, found)


def _is_default(name: str) -> bool:
    return name != SPLITS and variants.VARIANTS[name].is_default


@contextmanager
def otherwise(name: str) -> Iterator[None]:
    """Within, what `name` says is not as by default; "usual": all is."""
    with ExitStack() as stack:
        if name == SPLITS:
            stack.enter_context(splits_of(512))
        elif name != "usual":
            stack.enter_context(variants.forced(name, not _is_default(name)))
        yield


@contextmanager
def splits_of(positions: int) -> Iterator[None]:
    """Within, attention of short rows is shared out in splits of so many positions."""
    modules = (plan, triton_launch, decode_attention)
    before = plan.SPLIT
    for module in modules:
        module.SPLIT = positions  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.SPLIT = before  # type: ignore[attr-defined]


def _say(
    bench: Bench, verdicts: dict[str, list[str]], name: str, what: str, rows: int, context: int,
    found: dict[str, list[float]],
) -> None:  # fmt: skip
    said = figures(found["taken"], found["without"])
    verdicts.setdefault(name, []).append(said["so"])
    bench.row("variants", what=name, of=what, rows=rows, context=context, **said)
