"""What two ways that were timed in turns say of each other, and what follows for a default.

A way is faster where its worst turn beats the other's best one and medians differ by a hundredth,
slower where it is so the other way round; all else is no difference. Of ways that are alike five
turns each say otherwise in one case of 126.
"""

import statistics
from collections.abc import Sequence
from typing import Any, Final

FASTER: Final = "faster"
SLOWER: Final = "slower"
ALIKE: Final = "no difference seen"
FEW: Final = "too few turns"
_TURNS_MIN: Final = 5
_GAIN_MIN: Final = 1.01


def verdict(taken: Sequence[float], without: Sequence[float]) -> str:
    """Of what was taken, given the seconds of each turn."""
    if min(len(taken), len(without)) < _TURNS_MIN:
        return FEW
    if _is_faster(taken, without):
        return FASTER
    return SLOWER if _is_faster(without, taken) else ALIKE


def _is_faster(one: Sequence[float], other: Sequence[float]) -> bool:
    gain = statistics.median(other) / statistics.median(one)
    return max(one) < min(other) and gain >= _GAIN_MIN


def figures(taken: Sequence[float], without: Sequence[float]) -> dict[str, Any]:
    """For a row: medians, ranges, the gain (above 1: faster) and the verdict."""
    return {
        "gain": statistics.median(without) / statistics.median(taken),
        "taken_ms": statistics.median(taken) * 1e3,
        "taken_from_to": _range(taken),
        "without_ms": statistics.median(without) * 1e3,
        "without_from_to": _range(without),
        "turns": len(taken),
        "so": verdict(taken, without),
    }


def _range(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.4g} to {max(seconds) * 1e3:.4g}"


def decision(verdicts: Sequence[str], *, is_default: bool) -> str:
    """What the table of variants should say, of what all cases said."""
    now = "on" if is_default else "off"
    if FASTER in verdicts and SLOWER in verdicts:
        return f"{now}, until it is told where: faster in some cases and slower in others"
    if FASTER in verdicts:
        return "on"
    if SLOWER in verdicts:
        return "off"
    return f"{now}, as it is: {FEW if FEW in verdicts else ALIKE}"
