"""A matrix library multiplies one number of rows only, so that a row's bits are its own.

Libraries choose how to sum by the number of rows and the processor: one processor sums 1, 2, 3, 5,
6, 7 and 9 rows otherwise than more, another almost any two numbers. So a call is always of ROWS
rows, the last ones zeros. That a row's place among them decides nothing is the library's part, and
the unit tests of `linear` look.

cost     few rows cost about what ROWS cost, which wait for the weight as one row does. Of many,
         GF/s at ROWS a call / all 512 in one (2026-11-22, Xeon with AMX, 1 thread, 768 -> 3072):
         oneDNN float32 117/154, bfloat16 316/660; F.linear float32 73/171, bfloat16 204/1167
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

ROWS: Final = 16


def by_fixed_rows(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """multiply(x) of x [rows, in_features], rows at least 1, as calls of ROWS rows each."""
    rows = x.size(0)
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % ROWS))
    parts = [multiply(part) for part in torch.split(padded, ROWS)]
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[:rows]
