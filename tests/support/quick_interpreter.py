"""Triton's interpreter without the half of its work that nobody sees. It computes the same bits.

    quick_interpreter.install()        in a process that interprets, before the first launch

* The functions of `triton.language` are exchanged for interpreted ones once, not at each call of
  each device function, and stay so: such a process compiles nothing.
* Integers are not watched for overflow: what is found that way reaches nobody unless `debug` is on.
* The numpy type of a Triton type is looked up, not found anew; so are the shape of a tensor, the
  shape and the name of its type, and what becomes of two types in one operation.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_Pair: TypeAlias = tuple[Any, Any]


def install() -> None:
    interpreter._patch_attr = _hand_over
    everywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(everywhere)
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    assert not options.debug
    interpreter.interpreter_builder.options = options
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    tl.block_type.__init__ = _type_by_shape(tl.block_type.__init__)
    tl.tensor.__init__ = _tensor_by_shape(tl.tensor.__init__)
    tl.core._unwrap_if_constexpr = _plain_first(tl.core._unwrap_if_constexpr)
    semantic = interpreter.interpreter_semantic
    semantic.broadcast_impl_value = _by_types(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _checked_once(
        semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    )


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


def _hand_over(of: Any, name: str, member: Any, _builder: object, scope: Any) -> None:
    """A function of Triton's, as the interpreter calls it: who calls is not asked again."""
    inner = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def call(*values: object, _semantic: object = None, **named: object) -> object:
        return inner(*values, _semantic=semantic, **named)

    scope.set_attr(of, name, call)


def _plain_first(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {int, float, bool, str, type(None), tl.tensor, tl.dtype}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.constexpr else unwrap(value)

    return unwrapped


def _checked_once(
    check: Callable[..., _Pair], broadcast: Callable[[Any, Any], _Pair]
) -> Callable[..., _Pair]:
    """Types that need no cast are so again; a number beside a type is the same tensor again."""
    uncast: set[tuple[object, ...]] = set()
    numbers: dict[tuple[object, ...], Any] = {}

    def of_tensors(lhs: Any, rhs: Any, flags: tuple[bool, ...]) -> _Pair:
        key = (lhs.type.name, rhs.type.name, flags)
        if key in uncast:
            return broadcast(lhs, rhs)
        found = check(lhs, rhs, *flags)
        if (found[0].dtype, found[1].dtype) == (lhs.dtype, rhs.dtype):
            uncast.add(key)
        return found

    def checked(lhs: Any, rhs: Any, *flags: bool) -> _Pair:
        at = 1 if isinstance(lhs, tl.tensor) else 0
        tensor, number = (lhs, rhs) if at else (rhs, lhs)
        if isinstance(number, tl.tensor):
            return of_tensors(lhs, rhs, flags)
        if not isinstance(tensor, tl.tensor):
            return check(lhs, rhs, *flags)
        key = (at, tensor.type.name, type(number), number, flags)
        if key in numbers:
            return (lhs, numbers[key]) if at else (numbers[key], rhs)
        found = check(lhs, rhs, *flags)
        if found[1 - at] is tensor:
            found[at].handle.data.flags.writeable = False
            numbers[key] = found[at]
        return found

    return checked


def _by_types(find: Callable[[Any, Any], _Pair]) -> Callable[[Any, Any], _Pair]:
    """What the types of two operands become when they get one shape; None: what they are."""
    found: dict[tuple[str, str], _Pair] = {}

    def broadcast(lhs: Any, rhs: Any) -> _Pair:
        key = (lhs.type.name, rhs.type.name)
        if key not in found:
            left, right = find(lhs, rhs)
            found[key] = (
                None if left is lhs else left.type,
                None if right is rhs else right.type,
            )
            return left, right
        to_left, to_right = found[key]
        return (
            lhs if to_left is None else _spread(lhs, to_left),
            rhs if to_right is None else _spread(rhs, to_right),
        )

    return broadcast


def _spread(tensor: Any, to: Any) -> Any:
    # What comes of a comparison has the handle of what was compared: it says how wide data may be.
    data, held_as = tensor.handle.data, tensor.handle.dtype
    if tensor.type.is_block():
        data = np.broadcast_to(data, to.shape.values)
    else:
        data = np.full(to.shape.values, data, dtype=interpreter._get_np_dtype(held_as))
    return tl.tensor(interpreter.TensorHandle(data, held_as.scalar), to)
