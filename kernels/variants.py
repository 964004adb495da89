"""Ways to compute the same among which is chosen: which is taken, and on what evidence.

    variants.is_on("programmatic-launch")
    variants.choose(["no-decode-in-one"])                      once, before anything is launched
    with variants.forced("decode-in-one", False): ...           where both are compared or timed

What nobody has timed is off.
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
        evidence="timed on an H200, qwen3 0.6b at 1k of context: a step of 64 rows is 4 % faster,"
        " of one row 15 %",
    ),
    "chunks-beside-decodes": Variant(
        is_default=True,
        where="steps in which some decode while prompts are computed, on a GPU: attention of the"
        " ones and of the others at the same time, on two streams, with room for parts of each",
        evidence="timed on an H200, 63 rows at 1k of context beside a chunk of 512 tokens: a step"
        " of qwen3 0.6b takes 4.71 ms in place of 6.08, of llama 8b as long",
    ),
    "programmatic-launch": Variant(
        is_default=False,
        where="decode on sm_90 and later: kernels of ours begin before the one ahead of them has"
        " ended (programmatic dependent launch)",
        evidence="timed on an H200, qwen3 0.6b at 1k of context: a step of one row is 2 % slower,"
        " of 64 rows as fast",
    ),
}
# What is not as the table says.
_chosen: dict[str, bool] = {}


def is_on(name: str) -> bool:
    """Whether a variant is taken."""
    return _chosen.get(name, VARIANTS[name].is_default)


def wanted(words: Sequence[str]) -> dict[str, bool]:
    """What words like `decode-in-one` and `no-decode-in-one` ask for; ValueError names the rule."""
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
