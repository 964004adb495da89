"""tests/support: what a test started ends with the test run, however that ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.whole_stack import wait_until

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys, time
from pathlib import Path
from tests.support import processes
from tests.support.store_server import StoreServer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    # What its fork server imports is no matter here.
    processes.PRELOADED.clear()
    service = processes.ServiceProcess(
        name="scheduler",
        module=processes.SCHEDULER,
        argv=["--redis-url", "redis://127.0.0.1:1", "--grpc-port", "0"],
        log_path=folder / "log",
    )
    with StoreServer(folder / "store") as store:
        service.start()
        while "store.waiting" not in service.log():
            assert service.is_alive, service.log()
            time.sleep(0.05)
        print(json.dumps([store.pid, service.pid]), flush=True)
        sys.stdin.read()
"""


def runs(process: psutil.Process) -> bool:
    """Whom nobody has buried does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    """Seen: a fork server and its services outlived the run that had started them, for hours."""
    program = tmp_path / "run.py"
    program.write_text(RUN)
    with subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None
        started = [psutil.Process(pid) for pid in json.loads(run.stdout.readline())]
        children = psutil.Process(run.pid).children(recursive=True)
        assert set(started) < set(children)
        run.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(runs, children)), "nothing of it is left")
