"""What Triton's interpreter is asked of each kernel is asked of the device, by the same tests."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from kernels import jit
from tests.support.on_device import DEVICE, IS_GPU, MadeOn, missing

INTERPRETED: Final = Path(__file__).parents[1] / "unit/kernels/interpreted"
# The others play a device of their own.
LENT: Final = (
    "interpreted_attention",
    "interpreted_decode",
    "interpreted_edit_rows",
    "interpreted_fp8",
    "interpreted_large_pools",
    "interpreted_prefill",
    "interpreted_rowwise",
    "interpreted_sampling",
    "interpreted_step_rows",
)
# Whose tests one process runs, in order: they share a stack, or take much of the GPU's memory.
LARGE: Final = "interpreted_large_pools"
WHOLE: Final = ("test_stack", LARGE)
# Four pools of up to 6 GiB, the 4 that lie ahead of each, and what others take meanwhile.
LARGE_BYTES: Final = 48 << 30

SHOWN: Final = (
    *(f"tests.unit.kernels.interpreted.{name}" for name in LENT), "tests.unit.kernels.paged_cases"
)  # fmt: skip
# In a run of all tests others may have imported some of them.
pytest.register_assert_rewrite(*(name for name in SHOWN if name not in sys.modules))
if jit.IS_INTERPRETED:
    import_module("tests.unit.kernels.interpreted.conftest")


class Lent(pytest.File):
    """The modules of another folder, beside a module of this one."""

    def collect(self) -> Iterator[pytest.Collector]:
        if missing() or not jit.IS_THERE:
            return
        for name in LENT:
            module = pytest.Module.from_parent(self, path=INTERPRETED / f"{name}.py")
            module.add_marker(pytest.mark.gpu)
            yield module


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.name != "test_kernels.py":
        return None
    lent: pytest.Collector = Lent.from_parent(parent, path=file_path)
    return lent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `--dist loadgroup`, which by itself groups nothing where pytest is newer than it."""
    if config.getoption("dist") != "loadgroup":
        return None
    scheduling: Any = import_module("xdist.scheduler").LoadScopeScheduling

    class Grouped(scheduling):
        def _split_scope(self, nodeid: str) -> str:
            stem = Path(nodeid.partition("::")[0]).stem
            return stem if stem in WHOLE else nodeid

    return Grouped(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """From one place, so that it is told as one line, with how many."""
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those tests make their tensors on no device in particular."""
    if not any(isinstance(node, Lent) for node in request.node.listchain()):
        yield
        return
    if request.path.stem == LARGE and IS_GPU:
        _skip_without_room()
    with MadeOn(DEVICE):
        yield


def _skip_without_room() -> None:
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(DEVICE)
    if free_bytes < LARGE_BYTES:
        pytest.skip(f"{free_bytes >> 30} GiB of the GPU are free, and it takes {LARGE_BYTES >> 30}")
