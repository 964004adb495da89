"""Triton's interpreter without the half of its work that nobody sees. It computes the same bits.

    quick_interpreter.install()        in a process that interprets, before the first launch

* The functions of `triton.language` are exchanged for interpreted ones once, not at each call of
  each device function, and stay so: such a process compiles nothing.
* Integers are not watched for overflow: what is found that way reaches nobody unless `debug` is on.
* The numpy type of a Triton type is looked up, not found anew; so are the shape of a tensor, and
  the shape and the name of its type.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as interpreter


def install() -> None:
    everywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(everywhere)
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    assert not options.debug
    interpreter.interpreter_builder.options = options
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    tl.block_type.__init__ = _type_by_shape(tl.block_type.__init__)
    tl.tensor.__init__ = _tensor_by_shape(tl.tensor.__init__)


def _by_scalar(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A block's is that of its elements; pointers cannot be hashed, but are named."""
    found: dict[str, Any] = {}

    def look_up(of: Any) -> Any:
        scalar = of.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return look_up


def _type_by_shape(make: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    made: dict[tuple[object, ...], tuple[Any, ...]] = {}

    def init(block: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *map(tl.core._unwrap_if_constexpr, shape))
        if key not in made:
            make(block, element_ty, shape)
            made[key] = block.shape, block.numel, block.name
        block.element_ty = element_ty
        block.shape, block.numel, block.name = made[key]

    return init


def _tensor_by_shape(make: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    made: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(tensor: Any, handle: Any, of: Any) -> None:
        key = tuple(of.shape.values) if of.is_block() else ()
        if key not in made:
            make(tensor, handle, of)
            made[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, of, of.scalar
        tensor.shape, tensor.numel = made[key]

    return init
