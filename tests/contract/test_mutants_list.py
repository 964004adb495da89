"""tools/mutants.toml: a mutant whose place or tests have gone says nothing, and `make mutants`,
which would tell, runs seldom.
"""

import tomllib
from functools import cache
from pathlib import Path

from tools import mutants as tool

ROOT = Path(__file__).parents[2]


@cache
def listed() -> tuple[list[tool.Mutant], list[tool.Verdict]]:
    return tool.listed(ROOT)


def test_every_mend_stands_where_its_reversal_looks_for_it() -> None:
    mutants, _ = listed()
    stale = [f"{mutant.name}: {mutant.why_not}" for mutant in mutants if mutant.change is None]
    assert not stale, "\n".join(stale)


def test_every_equivalent_mutant_is_one_that_is_drawn() -> None:
    _, equivalent = listed()
    drawn = {verdict.name.partition(" ")[2] for verdict in equivalent}
    given = {each["mutant"] for each in tomllib.loads((ROOT / tool.LIST).read_text())["equivalent"]}
    assert given == drawn


def test_the_wider_tests_exist() -> None:
    wider = tomllib.loads((ROOT / tool.LIST).read_text())["wider"]
    assert all((ROOT / test).exists() for tests in wider.values() for test in tests)
