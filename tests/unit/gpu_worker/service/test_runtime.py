import os
import platform
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpu_worker.service import runtime


def test_what_the_operator_set_stays() -> None:
    environ = {"GOMP_SPINCOUNT": "7"}
    runtime.prepare(environ)
    assert environ["GOMP_SPINCOUNT"] == "7"
    assert environ["KMP_BLOCKTIME"] == "0"
    waits = {"OMP_WAIT_POLICY": "ACTIVE"}
    runtime.prepare(waits)
    assert "GOMP_SPINCOUNT" not in waits


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_gpus_memory_is_cut_in_pieces_that_grow(name: str) -> None:
    environ: dict[str, str] = {}
    runtime.prepare(environ)
    assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    # Under its older name too the operator's word stands.
    asked = {name: "max_split_size_mb:64"}
    runtime.prepare(asked)
    assert {each for key, each in asked.items() if "ALLOC" in key} == {"max_split_size_mb:64"}


TORCH = """
import sys
from gpu_worker.service import runtime
runtime.prepare()
is_left_out = runtime.leave_out_the_compiler()
import torch
print(torch._C._accelerator_getAllocatorSettings())
assert is_left_out != ("torch._decomp" in sys.modules)
assert not runtime.leave_out_the_compiler()
from torch.export import graph_signature
assert callable(torch.export.export)
"""


def test_torch_takes_its_word_for_the_pieces_and_does_without_its_compiler() -> None:
    """A setting that torch does not know, or a name that it no longer reads, would do nothing."""
    done = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, text=True, check=True)
    assert "expandable_segments:True" in done.stdout
    assert all(map(find_spec, runtime.COMPILERS))


def test_a_module_is_imported_when_something_in_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dear").mkdir()
    (tmp_path / "dear" / "__init__.py").write_text("cost = 7")
    (tmp_path / "dear" / "part.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    later = runtime.Later("dear")
    monkeypatch.setitem(sys.modules, "dear", later)
    assert not hasattr(later, "__file__")
    assert sys.modules["dear"] is later
    import_module("dear.part")
    assert sys.modules["dear"] is not later
    assert later.cost == 7


SHORT_TURNS = """
import ctypes, struct, threading
from gpu_worker.service import runtime
assert runtime.take_short_turns()
attributes = ctypes.create_string_buffer(struct.calcsize(runtime._SCHED_ATTR))
def look():
    assert ctypes.CDLL(None).syscall(315, 0, attributes, len(attributes), 0) == 0
thread = threading.Thread(target=look)
thread.start()
thread.join()
_, policy, _, nice, _, turn_ns, *_ = struct.unpack(runtime._SCHED_ATTR, attributes.raw)
print(policy, nice, turn_ns)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="asks Linux on x86-64"
)
def test_threads_started_later_take_short_turns_too() -> None:
    command = ["nice", "-n", "3", sys.executable, "-c", SHORT_TURNS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    policy, nice, turn_ns = map(int, done.stdout.split())
    # Policy and niceness stay; a Linux before 6.12 says 0.
    assert (policy, nice) == (0, min(os.nice(0) + 3, 19))
    assert turn_ns in (runtime.TURN_NS, 0)


def test_a_worker_under_another_policy_keeps_it() -> None:
    code = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))\n"
    code += "from gpu_worker.service import runtime; assert not runtime.take_short_turns()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FREED = """
import psutil
from gpu_worker.service import runtime
held = [bytearray(1000) for _ in range(100_000)]
last = bytearray(1000)
before = psutil.Process().memory_info().rss
del held
runtime.return_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc's allocator")
def test_freed_memory_goes_back() -> None:
    # The last allocation pins the heap's top, so nothing goes back by itself.
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50_000_000
