"""What every Triton kernel costs a processor, by compiling it: no GPU is needed.

    python -m benchmarks.kernels.aot            rewrite benchmarks/results/kernels_aot.json
    python -m benchmarks.kernels.aot --only attend plan     only kernels whose names begin so
    python -m benchmarks.kernels.aot --only "8b: decode_kernel sm_90"       only that line of --list
    python -m benchmarks.kernels.aot --list     the specialisations, compiling nothing

The launchers themselves are called, with tensors that have shapes but no memory, and what they
would launch is recorded: so the table has exactly the specialisations that a worker runs.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.kernels.all_launches import MODULES, SHAPES, Shape, launch_all
from benchmarks.kernels.compiled_code import CodeFacts, digest_of, facts_of, spills, usage
from benchmarks.recording import RESULTS, versions

TABLE: Final = RESULTS / "kernels_aot.json"
# What a program can share with itself.
SHARED_BYTES: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
ARCHITECTURES: Final = tuple(SHARED_BYTES)
_TYPES: Final = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}
_Keep = Callable[[Any, Mapping[str, Any], Mapping[str, int]], None]
_ALIGNED: Final = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialisation:
    """One launch: `arguments` are the kernel's by name."""

    shape: str
    kernel: Any
    variant: str
    arguments: Mapping[str, Any]
    options: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__.strip('_')}{self.variant}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Per thread and per program, as ptxas and the linker say."""

    shape: str
    kernel: str
    arch: int
    warps: int
    stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    cubin_bytes: int
    # Of rows that were compiled since there are any: of what, and what the code is made of.
    digest: str = ""
    code: CodeFacts | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.shape, self.kernel, self.arch


def specialisations(shape: Shape, arch: int) -> list[Specialisation]:
    """What the launchers would launch for a model of this shape, on a processor of this kind."""
    os.environ["KAITEN_TRITON"] = "1"
    modules = {name.split(".")[1]: import_module(f"kernels.{name}") for name in MODULES}
    jit: Any = import_module("kernels.jit")
    jit.arch_elsewhere = arch
    dispatch = import_module("kernels.dispatch")
    found: list[Specialisation] = []

    def keep(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, int]) -> None:
        found.append(
            Specialisation(
                shape=shape.name,
                kernel=kernel,
                variant=_variant(arguments, options),
                arguments=arguments,
                options=options,
            )
        )

    dispatch.force("triton")
    try:
        with torch.device("meta"), _recording(modules.values(), keep):
            launch_all(shape, modules)
    finally:
        dispatch.force(None)
    return found


def _variant(arguments: Mapping[str, Any], options: Mapping[str, int]) -> str:
    """What tells launches of one kernel apart."""
    long_split = import_module("kernels.attention.plan").LONG_SPLIT
    masked = mask_words(arguments.get("HAS_WINDOW", False), arguments.get("HAS_SOFTCAP", False))
    if "GROUP_TILE" in arguments:
        is_few = options["num_stages"] > 3 and not arguments["IS_FP8"]
        return f"{' normed' * arguments['NORMS']}{masked}{' few rows' * is_few}"
    if arguments.get("SPLIT") == long_split:
        return f" long{masked}"
    if masked:
        return masked
    if "HAS_BIAS" in arguments:
        is_apart = arguments.get("IS_APART", False)
        return f"{' parts' * is_apart}{' bias' * arguments['HAS_BIAS']}"
    return _kind(arguments)


def _kind(arguments: Mapping[str, Any]) -> str:
    """Of kernels that neither attend nor multiply."""
    if arguments.get("SHORT_TOKENS") == 0:
        return " all long"
    if kind := arguments.get("KIND"):
        return f" {kind}"
    if arguments.get("IS_GELU"):
        return " gelu"
    if "KEEPS" in arguments:
        return " keep" if arguments["KEEPS"] else " restore"
    if arguments.get("BEFORE"):
        return " normed fused" if arguments["NORMS_SUM"] else " normed"
    if arguments.get("GATHERS"):
        return " rows fused" if arguments["ADDS"] else " rows"
    if arguments.get("ADDS") or arguments.get("NORMS"):
        return " fused"
    return ""


def mask_words(has_window: bool, has_softcap: bool) -> str:
    """What the name of an attention kernel ends in."""
    return " window" * has_window + " softcap" * has_softcap


@contextmanager
def _recording(modules: Any, keep: _Keep) -> Iterator[None]:
    """Within, launches are kept instead of made."""
    launched = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel")
    ]
    for module, name, kernel in launched:
        setattr(module, name, _Recorder(kernel, keep))
    try:
        yield
    finally:
        for module, name, kernel in launched:
            setattr(module, name, kernel)


class _Recorder:
    def __init__(self, kernel: Any, keep: _Keep) -> None:
        self._kernel, self._keep = kernel, keep

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(
            *values: object,
            num_warps: int = 4,
            num_stages: int = 3,
            maxnreg: int | None = None,
            **named: object,
        ) -> None:
            positional = dict(zip(self._kernel.arg_names, values, strict=False))
            options = {"num_warps": num_warps, "num_stages": num_stages}
            if maxnreg is not None:
                options["maxnreg"] = maxnreg
            self._keep(self._kernel, {**positional, **named}, options)

        return launch


def binary_of(one: Specialisation, arch: int) -> Any:
    """Triton's compiled kernel: `asm` by kind, `metadata`."""
    triton = import_module("triton")
    compiler = import_module("triton.compiler")
    backend = import_module("triton.backends.compiler")
    signature, constants, attributes = _signature(one)
    source = compiler.ASTSource(
        fn=one.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    target = backend.GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options=dict(one.options))


def compile_for(one: Specialisation, arch: int) -> Resources:
    """Compile, and ask the binary tools of the Triton wheel what came out."""
    triton, binary = import_module("triton"), binary_of(one, arch)
    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        registers, stack_bytes = usage(tools, Path(folder), binary.asm["cubin"])
        return Resources(
            shape=one.shape,
            kernel=one.name,
            arch=arch,
            warps=one.options["num_warps"],
            stages=one.options["num_stages"],
            registers=registers,
            # Spilled registers lie on the stack. Where there is none, ptxas need not work again.
            spill_bytes=spills(tools, Path(folder), binary.asm["ptx"]) if stack_bytes else 0,
            shared_bytes=binary.metadata.shared,
            cubin_bytes=len(binary.asm["cubin"]),
            digest=digest_for(one, arch),
            code=facts_of(tools, Path(folder), binary.asm["ptx"], binary.asm["cubin"]),
        )


def digest_for(one: Specialisation, arch: int) -> str:
    """Of everything that `compile_for` would compile."""
    return digest_of(one.kernel, *_signature(one), sorted(one.options.items()), arch)


def _signature(one: Specialisation) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """As Triton's own launcher specialises: alignment of pointers and strides, and constants."""
    signature: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, parameter in enumerate(one.kernel.params):
        value = one.arguments[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            is_aligned = value.storage_offset() * value.element_size() % 16 == 0
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            is_aligned = not parameter.do_not_specialize and value % 16 == 0
        if is_aligned:
            attributes[(index,)] = _ALIGNED
    return signature, constants, attributes


def read_table() -> dict[tuple[str, str, int], Resources]:
    """The committed figures."""
    rows = map(row_of, json.loads(TABLE.read_text())["rows"])
    return {row.key: row for row in rows}


def row_of(told: dict[str, Any]) -> Resources:
    """What `told_of` made of it, in JSON."""
    code, known = told.get("code"), {each.name for each in fields(CodeFacts)}
    if code is not None and code.keys() != known:
        # Of a time when other facts were asked for: as if it had not been compiled.
        return Resources(**{**told, "code": None, "digest": ""})
    if code is not None:
        code = CodeFacts(**{**code, "begins_with": tuple(code["begins_with"])})
    return Resources(**{**told, "code": code})


def told_of(row: Resources) -> dict[str, Any]:
    told = asdict(row)
    return told if row.digest else {key: told[key] for key in told if key not in ("digest", "code")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="compile nothing")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="keep other rows")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    found = (
        (one, arch)
        for shape, arch in product(SHAPES, ARCHITECTURES)
        for one in specialisations(shape, arch)
    )
    work = {(one.shape, one.name, arch): one for one, arch in found}
    begins, lines = tuple(options.only), set(options.only)
    wanted = {
        key: one for key, one in work.items() if key[1].startswith(begins) or line_of(key) in lines
    }
    if options.list:
        print("\n".join(map(line_of, wanted)))
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = pool.map(lambda item: compile_for(item[1], item[0][2]), wanted.items())
        new = {row.key: _shown(row) for row in rows}
    old = read_table() if len(wanted) < len(work) else {}
    _write([{**old, **new}[key] for key in work])


def line_of(key: tuple[str, str, int]) -> str:
    shape, name, arch = key
    return f"{shape}: {name} sm_{arch}"


def _shown(row: Resources) -> Resources:
    print(json.dumps(told_of(row)), flush=True)
    return row


def _write(rows: Sequence[Resources]) -> None:
    lines = ",\n".join(json.dumps(told_of(row)) for row in rows)
    head = json.dumps({"schema": 1, "triton": versions()["triton"]})[1:-1]
    TABLE.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
