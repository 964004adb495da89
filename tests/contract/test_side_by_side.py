"""tests/support/side_by_side.py: how each program ended, and what it said, is its own."""

from tests.support import side_by_side


def test_who_fails_is_told_from_who_does_not() -> None:
    programs = {
        "a month": ["calendar", "2026", "11"],
        "no file": ["json.tool", "/nowhere"],
    }
    ended = side_by_side.run(programs, imports=["calendar", "json"], environ={}, limit_s=120)
    assert ended.keys() == programs.keys()
    assert ended["a month"].code == 0
    assert "November 2026" in ended["a month"].said
    assert ended["no file"].code != 0
    assert "/nowhere" in ended["no file"].said
