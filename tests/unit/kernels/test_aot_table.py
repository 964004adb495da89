"""What the kernels cost a processor is written down, and no change makes it dearer unseen."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import aot
from kernels import jit
from kernels.attention.decode_attention import decode_tiling
from kernels.attention.plan import tiles_for
from kernels.attention.triton_launch import Tiling, tiling_for
from tests.support.once import made_once

pytest.importorskip("triton", reason="no triton here")

ROOT = Path(__file__).parents[3]
ROW_KERNELS = ("step_rows_kernel", "penalise_kernel", "forbid_kernel", "advance_rows_kernel")
AHEAD = "attend_kernel long ahead"
# Those of which a spill or a jump would hurt most: of bf16, an odd group, fp8.
SUBSET = {
    ("8b", "attend_kernel long", 90),
    ("8b", AHEAD, 90),
    ("8b", "decode_kernel", 90),
    ("8b", "combine_kernel", 90),
    ("8b", "rope_write_kv_kernel fused", 90),
    ("8b", "rms_norm_kernel fused", 90),
    ("8b", "bound_kernel", 90),
    ("8b", "draw_kernel", 90),
    *(("8b", name, 90) for name in ROW_KERNELS),
    ("group 7", "decode_kernel", 80),
    ("head 64", "decode_kernel", 100),
    ("8b fp8", "decode_kernel", 90),
    ("8b fp8", "rope_write_kv_kernel fused", 90),
}
# The same compiler is deterministic; a small edit moves a few registers, a bad one many.
GROWTH_MAX = 1.10
# Instructions of the loops over positions that Triton must have found for them.
PTX_OF = {
    ("8b", "attend_kernel long", 90),
    ("8b", AHEAD, 90),
    ("8b", "decode_kernel", 90),
    ("8b fp8", "decode_kernel", 90),
    ("8b fp32", "decode_kernel", 90),
}
# With programmatic launch, which the table has not.
PLAIN = "rms_norm_kernel fused"
EARLY = ("8b", f"{PLAIN} early", 90)
_SCRIPT = """
import json, sys
from dataclasses import asdict, replace
from benchmarks.kernels import aot
from kernels import variants
wanted = {tuple(key) for key in json.loads(sys.argv[1])}
for shape in aot.SHAPES:
    for arch in {arch for name, _, arch in wanted if name == shape.name}:
        for one in {one.name: one for one in aot.specialisations(shape, arch)}.values():
            if (one.shape, one.name, arch) in wanted:
                made = aot.binary_of(one, arch).asm
                waits = aot.waits_for_products(made["cubin"]) if "long" in one.name else 0
                found = {"of": asdict(aot.compile_for(one, arch)), "ptx": made["ptx"]}
                print(json.dumps({**found, "waits": waits}))
with variants.forced("programmatic-launch", True):
    early = {one.name: one for one in aot.specialisations(aot.SHAPES[0], 90)}[sys.argv[2]]
assert early.arguments["launch_pdl"]
early = replace(early, variant=early.variant + " early")
ptx = aot.binary_of(early, 90).asm["ptx"]
print(json.dumps({"of": asdict(aot.compile_for(early, 90)), "ptx": ptx, "waits": 0}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of a process that has Triton without a GPU or its interpreter."""

    def compile_all(folder: Path) -> None:
        environment = {
            **os.environ,
            "KAITEN_TRITON": "1",
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(folder / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, json.dumps(sorted(SUBSET | PTX_OF)), PLAIN],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        (folder / "said").write_text(done.stdout)

    text = (made_once(tmp_path_factory, "aot", compile_all) / "said").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def compiled(said: list[dict[str, Any]]) -> dict[Any, tuple[aot.Resources, str]]:
    """Resources and PTX by key."""
    made = [(aot.Resources(**line["of"]), line["ptx"]) for line in said]
    return {resources.key: (resources, ptx) for resources, ptx in made}


@pytest.fixture(scope="module")
def waits(said: list[dict[str, Any]]) -> dict[str, int]:
    """For products, of the kernels of long rows, as assembled."""
    return {line["of"]["kernel"]: line["waits"] for line in said}


def test_nothing_spills_and_nothing_grows(
    compiled: dict[Any, tuple[aot.Resources, str]],
) -> None:
    table = aot.read_table()
    assert compiled.keys() == SUBSET | PTX_OF | {EARLY}
    for row in (row for key, (row, _) in compiled.items() if key != EARLY):
        known = table[row.key]
        remedy = f"{row.key}: if it must be, rewrite the table (python -m {aot.__name__})"
        assert row.spill_bytes == 0, remedy
        assert row.registers <= known.registers * GROWTH_MAX, remedy
        assert row.shared_bytes <= known.shared_bytes * GROWTH_MAX, remedy
        assert row.warps == known.warps, remedy


def test_attention_reads_ahead_in_whole_words_and_multiplies_as_it_should(
    compiled: dict[Any, tuple[aot.Resources, str]],
) -> None:
    ptx = {
        (shape, name): compiled[shape, name, arch][1]
        for shape, name, arch in PTX_OF
        if shape != "8b fp8"
    }
    for key, text in ptx.items():
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", text)
        # 16 bytes of keys and values each; 4 of block tables.
        assert copies.count("0x10") >= 16, key
        assert set(copies) == {"0x10", "0x4"}, key
        # Float32 says what float32 says.
        assert "tf32" not in text, key
    for name in ("attend_kernel long", AHEAD):
        assert "wgmma.mma_async" in ptx["8b", name]
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx["8b", "decode_kernel"]
    assert not re.search(r"\bw?g?mma\.", ptx["8b fp32", "decode_kernel"])


def products_beside_exponentials(ptx: str) -> list[int]:
    """Groups of matrix instructions on their way, at each instruction of a softmax."""
    on_their_way, found = 0, []
    for line in ptx.splitlines():
        if "wgmma.commit_group" in line:
            on_their_way += 1
        elif waited := re.search(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", line):
            on_their_way = min(on_their_way, int(waited[1]))
        elif "ex2.approx" in line:
            found.append(on_their_way)
    return found


def test_ahead_products_are_on_their_way_beside_the_softmax(
    compiled: dict[Any, tuple[aot.Resources, str]],
) -> None:
    """And tiles of keys and values beside both, at either wait of the loops."""
    plain, ahead = (compiled["8b", f"attend_kernel long{of}", 90][1] for of in ("", " ahead"))
    assert set(products_beside_exponentials(plain)) == {0}
    # Those of a tile of 128 queries and 64 positions, 32 a thread and two that shrink, in both
    # loops: the values of the tile before in two groups, after its scores.
    assert products_beside_exponentials(ahead).count(2) == 2 * (32 + 2)
    for text in (plain, ahead):
        waits = re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", text)
        assert max(map(int, waits)) >= 2


def test_the_assembler_adds_no_waits_for_products(
    compiled: dict[Any, tuple[aot.Resources, str]], waits: dict[str, int]
) -> None:
    """What the PTX says of them holds only then."""
    for name in ("attend_kernel long", AHEAD):
        _, ptx = compiled["8b", name, 90]
        assert 0 < waits[name] <= ptx.count("wgmma.wait_group"), name


def test_who_begins_early_waits_for_what_it_reads(
    compiled: dict[Any, tuple[aot.Resources, str]],
) -> None:
    _, plain = compiled["8b", PLAIN, 90]
    _, early = compiled[EARLY]
    assert "griddepcontrol" not in plain
    wait, first = early.index("griddepcontrol.wait"), early.index("ld.global")
    assert wait < first
    assert wait < early.index("griddepcontrol.launch_dependents")


def test_noise_is_no_approximation(compiled: dict[Any, tuple[aot.Resources, str]]) -> None:
    """A logarithm of the processor's own would draw other tokens than any other device."""
    _, ptx = compiled["8b", "draw_kernel", 90]
    assert "fma.rn.f32" in ptx
    assert "lg2.approx" not in ptx


def test_codes_are_read_and_turned_as_wide_as_numbers(
    compiled: dict[Any, tuple[aot.Resources, str]],
) -> None:
    """None alone, from memory or on its way to the matrix units."""
    _, ptx = compiled["8b fp8", "decode_kernel", 90]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", ptx)
    assert set(copies) <= {"0x10", "0x4"}
    assert ptx.count("ldmatrix.sync.aligned") >= 16
    # Once, of the code of the row's own key: a byte of each of 16 queries' lines.
    assert len(re.findall(r"ld\.shared\.[usb]8", ptx)) <= 16


def test_the_table_is_whole() -> None:
    """Every kernel, shape and processor is in it, and none of them spills."""
    table = aot.read_table()
    masked = {
        (shape.name, f"{kernel}{end}")
        for shape in aot.SHAPES
        for end in ends_of(shape)[1:]
        for kernel in ("attend_kernel", "attend_kernel long", *decode_kernels(end))
    }
    ahead = {key for key in table if "ahead" in key[1]}
    kernels = {kernel for _, kernel, _ in table} - {kernel for _, kernel in masked}
    kernels -= {kernel for _, kernel, _ in ahead}
    assert len(kernels) >= 31
    each = {(shape.name, kernel) for shape in aot.SHAPES for kernel in kernels} | masked
    assert set(table) - ahead == {(*of, arch) for of in each for arch in aot.ARCHITECTURES}
    # Of 16-bit pages, where tiles are wide.
    assert {(arch, kernel.removesuffix(" softcap")) for _, kernel, arch in ahead} == {(90, AHEAD)}
    assert len({shape for shape, _, _ in ahead}) == 8
    assert not [key for key, row in table.items() if row.spill_bytes]
    assert all(row.registers <= 255 for row in table.values())
    assert all(row.shared_bytes <= aot.SHARED_BYTES[row.arch] for row in table.values())


def decode_kernels(end: str) -> list[str]:
    """Of a kind of layer; no model norms heads and caps scores."""
    return ["decode_kernel", *["decode_kernel normed"] * ("softcap" not in end)]


def ends_of(shape: aot.Shape) -> list[str]:
    """What the names of attention's kernels end in, of layers of each kind."""
    masks = [(None, None), *shape.masks]
    return [aot.mask_words(window is not None, cap is not None) for window, cap in masks]


# Of a processor, all of them.
REGISTERS = 1 << 16


@pytest.mark.parametrize(
    ("shape", "arch"),
    [*((shape.name, 90) for shape in aot.SHAPES), ("0.6b", 100), ("head 96", 100)],
)
def test_as_many_programs_fit_as_are_launched(
    shape: str, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has to wait for another to end would run alone at the end."""
    monkeypatch.setattr(jit, "arch_elsewhere", arch)
    model = next(each for each in aot.SHAPES if each.name == shape)
    group, head_dim = model.heads // model.kv_heads, model.head_dim
    q = torch.empty(1, model.heads, head_dim, dtype=model.dtype, device="meta")
    tiles, table = tiles_for(group, model.dtype, head_dim, q.device), aot.read_table()
    tilings: dict[str, Tiling] = {}
    for end in ends_of(model):
        kind = {"is_fp8": model.is_kv_fp8, "has_window": "window" in end}
        for tile, is_long in zip(tiles, (False, True), strict=True):
            tilings[f"attend_kernel{' long' * is_long}{end}"] = tiling_for(
                q, group, tile, model.block_size, is_long=is_long, **kind
            )
        for name in decode_kernels(end):
            is_dear = "normed" in name or "softcap" in end
            tilings[f"{name}{end}"] = decode_tiling(
                q, group, model.block_size, is_dear=is_dear, **kind
            )
    for name, tiling in tilings.items():
        row = table[shape, name, arch]
        assert row.warps == tiling.warps
        assert 32 * row.warps * row.registers * tiling.programs <= REGISTERS, row
        assert row.shared_bytes * tiling.programs <= aot.SHARED_BYTES[arch], row


def test_the_table_names_its_compiler() -> None:
    assert json.loads(aot.TABLE.read_text())["triton"] == "3.7.1"
