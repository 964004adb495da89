"""Each page runs its own code, and loads nothing but what its gateway answers."""

import re

import pytest

from gateway.openai.pages.operations import OPERATIONS, Page

BYTES_MAX = 250_000


def pages() -> list[Page]:
    return [each.handler for each in OPERATIONS if isinstance(each.handler, Page)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_it_names_no_other_place(page: Page) -> None:
    assert not re.findall(rb"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", page.raw)
    assert not re.findall(rb"""\s(?:style|on\w+)\s*=\s*["']""", page.raw)
    assert b"innerHTML" not in page.raw
    assert len(page.raw) <= BYTES_MAX


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_only_its_own_code_runs(page: Page) -> None:
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[kind]), kind


def test_there_are_three() -> None:
    assert [page.name for page in pages()] == ["try.html", "docs.html", "dashboard/page.html"]
