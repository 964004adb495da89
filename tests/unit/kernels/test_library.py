"""The door between Python and the compiled kernels: kernels/cpp/c_abi.cpp and library.py."""

import re
import shutil
import subprocess
from pathlib import Path
from struct import Struct

import pytest
import torch

from kernels import native
from kernels.cpp import build, library

STRUCTS = {
    "Attention": library._ATTENTION,
    "Norm": library._NORM,
    "Gate": library._GATE,
    "Rope": library._ROPE,
    "WriteKv": library._WRITE_KV,
    "Pack": library._PACK,
    "PackInt4": library._PACK_INT4,
    "Unpack": library._UNPACK,
    "Linear": library._LINEAR,
    "Layer": library._LAYER,
    "Layers": library._LAYERS,
    "LayerStep": library._LAYER_STEP,
    "Sample": library._SAMPLE,
    "Mask": library._MASK,
}
KINDS = {"int64_t": "q", "int": "i", "float": "f", "bool": "?"}
HEADER = (build.SOURCES / "kernels.h").read_text()


def fields_of(name: str) -> str:
    """The format of a struct as kernels.h writes it, its own structs included."""
    (body,) = re.findall(rf"^struct {name} {{\n(.*?)^}};", HEADER, re.M | re.S)
    found = ""
    for line in re.sub(r"//.*", "", body).split(";"):
        # `const int32_t *starts, *contexts`: each name that has a star is a pointer.
        declared = re.fullmatch(r"(?:const )?(\w+)\s*([\w\s*,]+)", line.strip())
        if declared is None:
            continue
        kind, names = declared.groups()
        for each in names.split(","):
            found += "P" if "*" in each else KINDS.get(kind) or fields_of(kind)
    return found


def unfolded(layout: Struct) -> str:
    pairs = re.findall(r"(\d*)(\D)", layout.format)
    return "".join(int(count or 1) * kind for count, kind in pairs)


@pytest.mark.parametrize("name", STRUCTS)
def test_arguments_are_packed_as_the_header_says(name: str) -> None:
    assert unfolded(STRUCTS[name]) == fields_of(name)


@pytest.fixture
def binary(is_compiled: bool) -> Path:
    if not is_compiled:
        pytest.skip(native.reason())
    if shutil.which("nm") is None:
        pytest.skip("no nm here")
    native.build()
    return native.compiled().path


def symbols(binary: Path, *options: str) -> list[str]:
    command = ["nm", "--dynamic", "--format=posix", *options, str(binary)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[0].partition("@")[0] for line in said.splitlines()]


def test_the_library_needs_no_torch_no_python_and_no_openmp(binary: Path) -> None:
    """And so has no pool of threads beside torch's but the helpers of parallel.cpp."""
    needed = symbols(binary, "--undefined-only")
    assert "memcpy" in needed
    foreign = re.compile(r"_?Py|THP|_ZNK?2at|_ZNK?3c10|_ZNK?5torch|GOMP_|omp_|__kmpc")
    assert not [name for name in needed if foreign.match(name)]


def test_nothing_but_the_door_is_exported(binary: Path) -> None:
    exported = {name for name in symbols(binary, "--defined-only") if "kaiten" in name}
    assert all(name.startswith("kaiten_") for name in exported), exported
    assert {"kaiten_run_layers", "kaiten_sample"} <= exported


def test_an_id_outside_is_an_index_error_that_names_it(is_compiled: bool) -> None:
    if not is_compiled:
        pytest.skip(native.reason())
    compiled = native.compiled()
    packed = torch.zeros(48, 4)
    with pytest.raises(IndexError, match=r"^ids: 5 is not one of 5 rows$"):
        compiled.unpack_rows(packed, torch.tensor([0, 5]), 5)
    assert compiled.unpack_rows(packed, torch.tensor([0, 4]), 5).shape == (2, 4)
