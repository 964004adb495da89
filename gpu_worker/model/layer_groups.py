"""Layer groups: which layers share block tables, so that each kind of attention holds its own KV.

Layers of one window are a kind. All blocks of a pool are of one size, so every group has as many
places for layers; a kind that needs more takes several groups, and the last may be padded.

    Gemma 3 1B   4 layers of full attention, 22 of a window
    4 places     0 [full x4]   1..5 [window x4]   6 [window x2, pad x2]
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Pads are KV that nobody reads, and each group is a table to write, send and check: one more must
# save at least so large a share of KV.
_SHARE_OF_A_GROUP: Final = 0.01
_ENDLESS: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    # Of each group, the widest first; None: everything.
    windows: tuple[int | None, ...]
    # Layers in each group, pads included.
    places: int
    # Of each layer: its group, and its place there.
    of_layer: tuple[tuple[int, int], ...]

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each group."""
        counts = Counter(group for group, _ in self.of_layer)
        return tuple(counts[group] for group in range(len(self.windows)))


def group_layers(windows: Sequence[int | None]) -> LayerGroups:
    """Few groups that waste little on pads; of each layer its window."""
    kinds = sorted(set(windows), key=_width, reverse=True)
    layers = [[at for at, own in enumerate(windows) if own == kind] for kind in kinds]
    counts = [len(each) for each in layers]
    places = min(range(max(counts), 0, -1), key=lambda places: _cost(counts, places))
    group_windows: list[int | None] = []
    of_layer = [(0, 0)] * len(windows)
    for kind, own in zip(kinds, layers, strict=True):
        for index, layer in enumerate(own):
            of_layer[layer] = len(group_windows) + index // places, index % places
        group_windows += [kind] * -(-len(own) // places)
    return LayerGroups(windows=tuple(group_windows), places=places, of_layer=tuple(of_layer))


def _width(window: int | None) -> int:
    return _ENDLESS if window is None else window


def _cost(counts: Sequence[int], places: int) -> float:
    """Of a split, as a share of KV, for the layers of each kind.

    Pads are counted as a mean of what they add to a short row, where all kinds weigh alike, and to
    a long one, where only the widest does.
    """
    groups = [-(-count // places) for count in counts]
    short = sum(groups) * places / sum(counts) - 1
    long = groups[0] * places / counts[0] - 1
    return (short + long) / 2 + sum(groups) * _SHARE_OF_A_GROUP
