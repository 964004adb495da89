"""Ways to compute the same among which is chosen: which is taken, and on what evidence.

    variants.is_on("prefill-ahead")
    variants.choose(["prefill-ahead", "no-decode-in-one"])     once, before anything is launched
    with variants.forced("prefill-ahead", True): ...           where both are compared or timed

What nobody has timed is off, unless all that it does is to launch less for the same arithmetic.
docs/benchmarks.md shows the table.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    is_default: bool
    where: str
    # What speaks for it; whether it is timed is said too.
    evidence: str


VARIANTS: Final = {
    "decode-in-one": Variant(
        is_default=True,
        where="steps that only decode, on a GPU: rope, KV write, attention and the sum of its parts"
        " are one launch, else three",
        evidence="counted: 8 kernels of a layer where there were 10, of the same arithmetic"
        " (squares of normed heads in another order); no spills; as many programs share a"
        " processor, but two for three where two of windows, normed heads or caps, and blocks of 64"
        " and more meet. Not timed",
    ),
    "prefill-ahead": Variant(
        is_default=False,
        where="long rows on sm_90, without windows and fp8: the next tile's scores are multiplied"
        " with the last tile's values, which go on while this one's scores become weights",
        evidence="PTX: two groups of products are on their way while a tile's exponentials are"
        " computed, where none is else; the assembler leaves them so (until 2026-11-25 it made each"
        " instruction wait for the one before, which no PTX shows); no spills. Not timed",
    ),
    "programmatic-launch": Variant(
        is_default=False,
        where="decode on sm_90 and later: kernels of ours begin before the one ahead of them has"
        " ended (programmatic dependent launch)",
        evidence="none: in a layer each of them stands between two products of cuBLAS. Not timed",
    ),
}
# What is not as the table says.
_chosen: dict[str, bool] = {}


def is_on(name: str) -> bool:
    """Whether a variant is taken."""
    return _chosen.get(name, VARIANTS[name].is_default)


def wanted(words: Sequence[str]) -> dict[str, bool]:
    """What words like `prefill-ahead` and `no-decode-in-one` ask for; ValueError names the rule."""
    found = {word.removeprefix("no-"): not word.startswith("no-") for word in words}
    if unknown := found.keys() - VARIANTS:
        known = ", ".join(VARIANTS)
        raise ValueError(f"knows no variant {min(unknown)!r}; there are {known}, each also as no-…")
    return found


def choose(words: Sequence[str]) -> None:
    """From now on take these, and else what the table says."""
    _chosen.clear()
    _chosen.update(wanted(words))


def taken() -> list[str]:
    """The variants that are on."""
    return [name for name in VARIANTS if is_on(name)]


@contextmanager
def forced(name: str, is_taken: bool) -> Iterator[None]:
    """Within, the variant is on or off whatever is chosen; what is recorded stays as it was."""
    assert name in VARIANTS, name
    before = dict(_chosen)
    _chosen[name] = is_taken
    try:
        yield
    finally:
        _chosen.clear()
        _chosen.update(before)
