"""A spare makes the tensors over a rank's memory before it takes the rank; what is adopted is what lies there now."""

from __future__ import annotations

import os

import pytest
import torch

from ftrun.worker.arena import Arena, Manifest, place
from ftrun.worker.segment import Segment


@pytest.fixture
def theirs() -> Arena:
    """A rank's memory: two tensors, and one that shares the memory of the first."""
    arena = Arena.create(0, 1 << 20)
    weight = torch.arange(12.0).view(3, 4)
    named = [("param.w", weight), ("param.tied", weight[1:]), ("optim.0.0.step", torch.tensor(5))]
    manifest = Manifest([], {"shadow": 0})
    manifest.entries += [e for e, _ in place(arena, "committed", [(n, t, False) for n, t in named], {})]
    arena.write_manifest(manifest)
    return arena


def mapped_by_a_spare(arena: Arena) -> Arena:
    return Arena(Segment.attach(os.dup(arena.segment.fd)))


def test_tensors_made_ahead_lie_over_the_memory(theirs: Arena) -> None:
    mine = mapped_by_a_spare(theirs)
    mine.make_ready()
    assert mine.segment.ready is not None
    manifest = mine.read_manifest()
    assert manifest is mine.segment.ready.manifest
    blocks: dict[int, torch.Tensor] = {}
    weight, tied, step = (mine.tensor(e, blocks) for e in manifest.entries)
    plain = mapped_by_a_spare(theirs)
    other: dict[int, torch.Tensor] = {}
    for made, entry in zip((weight, tied, step), plain.read_manifest().entries, strict=True):
        fresh = plain.tensor(entry, other)
        assert torch.equal(made, fresh) and made.stride() == fresh.stride()
        assert made.untyped_storage().nbytes() == fresh.untyped_storage().nbytes()
    assert blocks.keys() == other.keys() and len(blocks) == 2
    assert tied.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    theirs.tensor(theirs.read_manifest().entries[0], {}).fill_(7)  # its owner goes on
    assert torch.equal(tied, torch.full((2, 4), 7.0)) and int(step) == 5


def test_a_layout_that_changed_since_is_read_anew(theirs: Arena) -> None:
    mine = mapped_by_a_spare(theirs)
    mine.make_ready()
    manifest = theirs.read_manifest()
    manifest.entries.pop()
    entry, _ = next(place(theirs, "committed", [("optim.0.0.step", torch.tensor(9), False)], {}))
    manifest.entries.append(entry)
    theirs.write_manifest(manifest)
    found = mine.read_manifest()
    assert mine.segment.ready is not None and found is not mine.segment.ready.manifest
    assert int(mine.tensor(found.entries[-1], {})) == 9, "a tensor of the same name that lay elsewhere"


def test_a_manifest_in_the_making_is_left_alone(theirs: Arena) -> None:
    mine, bare = mapped_by_a_spare(theirs), Arena(Segment.create("no manifest yet", theirs.segment.length))
    with pytest.raises(ValueError, match="being written"):
        bare.make_ready()
    theirs.segment.view(theirs.segment.length // 4 * 3, 1)[0] = 0  # the next one has begun to cover it
    with pytest.raises(ValueError):
        mine.make_ready()
    assert bare.segment.ready is None and mine.segment.ready is None
