"""The compiled CPU path: C++ in kernels/cpp, prebuilt or compiled once per machine.

Nothing happens at import. A worker calls `build()` once at its start; until then, and where that
fails, launchers take their torch path and `reason()` says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kernels import probe
from kernels.cpp import build as binaries
from kernels.cpp.library import Library

# Relative: of bf16 one rounding of a result.
_CHECKED: Final = ((torch.float32, 1e-5), (torch.bfloat16, 2**-7))
_THE_BEST: Final = "the best that this processor has"


@dataclass(slots=True)
class _State:
    library: Library | None = None
    reason: str = "not built: native.build() has not been called"
    why: str = ""


_state = _State()


def available() -> bool:
    """Whether the launchers take the compiled path on CPU."""
    return _state.library is not None


def reason() -> str:
    """One line for people: which instructions the compiled path uses, or why there is none."""
    return _state.reason


def explanation() -> str:
    """One line for people: why these instructions, and what they take here. Empty without any."""
    library = _state.library
    return "" if library is None else f"{_state.why}; {probe.told(library)}"


def promise() -> str:
    """One line for people: whether a text that is computed again, after a death, is the same."""
    if available():
        return "a text computed again, by workers of these kernels, is the same to the bit"
    return (
        "not promised: that a text computed again, after a death or preemption, is the same; in"
        " bf16 no bit was ever seen to differ, in fp32 last bits do, and may turn what is nearly a"
        " tie. The compiled kernels promise both"
    )


def disable(why: str) -> None:
    """Take the torch path from now on; `build()` may be called again later."""
    _state.library, _state.reason, _state.why = None, why, ""


def build(cache_dir: Path | None = None, *, variant: str | None = None) -> bool:
    """Load the compiled path, compiling it first if nobody has yet (about ten seconds).

    Processes that start together wait for one build. `variant` names one of those that the
    processor has (cpp/build.py), None: the best, or what is loaded. Where nobody has measured which
    is the best, it is timed. False, with `reason()`, when none can be had.
    """
    library = _state.library
    if library is not None and variant in (None, library.instructions()):
        return True
    try:
        found = _found(variant, cache_dir)
    except (OSError, RuntimeError, ValueError) as error:
        disable(f"torch path: {_first_line(error)}")
        return False
    _state.library, _state.why = found.library, found.why
    _state.reason = f"{found.origin} for {found.library.instructions()}"
    return True


@dataclass(frozen=True, slots=True)
class _Found:
    library: Library
    origin: str  # prebuilt, or compiled here
    why: str


def _found(name: str | None, cache_dir: Path | None) -> _Found:
    if name is None:
        return _best(binaries.rivals(), cache_dir)
    library, origin = _tried(binaries.variant_named(name), cache_dir)
    return _Found(library, origin, "asked for")


def _best(rivals: Sequence[binaries.Variant], cache_dir: Path | None) -> _Found:
    """Of several that may be the best the one that is faster here; one that fails is no rival."""
    found, problems = {}, []
    for variant in rivals:
        try:
            found[variant.name] = _tried(variant, cache_dir)
        except (OSError, RuntimeError) as error:
            problems.append(error)
    if not found:
        raise problems[0]
    if len(rivals) == 1:
        why = "no AVX2, so torch multiplies" if rivals[0].name == "generic" else _THE_BEST
        return _Found(*found[rivals[0].name], why)
    times_s = {
        name: probe.linear_s(library, torch.bfloat16) for name, (library, _) in found.items()
    }
    return _Found(*found[probe.chosen(times_s)], probe.compared(times_s))


def library_for(x: Tensor) -> Library | None:
    """The compiled kernels when `x` is theirs to compute, else None."""
    return _state.library if x.is_cpu else None


def path_for(x: Tensor) -> str:
    """The key into a launcher's table of paths."""
    return "torch" if library_for(x) is None else "native"


def compiled() -> Library:
    """The compiled kernels; only after `path_for` said "native"."""
    assert _state.library is not None, "native path chosen while it is not available"
    return _state.library


def _tried(variant: binaries.Variant, cache_dir: Path | None) -> tuple[Library, str]:
    library, origin = _load(variant, cache_dir)
    _check(library)
    return library, origin


def _load(variant: binaries.Variant, cache_dir: Path | None) -> tuple[Library, str]:
    """The library, and whether it is prebuilt or compiled here."""
    if not (prebuilt := binaries.prebuilt(variant)).exists():
        return _compiled(variant, cache_dir), "compiled"
    try:
        return Library(prebuilt), "prebuilt"
    except OSError as unfit:
        # Made for a newer C library, it may be.
        try:
            return _compiled(variant, cache_dir), "compiled"
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}, and the prebuilt library does not load: {unfit}"
            ) from unfit


def _compiled(variant: binaries.Variant, cache_dir: Path | None) -> Library:
    """A kept one that does not load is made anew: a disk cut it short, or the folder is shared with
    a machine of another C library.
    """
    path = binaries.compiled(variant, cache_dir)
    try:
        return Library(path)
    except OSError:
        path.unlink(missing_ok=True)
        return Library(binaries.compiled(variant, cache_dir))


def _check(library: Library) -> None:
    """A binary that loads may still be wrong for this machine: let it compute something known, in
    both dtypes, as each may take instructions of its own.
    """
    for dtype, tolerance in _CHECKED:
        ones = torch.ones(3, 40, dtype=dtype)
        computed = [(library.rms_norm(ones, ones[0], 0.0), ones), (_attended(library, ones), ones)]
        if library.has_linear(ones):
            ramp = torch.linspace(-1, 1, 120).view(3, 40).to(dtype)
            packed = torch.empty(library.packed_shape(ramp), dtype=dtype)
            library.pack_linear(ramp, packed)
            known = ramp.float() @ ramp.float().T
            computed.append((library.linear(ramp, packed, None, 3), known))
        for found, expected in computed:
            if not torch.allclose(found.flatten().float(), expected.flatten().float(), tolerance):
                raise RuntimeError("the compiled kernels gave a wrong result")


def _attended(library: Library, ones: Tensor) -> Tensor:
    """Three tokens of one head over themselves, in a pool of one block."""
    pages, rows = ones.view(1, 1, 3, 40), torch.tensor([0, 3], dtype=torch.int32)
    return library.paged_attention(
        ones.view(3, 1, 40), pages, pages, rows[:1].view(1, 1), rows, rows[1:], 1.0, 0, 0.0
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
