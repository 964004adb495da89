"""/docs is one page that runs its own code, and loads nothing but the document."""

import re

from gateway.openai.openapi import PAGE, PAGE_HEADERS


def test_the_page_names_no_other_place() -> None:
    assert not re.findall(rb"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", PAGE)
    assert not re.findall(rb"""\s(?:style|on\w+)\s*=\s*["']""", PAGE)
    assert b"innerHTML" not in PAGE


def test_only_its_own_code_runs() -> None:
    policy = dict(
        part.strip().split(" ", 1) for part in PAGE_HEADERS["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[kind]), kind
