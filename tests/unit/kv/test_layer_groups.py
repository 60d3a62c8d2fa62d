"""Tests of layer_groups: which layers share a page."""

from __future__ import annotations

from collections import Counter

import pytest

from microturn.kv.layer_groups import LayerGroups, LayerKind, LayerShape

FULL, NEAR, FAR = LayerShape(1, 16), LayerShape(1, 16, 512), LayerShape(1, 16, 4096)
GEMMA_270M = [FULL if layer % 6 == 5 else NEAR for layer in range(18)]
GEMMA_1B = [FULL if layer % 6 == 5 else NEAR for layer in range(26)]


def test_layers_that_look_equally_far_back_are_one_group() -> None:
    for layer in (FULL, NEAR):
        groups = LayerGroups.of([layer] * 30)
        assert groups == LayerGroups.one([layer] * 30)
        assert groups.kinds == (LayerKind(layer.window, 1),)
        assert [place.slot for place in groups.places] == list(range(30))


@pytest.mark.parametrize(
    ("layers", "kinds", "num_slots"),
    [
        (GEMMA_270M, (LayerKind(None, 1), LayerKind(512, 5)), 3),
        (GEMMA_1B, (LayerKind(None, 1), LayerKind(512, 6)), 4),
        ([FULL, NEAR] * 13, (LayerKind(None, 1), LayerKind(512, 1)), 13),
        ([FULL] * 3 + [NEAR] * 4, (LayerKind(None, 3), LayerKind(512, 4)), 1),
        ([NEAR] * 47 + [FULL], (LayerKind(None, 1), LayerKind(512, 6)), 8),
        ([NEAR, FAR, NEAR, FULL], (LayerKind(None, 1), LayerKind(4096, 1), LayerKind(512, 2)), 1),
    ],
    ids=["gemma3-270m", "gemma3-1b", "every other", "almost as many", "one that sees all", "three kinds"],
)
def test_few_slots_stay_empty_and_few_groups_are_made(
    layers: list[LayerShape], kinds: tuple[LayerKind, ...], num_slots: int
) -> None:
    groups = LayerGroups.of(layers)
    assert (groups.kinds, len(groups.slots)) == (kinds, num_slots)
    assert groups.num_groups == sum(kind.num_groups for kind in kinds) <= 8


@pytest.mark.parametrize("layers", [GEMMA_270M, GEMMA_1B, [NEAR] * 47 + [FULL]], ids=["270m", "1b", "48"])
def test_no_two_layers_have_one_place_and_each_is_among_its_kind(layers: list[LayerShape]) -> None:
    groups = LayerGroups.of(layers)
    assert max(Counter(groups.places).values()) == 1
    for layer, place in zip(layers, groups.places, strict=True):
        kind = groups.kinds[place.kind]
        assert kind.window == layer.window
        assert place.group < kind.num_groups
        assert place.slot < len(groups.slots)


def test_layers_that_keep_differently_much_stay_together_and_keep_what_any_of_them_sees() -> None:
    groups = LayerGroups.of([LayerShape(1, 16, 20), LayerShape(2, 16, 30)])
    assert groups.kinds == (LayerKind(30, 1),)
    assert len(groups.slots) == 2
    assert LayerGroups.of([LayerShape(2, 16), LayerShape(1, 16, 30)]).kinds == (LayerKind(None, 1),)


def test_more_kinds_than_groups_stay_together() -> None:
    groups = LayerGroups.of([LayerShape(1, 16, window) for window in range(1, 10)])
    assert groups.kinds == (LayerKind(9, 1),)
