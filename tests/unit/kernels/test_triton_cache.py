"""Triton compiles into the folder that docker-compose.yml names, and writes nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compose import NEEDED, ROOT, load

pytest.importorskip("triton", reason="no triton here")

# For a processor that need not be there.
PROGRAM = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def fill(start, count: tl.constexpr):
    tl.store(start + tl.arange(0, count), tl.zeros([count], tl.float32))


signature = {"start": "*fp32", "count": "constexpr"}
source = ASTSource(fill, signature=signature, constexprs={"count": 16})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.parametrize("is_told", [False, True])
def test_a_read_only_home_is_no_hindrance(tmp_path: Path, is_told: bool) -> None:
    """A home that cannot be written, for root neither; then with the variable of the file."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    worker = load(NEEDED)["services"]["worker-gpu"]
    cache = worker["environment"]["TRITON_CACHE_DIR"]
    volumes = [mount["target"] for mount in worker["volumes"] if mount["type"] == "volume"]
    (volume,) = [target for target in volumes if cache.startswith(target)]
    cache = cache.replace(volume, str(tmp_path))
    environ = os.environ | {"HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    environ.pop("TRITON_CACHE_DIR", None)
    ran = subprocess.run(
        [sys.executable, str(program)],
        env=environ | ({"TRITON_CACHE_DIR": cache} if is_told else {}),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    assert (ran.returncode == 0) is is_told, ran.stderr
    assert bool(list(tmp_path.glob("triton/*/*.cubin"))) is is_told
