"""What Triton's compiler made of a kernel: registers, spills, and what its code is made of.

And a digest of all that decided it: who has the same digest has the same code, and need not be
compiled again to know what is in it.
"""

import hashlib
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_COPY: Final = re.compile(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)")
_PRODUCT: Final = re.compile(r"\b(?:wgmma\.mma_async|mma)\.[\w.:]+")
_LETTERS: Final = {
    "st.global": "s", "bar.sync": "b", "cp.async.cg": "c", "atom.global": "a", "ld.global": "l"
}  # fmt: skip
_ACCESS: Final = re.compile("|".join(map(re.escape, _LETTERS)))
_ORDERED: Final = ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "ld.global")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFacts:
    """Of the PTX of one kernel; instructions are counted as they stand, not as they run."""

    # Asynchronous copies to shared memory by the bytes of each, in hexadecimal.
    copies: Mapping[str, int]
    # The most groups of copies that a wait leaves on their way.
    copies_ahead: int
    # Of matrices, by instruction with its shape and types.
    products: Mapping[str, int]
    has_tf32: bool
    matrices_loaded: int
    # From shared memory, one byte at a time.
    bytes_loaded: int
    # Instructions of a softmax, by how many groups of sm_90's products are on their way there.
    exponentials: Mapping[str, int]
    # Waits for such products, and how often the assembled code waits: where it has to move what the
    # matrix units work on, after each of their instructions (ptxas' C7513 and its like).
    product_waits: int
    product_waits_assembled: int
    # Logarithms of the processor's own, and products that are summed without rounding between.
    logarithms: int
    fused_sums: int
    # Whether a barrier lies between what was stored and the first copy of 16 bytes, and on either
    # side of an atomic operation; False where there is nothing of the kind.
    copies_behind_barrier: bool
    counts_between_barriers: bool
    # Of the starts of neighbours and the first read, those that there are, as they stand.
    begins_with: tuple[str, ...]


def facts_of(tools: Path, folder: Path, ptx: str, cubin: bytes) -> CodeFacts:
    waits = re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", ptx)
    begins = sorted((ptx.index(word), word) for word in _ORDERED if word in ptx)
    product_waits, order = ptx.count("wgmma.wait_group"), access_order(ptx)
    return CodeFacts(
        copies=dict(Counter(_COPY.findall(ptx))),
        copies_ahead=max(map(int, waits), default=0),
        products=dict(Counter(_PRODUCT.findall(ptx))),
        has_tf32="tf32" in ptx,
        matrices_loaded=ptx.count("ldmatrix.sync.aligned"),
        bytes_loaded=len(re.findall(r"ld\.shared\.[usb]8", ptx)),
        exponentials=_exponentials(ptx),
        product_waits=product_waits,
        product_waits_assembled=_waits_in(tools, folder, cubin) if product_waits else 0,
        logarithms=ptx.count("lg2.approx"),
        fused_sums=ptx.count("fma.rn.f32"),
        copies_behind_barrier=re.search(r"sb+c", order) is not None,
        counts_between_barriers=re.search(r"sb+ab+s*l", order) is not None,
        begins_with=tuple(word for _, word in begins),
    )


def access_order(ptx: str) -> str:
    """A letter per access to memory, as they stand: stores, barriers, copies of 16 bytes up to the
    first, atomics, and loads behind them.
    """
    order = ""
    for word in _ACCESS.findall(ptx):
        letter = _LETTERS[word]
        is_behind = letter not in "lc" or ("a" in order if letter == "l" else "c" not in order)
        order += letter if is_behind else ""
    return order


def _exponentials(ptx: str) -> dict[str, int]:
    on_their_way, found = 0, Counter[str]()
    for line in ptx.splitlines():
        if "wgmma.commit_group" in line:
            on_their_way += 1
        elif waited := re.search(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", line):
            on_their_way = min(on_their_way, int(waited[1]))
        elif "ex2.approx" in line:
            found[str(on_their_way)] += 1
    return dict(found)


def _waits_in(tools: Path, folder: Path, cubin: bytes) -> int:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return _output(tools / "cuobjdump", "-sass", str(path)).count("WARPGROUP.DEPBAR")


def digest_of(kernel: Any, *decided: object) -> str:
    """Of the source of a kernel and of all that it calls, of the compiler, and of what else
    `decided`: the kinds of its arguments, constants, options, the processor.

    On which lines of their files the sources stand changes nothing.
    """
    version = import_module("triton").__version__
    told = (_source_of(kernel), version, *decided)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _source_of(kernel: Any) -> str:
    """Triton's own key of it, made anew, without the lines that it holds."""
    kind = import_module("triton.runtime.jit").JITCallable
    left, seen = [kernel], set[int]()
    while left:
        function = left.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        function.starting_line_number, function.hash = 0, None
        named = list(function.fn.__globals__.values())
        # Of our own modules, too, that are named there.
        modules = [each for each in named if isinstance(each, ModuleType)]
        ours = [each for each in modules if each.__name__.startswith("kernels.")]
        named += [each for module in ours for each in vars(module).values()]
        left += [each for each in named if isinstance(each, kind)]
    return str(kernel.cache_key)


def usage(tools: Path, folder: Path, cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    said = _output(tools / "cuobjdump", "-res-usage", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, "cuobjdump names no registers and no stack"
    return int(found[1]), int(found[2])


def spills(tools: Path, folder: Path, ptx: str) -> int:
    """Bytes."""
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    target = re.search(r"\.target\s+([^\s,]+)", ptx)
    assert target, "the PTX names no target"
    # The plain ptxas of the wheel refuses the PTX of newer processors.
    words = ("-v", f"--gpu-name={target[1]}", str(path), "-o", str(folder / "again.cubin"))
    text = _output(tools / "ptxas-blackwell", *words)
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    assert found, "ptxas names no spills"
    return sum(map(int, found))


def _output(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout + done.stderr
