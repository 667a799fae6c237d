"""What JSON made of a dataclass becomes one again, or nothing."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ftrun.core.shape import typed
from ftrun.core.shared.world import Place, World

WORLD = World(3, 7, (Place(0, 0, 4),), "host", 29500, replaced=(0,), lost={0: 2}, stamp="a-0-0")


def test_a_world_is_the_same_after_json() -> None:
    assert typed(World, json.loads(json.dumps(asdict(WORLD)))) == WORLD


@pytest.mark.parametrize("damage", [{"lost": {"zero": 2}}, {"lost": {"0": "2"}}, {"generation": "3"}, {"places": [{"rank": 0}]}])
def test_another_shape_is_none(damage: dict[str, object]) -> None:
    assert typed(World, {**json.loads(json.dumps(asdict(WORLD))), **damage}) is None
