"""tests/support/warm_python.py: a program is as one that was started, but for what was imported."""

from tests.support import warm_python

CODE = """
import os, sys
sys.stdout.write(" ".join([*sys.argv, sys.stdin.read(), os.environ["SAID"], __name__]))
sys.modules["calendar"].seen = "seen" + getattr(sys.modules["calendar"], "seen", "")
sys.exit(sys.modules["calendar"].seen)
"""


def test_each_begins_with_the_imports_and_knows_of_no_other() -> None:
    for _ in range(2):
        environ = {"SAID": "told"}
        ended = warm_python.run(
            "-c", CODE, "word", imports=["calendar"], stdin="read", environ=environ
        )
        assert ended == (1, "-c word read told __main__", "seen\n")
    ended = warm_python.run("-m", "calendar", "2026", "11", imports=["calendar"])
    assert (ended.code, "November 2026" in ended.out) == (0, True)
