"""Triton's interpreter without the half of its work that nobody sees. It computes the same bits.

    quick_interpreter.install()        in a process that interprets, before the first launch

* The functions of `triton.language` are exchanged for interpreted ones once, not at each call of
  each device function, and stay so: such a process compiles nothing.
* Integers are not watched for overflow: what is found that way reaches nobody unless `debug` is on.
* The numpy type of a Triton type is looked up, not found anew.
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


def _by_scalar(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A block's is that of its elements; pointers cannot be hashed, but are named."""
    found: dict[str, Any] = {}

    def look_up(of: Any) -> Any:
        scalar = of.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return look_up
