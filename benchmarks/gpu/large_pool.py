"""Kernels over a pool of more than 2^31 elements: bit for bit what they say over a small one.

Rows have every second block beyond 2^31 elements, where a place reckoned in 32 bits is another's or
nobody's: then this differs, or the GPU refuses the access and the part fails with its words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from gpu_worker.container import free_memory_bytes
from gpu_worker.runner.block_copies import BlockCopies
from kernels.attention.decode_attention import decode_attention
from kernels.attention.paged_attention import paged_attention
from kernels.attention.plan import plan_attention
from kernels.kv import fp8
from kernels.kv.rope_write_kv import rope_write_kv
from kernels.kv.write_kv import write_kv
from kernels.norms_rope.rope import rope_table

BLOCK_SIZE: Final = 16
# Beside the pool, for whatever else is on the device.
_SPARE_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    contexts: tuple[int, ...]
    # Of a row, where there are several.
    queries: int

    @property
    def block(self) -> int:
        """Elements."""
        return self.kv_heads * BLOCK_SIZE * self.head_dim

    @property
    def blocks(self) -> int:
        return sum(-(-context // BLOCK_SIZE) for context in self.contexts)


FULL: Final = Sizes(heads=32, kv_heads=8, head_dim=128, contexts=(200, 1025, 600), queries=150)
TINY: Final = Sizes(heads=4, kv_heads=2, head_dim=16, contexts=(40, 70, 33), queries=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Where blocks lie: `place` of each of those that rows have."""

    pages: Tensor
    place: Tensor
    tables: Tensor
    scales: Tensor | None

    @property
    def k(self) -> Tensor:
        return self.pages[0, 0]

    @property
    def v(self) -> Tensor:
        return self.pages[0, 1]

    def content(self) -> Tensor:
        return fp8.as_bytes(self.pages)[:, :, self.place]


def beyond(dtype: torch.dtype) -> int:
    """Elements before those that 31 bits do not count, also if codes are counted in pairs."""
    return 3 << 31 if dtype == fp8.DTYPE else 1 << 31


def both_sides(bench: Bench) -> None:
    sizes, wrong = TINY if bench.is_tiny else FULL, []
    own = bench.dtype if bench.is_gpu else torch.float16
    for dtype in (own, fp8.DTYPE):
        first = beyond(dtype) // sizes.block + 1
        needed = 2 * (first + sizes.blocks) * sizes.block * dtype.itemsize
        free = _free_bytes(bench)
        if free < needed + _SPARE_BYTES:
            there = f"{free / 1e9:.1f} GB are free, {(needed + _SPARE_BYTES) / 1e9:.1f} are needed"
            bench.row("large pool", what="all", dtype=str(dtype), skipped=there)
            continue
        small, large = _pools(bench, sizes, dtype, first)
        step = _Step(bench, sizes, own, is_fp8=dtype == fp8.DTYPE)
        for name, run in step.runs().items():
            known, found = run(small), run(large)
            # Of codes as of numbers, NaN too.
            unlike = sum(
                int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
                for a, b in ((known, found), (small.content(), large.content()))
            )
            bench.row("large pool", what=name, dtype=str(dtype), unlike=unlike, ok=not unlike)
            wrong += [f"{name}, {dtype}: {unlike} bytes differ"] * bool(unlike)
        del small, large
        bench.free()
    assert not wrong, "; ".join(wrong)


def _free_bytes(bench: Bench) -> int:
    return torch.cuda.mem_get_info(bench.device)[0] if bench.is_gpu else free_memory_bytes()


def _pools(bench: Bench, sizes: Sizes, dtype: torch.dtype, first: int) -> tuple[Pool, Pool]:
    """The same rows in a small pool and in one whose every second block is beyond `first`."""
    count, device = sizes.blocks, bench.device
    tile = sizes.kv_heads, BLOCK_SIZE, sizes.head_dim
    content = torch.randn(1, 2, count, *tile, device=device).to(dtype)
    scales = torch.full((2, sizes.kv_heads), 0.5, device=device) if dtype == fp8.DTYPE else None
    order = torch.arange(count, device=device)
    pools = []
    for place in (order, torch.where(order % 2 == 1, order + first, order)):
        # Untouched, but for the blocks of rows.
        pages = torch.empty(1, 2, int(place.max()) + 1, *tile, dtype=dtype, device=device)
        fp8.as_bytes(pages)[:, :, place] = fp8.as_bytes(content)
        widths = [-(-context // BLOCK_SIZE) for context in sizes.contexts]
        rows = list(torch.split(place.int(), widths))
        tables = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        pools.append(Pool(pages=pages, place=place, tables=tables, scales=scales))
    return pools[0], pools[1]


class _Step:
    """A token of each row, or several, and what is done with them."""

    def __init__(self, bench: Bench, sizes: Sizes, dtype: torch.dtype, *, is_fp8: bool) -> None:
        self._sizes, self._is_fp8 = sizes, is_fp8
        device, rows = bench.device, len(sizes.contexts)
        self._contexts = torch.tensor(sizes.contexts, device=device)
        self._positions = self._contexts - 1
        every = sizes.heads + 2 * sizes.kv_heads
        self._qkv, self._queries = (
            torch.randn(tokens, heads, sizes.head_dim, device=device).to(dtype)
            for tokens, heads in ((rows, every), (rows * sizes.queries, sizes.heads))
        )
        half = sizes.head_dim // 2
        self._cos_sin = rope_table(max(sizes.contexts), torch.rand(half, device=device))
        self._scale = sizes.head_dim**-0.5

    def runs(self) -> dict[str, Callable[[Pool], Tensor]]:
        found: dict[str, Callable[[Pool], Tensor]] = {
            "write_kv": self._write,
            "rope_write_kv": self._rope_write,
            "decode_attention": self._decode,
            "paged_attention, short rows": lambda pool: self._attend(pool, 1),
            "paged_attention, long rows": lambda pool: self._attend(pool, self._sizes.queries),
        }
        # Last: nobody reads what it leaves.
        return {**found, "block copies": self._copy}

    def _heads(self) -> tuple[Tensor, ...]:
        sizes = self._sizes
        return torch.split(self._qkv.clone(), [sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)

    def _slots(self, pool: Pool) -> Tensor:
        blocks = pool.tables.gather(1, (self._positions // BLOCK_SIZE)[:, None])[:, 0].long()
        return blocks * BLOCK_SIZE + self._positions % BLOCK_SIZE

    def _write(self, pool: Pool) -> Tensor:
        _, k, v = self._heads()
        write_kv(k, v, pool.k, pool.v, self._slots(pool), pool.scales)
        return k

    def _rope_write(self, pool: Pool) -> Tensor:
        q, k, v = self._heads()
        return rope_write_kv(
            q, k, v, self._positions, self._cos_sin, pool.k, pool.v, self._slots(pool),
            scales=pool.scales,
        )  # fmt: skip

    def _starts(self, count: int) -> Tensor:
        rows = len(self._sizes.contexts)
        return torch.arange(rows + 1, device=self._contexts.device).int() * count

    def _decode(self, pool: Pool) -> Tensor:
        sizes, (q, k, v) = self._sizes, self._heads()
        starts, contexts = self._starts(1), self._contexts.int()
        plan = plan_attention(
            starts, contexts, tokens=len(q), group=sizes.heads // sizes.kv_heads, dtype=q.dtype,
            queries_max=1, context_max=max(sizes.contexts),
        )  # fmt: skip
        return decode_attention(
            q, k, v, self._positions, self._cos_sin, pool.k, pool.v, self._slots(pool),
            pool.tables, starts, contexts, self._scale, plan=plan, scales=pool.scales,
        )  # fmt: skip

    def _attend(self, pool: Pool, count: int) -> Tensor:
        q = self._queries[: count * len(self._sizes.contexts)]
        return paged_attention(
            q, pool.k, pool.v, pool.tables, self._starts(count), self._contexts.int(),
            self._scale, scales=pool.scales,
        )  # fmt: skip

    def _copy(self, pool: Pool) -> Tensor:
        """The first blocks of either side to the last ones, in which sides alternate."""
        sources, targets = pool.place[:4], pool.place[-4:].flip(0)
        BlockCopies(fp8.as_bytes(pool.pages)).copy(sources, targets)
        return pool.k[:1]
