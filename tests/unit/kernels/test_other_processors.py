"""The compiled kernels as other processors get them: every kernel test again, on their binaries."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import native
from kernels.cpp import build

HERE = Path(__file__).parent
RUN = """
import sys
import pytest
from kernels import native
from kernels.cpp import build
instructions, *tests = sys.argv[1:]
# Tests load the best again and again.
chosen = build.variant_named(instructions)
build.variants = lambda: (chosen,)
if not native.build():
    sys.exit(native.reason())
failed = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])
assert native.reason().endswith(f"for {instructions}"), native.reason()
sys.exit(failed)
"""
TESTS = (
    "linear/test_packed_linear",
    "linear/test_linear_int8",
    "linear/test_linear_int4",
    "attention/test_paged_attention",
    "norms_rope/test_rowwise_kernels",
    "sampling/test_sample",
    "../gpu_worker/model/test_compiled_layers",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("instructions", [variant.name for variant in build.variants()[1:]])
def test_variants_of_lesser_processors(instructions: str, is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip(native.reason())
    tests = [str(HERE / f"{name}.py") for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", RUN, instructions, *tests],
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
