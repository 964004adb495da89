"""Which way of two is taken, by a table that says on what evidence."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker.settings import WorkerSettings
from kernels import variants

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _as_the_table_says() -> Iterator[None]:
    yield
    variants.choose([])


def test_what_nobody_timed_is_off_unless_it_only_launches_less() -> None:
    for name, variant in variants.VARIANTS.items():
        launches_less = variant.evidence.startswith("counted: ")
        assert variant.is_default == launches_less or "Not timed" not in variant.evidence, name


def test_words_choose_besides_the_table() -> None:
    assert variants.taken() == ["decode-in-one"]
    variants.choose(["prefill-ahead", "no-decode-in-one"])
    assert variants.taken() == ["prefill-ahead"]
    with variants.forced("prefill-ahead", False), variants.forced("programmatic-launch", True):
        assert variants.taken() == ["programmatic-launch"]
    assert variants.taken() == ["prefill-ahead"]


def test_a_worker_refuses_what_nobody_knows() -> None:
    assert WorkerSettings(model="m").kernel_variants == ()
    given = WorkerSettings(model="m", kernel_variants=("prefill-ahead", "no-decode-in-one"))
    variants.choose(given.kernel_variants)
    assert variants.taken() == ["prefill-ahead"]
    with pytest.raises(ValueError, match="kernel_variants knows no variant 'fast'; there are"):
        WorkerSettings(model="m", kernel_variants=("fast",))


def test_operators_read_the_same_table() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    told = re.findall(r"^\| `([a-z-]+)` \| (on|off) \| (.+?) \| (.+?) \|$", page, re.M)
    known = [
        (name, "on" if one.is_default else "off", one.where, one.evidence)
        for name, one in variants.VARIANTS.items()
    ]
    assert told == known
