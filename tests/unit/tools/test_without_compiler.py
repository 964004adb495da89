"""The stand-in for torch's compiler is enough for what transformers imports where it is there."""

from tests.support import warm_python

# As torchvision and accelerate, which no test needs, and as transformers itself.
CODE = """
from tests.support import without_compiler
without_compiler.install()
import torch
from torch._dynamo.utils import is_compile_supported
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert not isinstance(torch.nn.Identity(), torch._dynamo.eval_frame.OptimizedModule)
assert not torch._dynamo.is_compiling()
marked = torch._dynamo.disable(recursive=False)(print)
assert marked is print is torch._dynamo.disable(print)
"""


def test_classes_and_marks_of_the_compiler_are_there() -> None:
    done = warm_python.run("-c", CODE, imports=warm_python.TORCH)
    assert done.code == 0, done.err
