"""The interpreter's products, summed in one order wherever in its tile a row lies.

Triton's interpreter multiplies tiles with numpy's BLAS, and on some processors that sums a row in
another order by its place in the tile. A tensor core does not, and bits are compared here.
"""

import numpy as np
import numpy.typing as npt
import triton.runtime.interpreter as interpreter

from tests.support import quick_interpreter


def _matmul(
    a: npt.NDArray[np.generic], b: npt.NDArray[np.generic], *, dtype: npt.DTypeLike
) -> npt.NDArray[np.generic]:
    # Converted before: within einsum that is done in buffers, which cut rows at odd places.
    product: npt.NDArray[np.generic] = np.einsum(
        "...mk,...kn->...mn", a.astype(dtype), b.astype(dtype), optimize=False
    )
    return product


interpreter.np.matmul = _matmul
quick_interpreter.install()
