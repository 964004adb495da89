"""Room for the parts of a step's attention: partial results of tiles with several splits (`plan`).

One serves all layers of a step, and every later step. Short rows and long ones are computed beside
each other (`triton_launch`), so each have their own; where they take turns, both have the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import jit, variants
from kernels.checks import refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSize:
    """What a step keeps of tiles with several splits."""

    # Of short rows and of long ones: (split, query token, head); 0 if none can have several splits.
    short: int
    long: int
    head_dim: int
    # (row, KV head), of which programs count how many of its parts are there.
    counters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Room of the short rows of a step, or of the long ones."""

    sums: Tensor
    tops: Tensor
    totals: Tensor

    @classmethod
    def of(cls, parts: int, head_dim: int, device: torch.device) -> Kept:
        # Each begins at a multiple of 16 bytes, or a kernel would be compiled anew.
        kept = -(-parts // 4) * 4
        tops, totals = torch.empty((2, kept), dtype=torch.float32, device=device)
        sums = torch.empty((kept, dim_tile(head_dim)), dtype=torch.float32, device=device)
        return cls(sums=sums, tops=tops, totals=totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    short: Kept
    long: Kept
    # int32, zeros between launches (`decode_kernel`).
    arrived: Tensor

    @classmethod
    def of(cls, size: PartsSize, device: torch.device) -> Parts:
        arrived = torch.zeros(max(1, size.counters), dtype=torch.int32, device=device)
        if not variants.is_on("chunks-beside-decodes"):
            kept = Kept.of(max(size.short, size.long), size.head_dim, device)
            return cls(short=kept, long=kept, arrived=arrived)
        short, long = (Kept.of(each, size.head_dim, device) for each in (size.short, size.long))
        return cls(short=short, long=long, arrived=arrived)

    @property
    def are_apart(self) -> bool:
        """Whether those of short rows and of long ones can be there at the same time."""
        return self.short is not self.long

    def require_room(self, size: PartsSize) -> None:
        """ValueError unless a step of this size fits."""
        for kept, parts in ((self.short, size.short), (self.long, size.long)):
            room, width = kept.sums.shape
            if room < parts:
                refuse("parts", f"must hold {parts} parts")
            if width != dim_tile(size.head_dim):
                refuse("parts", f"must be for heads of {dim_tile(size.head_dim)}")
        if len(self.arrived) < size.counters:
            refuse("parts", f"must count those of {size.counters} rows and KV heads")


def dim_tile(head_dim: int) -> int:
    """Columns of a tile: the least of which a tensor core takes one half, or all of a head's."""
    return max(32, jit.power_of_two(head_dim))
