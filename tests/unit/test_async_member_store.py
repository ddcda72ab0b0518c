"""Tests how a member of asynchronous DiLoCo saves and loads its anchors."""

from __future__ import annotations

import torch

from asyncdist.protocols.async_diloco.blocks import Layouts
from asyncdist.protocols.async_diloco.member_store import HeldAnchor, MemberStore
from asyncdist.tensors.codecs import find_codec
from asyncdist.tensors.flat_state import FlatState


def test_a_successor_saves_its_anchor_before_its_election() -> None:
    """Regression: only the outer optimizer's state of the leader that had left was saved, and no resume could start."""
    model = torch.nn.Linear(2, 1)
    flat = FlatState(model)
    layouts = Layouts(flat.entries, {"weight", "bias"}, 2, find_codec("float32"))
    first, newest = layouts.block_of(flat.own_tensors()), layouts.new_block()
    newest[1][0].fill_(7.0)
    store = MemberStore(layouts, HeldAnchor(3, ((1, 3),), first), sequence=3)
    store.inherited, store.outer = HeldAnchor(5, ((1, 3), (2, 4)), newest), (5, torch.arange(8, dtype=torch.uint8))
    for _ in range(2):  # the resumed member may save again before its election
        state = store.state(None)
        loaded = MemberStore(layouts, HeldAnchor(0, (), layouts.new_block()))
        loaded.load(state, {1: 1, 2: 2}, 1)
        assert loaded.member_state() == store.member_state()
        assert torch.equal(loaded.newest.block[1][0], newest[1][0])
        assert loaded.outer is not None and torch.equal(loaded.outer[1], torch.arange(8, dtype=torch.uint8))
        store = loaded
