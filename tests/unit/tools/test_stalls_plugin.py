"""The stalls that a test is given: its process stands still, again and again, until it is over."""

import subprocess
import sys
from pathlib import Path

TOY = """
import signal
import time

def test_stands_still(monkeypatch):
    slept_s = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    began_s = time.monotonic()
    while len(slept_s) < 2:
        assert time.monotonic() < began_s + 60
    assert all(0 < each < 1.2 for each in slept_s)

def teardown_module():
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
"""


def test_the_main_thread_stands_still_while_a_test_runs(tmp_path: Path) -> None:
    toy = tmp_path / "test_toy.py"
    toy.write_text(TOY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.stalls_plugin", str(toy)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
