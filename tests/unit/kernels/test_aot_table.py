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
from kernels.attention_plan import tiles_for
from kernels.attention_triton import _tiling

pytest.importorskip("triton", reason="no triton here")

ROOT = Path(__file__).parents[3]
ROW_KERNELS = ("step_rows_kernel", "take_tokens_kernel")
# Those of which a spill or a jump would hurt most: of bf16, an odd group, fp8.
SUBSET = {
    ("8b", "attend_kernel", 90),
    ("8b", "attend_kernel long", 90),
    ("8b", "combine_kernel", 90),
    ("8b", "rope_write_kv_kernel fused", 90),
    ("8b", "rms_norm_kernel fused", 90),
    ("8b", "bound_kernel", 90),
    ("8b", "draw_kernel", 90),
    *(("8b", name, arch) for name in ROW_KERNELS for arch in aot.ARCHITECTURES),
    ("group 7", "attend_kernel long", 80),
    ("head 64", "attend_kernel", 100),
    ("8b fp8", "attend_kernel", 90),
    ("8b fp8", "attend_kernel long", 80),
    ("8b fp8", "rope_write_kv_kernel fused", 90),
}
# The same compiler is deterministic; a small edit moves a few registers, a bad one many.
GROWTH_MAX = 1.10
_SCRIPT = """
import json, sys
from dataclasses import asdict
from benchmarks.kernels import aot
wanted = {tuple(key) for key in json.loads(sys.argv[1])}
for shape in aot.SHAPES:
    for arch in aot.ARCHITECTURES:
        for one in {one.name: one for one in aot.specialisations(shape, arch)}.values():
            if (one.shape, one.name, arch) in wanted:
                print(json.dumps(asdict(aot.compile_for(one, arch))))
"""


# Instructions of the loops over positions that Triton must have found for them.
_PTX_OF = {("8b", "attend_kernel"), ("8b", "attend_kernel long"), ("8b fp32", "attend_kernel")}
_PTX_SCRIPT = """
import json, sys
from benchmarks.kernels import aot
wanted = {tuple(key) for key in json.loads(sys.argv[1])}
for shape in aot.SHAPES:
    for one in aot.specialisations(shape, 90):
        if (one.shape, one.name) in wanted:
            print(json.dumps([one.shape, one.name, aot.binary_of(one, 90).asm["ptx"]]))
"""


def said(script: str, wanted: set[Any], folder: Path) -> list[Any]:
    """The JSON lines of a process that has Triton without a GPU or its interpreter."""
    environment = {
        **os.environ,
        "KAITEN_TRITON": "1",
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(sorted(wanted))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_nothing_spills_and_nothing_grows(tmp_path: Path) -> None:
    table = aot.read_table()
    rows = [aot.Resources(**row) for row in said(_SCRIPT, SUBSET, tmp_path)]
    assert {row.key for row in rows} == SUBSET
    for row in rows:
        known = table[row.key]
        remedy = f"{row.key}: if it must be, rewrite the table (python -m {aot.__name__})"
        assert row.spill_bytes == 0, remedy
        assert row.registers <= known.registers * GROWTH_MAX, remedy
        assert row.shared_bytes <= known.shared_bytes * GROWTH_MAX, remedy
        assert row.warps == known.warps, remedy


def test_attention_reads_ahead_in_whole_words_and_multiplies_as_it_should(tmp_path: Path) -> None:
    ptx = {(shape, name): text for shape, name, text in said(_PTX_SCRIPT, _PTX_OF, tmp_path)}
    assert set(ptx) == _PTX_OF
    for key, text in ptx.items():
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)", text)
        # 16 bytes of keys and values each; 4 of block tables.
        assert copies.count("0x10") >= 32, key
        assert set(copies) == {"0x10", "0x4"}, key
        # Float32 says what float32 says.
        assert "tf32" not in text, key
    assert "wgmma.mma_async" in ptx["8b", "attend_kernel long"]
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx["8b", "attend_kernel"]
    assert not re.search(r"\bw?g?mma\.", ptx["8b fp32", "attend_kernel"])


def test_the_table_is_whole() -> None:
    """Every kernel, shape and processor is in it, and none of them spills."""
    table = aot.read_table()
    kernels = {kernel for _, kernel, _ in table}
    assert len(kernels) >= 27
    shapes = {shape.name for shape in aot.SHAPES}
    assert set(table) == {(s, k, a) for s in shapes for k in kernels for a in aot.ARCHITECTURES}
    assert not [key for key, row in table.items() if row.spill_bytes]
    assert all(row.registers <= 255 for row in table.values())
    assert all(row.shared_bytes <= aot.SHARED_BYTES[row.arch] for row in table.values())


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
    tiles = tiles_for(group, model.dtype, head_dim, q.device)
    for tile, is_long in zip(tiles, (False, True), strict=True):
        tiling = _tiling(q, group, tile, model.block_size, is_long=is_long, is_fp8=model.is_kv_fp8)
        row = aot.read_table()[shape, "attend_kernel long" if is_long else "attend_kernel", arch]
        assert row.warps == tiling.warps
        assert 32 * row.warps * row.registers * tiling.programs <= REGISTERS, row
        assert row.shared_bytes * tiling.programs <= aot.SHARED_BYTES[arch], row


def test_the_table_names_its_compiler() -> None:
    assert json.loads(aot.TABLE.read_text())["triton"] == "3.7.1"
