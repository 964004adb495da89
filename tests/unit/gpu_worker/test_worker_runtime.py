import subprocess
import sys

from gpu_worker import runtime


def test_what_the_operator_set_stays() -> None:
    environ = {"GOMP_SPINCOUNT": "7"}
    runtime.prepare(environ)
    assert environ["GOMP_SPINCOUNT"] == "7"
    assert environ["KMP_BLOCKTIME"] == "0"
    waits = {"OMP_WAIT_POLICY": "ACTIVE"}
    runtime.prepare(waits)
    assert waits == {"OMP_WAIT_POLICY": "ACTIVE"}


def test_the_worker_prepares_before_torch_is_loaded() -> None:
    """OpenMP reads its environment when it is loaded: what `main` imports must not bring it."""
    code = "import sys, gpu_worker.main; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
