"""Steps through the kernels as they are compiled, beside their references: a process of its own
(`test_aot_table`) asks, in which Triton does not interpret.
"""

import pytest
import torch

from kernels import dispatch
from kernels.attention import decode_attention as decode_module
from kernels.attention import plan as attention_plan
from kernels.attention import triton_launch
from kernels.attention.paged_attention import paged_attention
from tests.support import as_compiled
from tests.unit.kernels.interpreted.interpreted_decode import SPLIT, step_of
from tests.unit.kernels.paged_cases import excess_over, paged_case

# More rows than programs, one that has ended, and contexts of several splits.
DECODED = [1, 0, SPLIT + 1, 3 * SPLIT + 20]
COUNTS, CONTEXTS = [1, 20, 0, 3, 1], [SPLIT + 1, 40, 0, 9, 5]


def excesses() -> dict[str, float]:
    """Of each kernel of attention, how far it is from what it should say: 1 is the most."""
    generator = torch.Generator().manual_seed(78)
    with pytest.MonkeyPatch.context() as patch, as_compiled.launches(), dispatch.forced("triton"):
        for module in (attention_plan, triton_launch, decode_module):
            patch.setattr(module, "SPLIT", SPLIT)
        mixed = paged_case(generator, counts=COUNTS, contexts=CONTEXTS)
        step = step_of(generator, DECODED, heads=4, kv_heads=2, head_dim=32)
        told = {"mixed": excess_over(mixed, paged_attention(*mixed.arguments()))}
        fused, parts = step.fused(step.plan()), step.apart()
        with dispatch.forced("torch"):
            known = step.reference()
        for name, found in (("decode", fused), ("decode in parts", parts)):
            pairs = zip(found, known, strict=True)
            told[name] = max(float(((a - b).nan_to_num().abs() / 2e-5).max()) for a, b in pairs)
    return told
