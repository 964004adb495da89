"""The compiled kernels as other processors get them: every kernel test again, on their binaries."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import native

HERE = Path(__file__).parent
RUN = """
import sys
import pytest
from kernels import native
instructions, flags, *tests = sys.argv[1:]
native._FLAGS += tuple(flags.split())
if not native.build():
    sys.exit(native.reason())
assert native.reason() == f"compiled for {instructions}", native.reason()
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
"""
TESTS = (
    "linear/test_packed_linear",
    "linear/test_linear_int8",
    "attention/test_paged_attention",
    "norms_rope/test_rowwise_kernels",
    "sampling/test_sample",
    "../gpu_worker/model/test_compiled_layers",
)
WITHOUT = {
    "avx512": "-mno-avx512bf16",
    "avx2": "-mno-avx512f",
    "generic": "-mno-avx",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("instructions", WITHOUT)
def test_kernels_built_without(instructions: str, is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip(native.reason())
    if not native.compiled().instructions().startswith("avx512"):
        pytest.skip("this processor has less to leave out")
    tests = [str(HERE / f"{name}.py") for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", RUN, instructions, WITHOUT[instructions], *tests],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
