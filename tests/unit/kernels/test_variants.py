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


def test_what_nobody_timed_is_off() -> None:
    for name, variant in variants.VARIANTS.items():
        assert not variant.is_default or variant.evidence.startswith("timed on "), name


def test_words_choose_besides_the_table() -> None:
    assert variants.taken() == ["decode-in-one", "chunks-beside-decodes"]
    variants.choose(["programmatic-launch", "no-decode-in-one"])
    assert variants.taken() == ["chunks-beside-decodes", "programmatic-launch"]
    with variants.forced("programmatic-launch", False), variants.forced("decode-in-one", True):
        assert variants.taken() == ["decode-in-one", "chunks-beside-decodes"]
    assert variants.taken() == ["chunks-beside-decodes", "programmatic-launch"]


def test_a_worker_refuses_what_nobody_knows() -> None:
    assert WorkerSettings(model="m").kernel_variants == ()
    given = WorkerSettings(model="m", kernel_variants=("programmatic-launch", "no-decode-in-one"))
    variants.choose(given.kernel_variants)
    assert variants.taken() == ["chunks-beside-decodes", "programmatic-launch"]
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
