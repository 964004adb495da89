"""Which layers share block tables."""

import pytest

from gpu_worker.model.layer_groups import group_layers

# Published depths: how many layers attend to everything, how many to a window; the groups of each.
GEMMA3 = {"270m": (3, 15), "1b": (4, 22), "4b": (5, 29), "12b": (8, 40), "27b": (10, 52)}
GROUPS = {"270m": (1, 5), "1b": (1, 6), "4b": (1, 6), "12b": (1, 5), "27b": (1, 6)}


@pytest.mark.parametrize("name", GEMMA3)
def test_the_full_layers_of_gemma_3_are_one_group(name: str) -> None:
    full, sliding = GEMMA3[name]
    layers = [None if (layer + 1) % 6 == 0 else 512 for layer in range(full + sliding)]
    groups = group_layers(layers)
    counts = tuple(groups.windows.count(kind) for kind in (None, 512))
    assert (groups.places, counts) == (full, GROUPS[name])
    # The worst are 8 pads of 70 places, all in the window's last group.
    assert groups.places * len(groups.windows) <= 1.13 * len(layers)


def test_layers_of_one_kind_are_one_group_without_a_pad() -> None:
    for window in (None, 4096):
        groups = group_layers([window] * 31)
        assert (groups.windows, groups.places) == ((window,), 31)
        assert groups.of_layer == tuple((0, place) for place in range(31))


def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window() -> None:
    layers = [64, None, 64, 8, 8, 64, 64]
    groups = group_layers(layers)
    assert groups.windows == (None, 64, 64, 64, 64, 8, 8)
    assert len(set(groups.of_layer)) == len(layers)
    assert [groups.windows[group] for group, _ in groups.of_layer] == layers
    assert all(place < groups.places for _, place in groups.of_layer)


@pytest.mark.parametrize(
    ("full", "sliding", "places"),
    [
        # Equal, or a multiple: nothing is padded.
        (14, 14, 14),
        (21, 7, 7),
        # Two places more in the window's group.
        (13, 11, 13),
        (10, 16, 10),
        # Rather than 21 places that nobody needs, a third group.
        (20, 31, 20),
        (31, 10, 11),
        (1, 1, 1),
    ],
)
def test_the_fewest_groups_that_waste_little(full: int, sliding: int, places: int) -> None:
    assert group_layers([None] * full + [128] * sliding).places == places
