"""Tests how a rank begins to serve its island, and the merge of the global anchor, against HALoS's formulas."""

from __future__ import annotations

import asyncio
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncdist.protocols.async_diloco.anchor import Anchor
from asyncdist.protocols.async_diloco.blocks import Block, Layouts
from asyncdist.protocols.async_diloco.islands.merging import encode_difference, merge_into, rebase
from asyncdist.protocols.async_diloco.islands.regional import Regional
from asyncdist.protocols.async_diloco.member_store import Answer, HeldAnchor, MemberStore
from asyncdist.protocols.async_diloco.messages import Arrived
from asyncdist.protocols.async_diloco.options import AsyncDiLoCoOptions
from asyncdist.protocols.joining.state_transfer import packed, unpacked
from asyncdist.tensors.codecs import TopK, find_codec
from asyncdist.tensors.flat_state import FlatState

MODEL = torch.nn.BatchNorm1d(2)
LAYOUTS = Layouts(FlatState(MODEL).entries, {"weight", "bias"}, 1, find_codec("float32"))
ROLES = [vector.role for vector in LAYOUTS.exact.vectors]
COMPANY: Any = SimpleNamespace(living={4, 5})
STEPPED = ROLES.index("stepped")


def block(value: float) -> Block:
    found = LAYOUTS.new_block()
    for vector, values in zip(LAYOUTS.exact.vectors, found[1], strict=True):
        values.fill_(value if vector.role != "copied" or value < 256 else 0)
    return found


def parameters(given: Block) -> float:
    (value,) = set(given[1][STEPPED].tolist())
    return float(value)


class GlobalClient:
    """Answers a registration, and records contributions."""

    def __init__(self, given: HeldAnchor) -> None:
        self.given, self.sent, self.blocks = given, list[tuple[Arrived, int]](), list[Block]()

    async def registered(self) -> HeldAnchor:
        return self.given

    def contribute(self, block: Block, report: Arrived, sequence: int) -> None:
        self.sent.append((report, sequence))
        self.blocks.append(block)

    async def is_answered(self, deadline: float) -> bool:
        return True


def test_the_norm_of_large_differences_does_not_overflow() -> None:
    """Regression: the squares of values above 1.8e19 overflowed, and the contribution was left out."""
    encoded = LAYOUTS.new_contribution()[1]
    norm, _ = encode_difference(LAYOUTS, block(3e19), block(0.0), encoded)
    assert norm == pytest.approx(3e19 * math.sqrt(4))


def begun(held: HeldAnchor, given: HeldAnchor, state: Any, *, first: int = 0) -> tuple[Regional, HeldAnchor]:
    """Begin to serve island 1 with a merge weight of 1/4."""
    store = MemberStore(LAYOUTS, HeldAnchor(first, (), block(0.0)))
    options: Any = {"island": 1, "every": 2, "weight": 0.25, "decay": None, "is_divided_anew": False}
    regional = Regional(GlobalClient(given), store, membership=COMPANY, **options)
    return regional, asyncio.run(regional.resumed(held, state, {4: 9, 5: 2}))


def state_of(*, reference: float, captured: float, captured_at: int, merged: int = 3) -> dict[str, Any]:
    own = {"reference": block(reference)[1], "measured_from": 4, "merged": merged}
    return {**own, "captured_at": captured_at, "captured": block(captured)[1], "errors": []}


HELD = HeldAnchor(10, ((4, 7), (5, 1)), block(8.0), merged=3)


def test_a_server_continues_with_the_state_of_the_last_one() -> None:
    given = HeldAnchor(6, ((0, 5), (1, 3)), block(4.0))
    regional, found = begun(HELD, given, state_of(reference=2.0, captured=6.0, captured_at=8))
    assert found is HELD and regional.merged == 3
    own = regional.state()
    assert (own["measured_from"], own["captured_at"]) == (4, 0), "the dropped contribution must be computed again"
    assert set(own["reference"][STEPPED].tolist()) == {2.0} and not regional.lost_count


def test_an_answer_on_its_way_is_merged_now() -> None:
    """The reference is 3/4 of the captured anchor and 1/4 of the global anchor; the progress since then is kept."""
    given = HeldAnchor(6, ((1, 8),), block(2.0))
    regional, found = begun(HELD, given, state_of(reference=2.0, captured=6.0, captured_at=8))
    assert (found.version, found.merged, found.applied) == (11, 8, HELD.applied)
    own = regional.state()
    assert set(own["reference"][STEPPED].tolist()) == {5.0} and own["measured_from"] == 9, (
        "the reference must be of 2 versions after the capture"
    )
    assert parameters(found.block) == 5.0 + (8.0 - 6.0)


def test_without_the_captured_anchor_the_newest_one_is_merged(caplog: pytest.LogCaptureFixture) -> None:
    given = HeldAnchor(6, ((1, 8),), block(4.0))
    with caplog.at_level(logging.WARNING):
        regional, found = begun(HELD, given, None)
    assert (found.version, found.merged, parameters(found.block)) == (11, 8, 7.0)
    assert regional.lost_count == len(caplog.records) == 1


def test_an_island_without_newest_anchors_takes_the_global_one(caplog: pytest.LogCaptureFixture) -> None:
    """Contribution 12 is in the global anchor. Contributions of workers that may be in it are not applied again."""
    given = HeldAnchor(6, ((1, 12),), block(4.0))
    with caplog.at_level(logging.WARNING):
        regional, found = begun(HELD, given, None)
    assert (found.version, found.merged, parameters(found.block)) == (12, 12, 4.0)
    assert found.applied == ((4, 9), (5, 2))
    assert regional.lost_count == len(caplog.records) == 1


def test_progress_without_its_reference_is_logged_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        regional, found = begun(
            HELD, HeldAnchor(6, ((1, 3),), block(4.0)), state_of(reference=2.0, captured=6.0, captured_at=8, merged=1)
        )
    assert found is HELD and set(regional.state()["reference"][STEPPED].tolist()) == {8.0}
    assert regional.lost_count == len(caplog.records) == 1


def test_the_first_anchor_is_the_reference_before_any_merge() -> None:
    held = HeldAnchor(5, (), block(3.0))
    regional, _ = begun(held, HeldAnchor(0, (), block(0.0)), None)
    assert set(regional.state()["reference"][STEPPED].tolist()) == {0.0} and not regional.lost_count


def test_merges_equal_those_of_halos() -> None:
    """``cur *= 1 - weight; cur += weight * global`` on parameters and floating buffers; integers stay."""
    for weight in (0.25, 1.0):
        own, given = block(8.0), block(2.0)
        merge_into(LAYOUTS, own[1], given[1], weight)
        for role, values in zip(ROLES, own[1], strict=True):
            assert set(values.tolist()) == {8.0 if role == "copied" else 8.0 * (1 - weight) + 2.0 * weight}
    own = block(float("inf"))
    merge_into(LAYOUTS, own[1], block(float("inf"))[1], 0.25)
    assert own[1][STEPPED].isinf().all()


def test_differences_are_measured_from_the_reference() -> None:
    into = LAYOUTS.new_contribution()
    norm, _ = encode_difference(LAYOUTS, block(5.0), block(2.0), into[1])
    for role, values in zip(ROLES, into[1], strict=True):
        assert set(values.tolist()) == {3.0 if role == "stepped" else 2.0}
    assert norm == pytest.approx(3.0 * into[1][STEPPED].numel() ** 0.5)


def test_rebased_parameters_keep_the_progress() -> None:
    own = block(8.0)
    rebase(LAYOUTS, own[1], block(6.0)[1], block(5.0)[1])
    wanted = {"stepped": 7.0, "averaged": 5.0, "copied": 8.0}
    assert [set(values.tolist()) for values in own[1]] == [{wanted[role]} for role in ROLES]


WIDE = Layouts(FlatState(torch.nn.Linear(512, 1, bias=False)).entries, {"weight"}, 1, TopK(share=0.02))


def wide(values: torch.Tensor) -> Block:
    return WIDE.loaded_anchor([values])


class Islanders:
    """Serves an island of 512 parameters with error feedback, and answers its contributions like a global server."""

    def __init__(self, state: Any = None, *, held: HeldAnchor | None = None, given: HeldAnchor | None = None) -> None:
        first = HeldAnchor(0, (), wide(torch.zeros(512)))
        self.store, self.client = MemberStore(WIDE, first), GlobalClient(given or first)
        options: Any = {"island": 1, "every": 1, "weight": 0.25, "decay": 1.0, "is_divided_anew": False}
        alone: Any = SimpleNamespace(living={4})
        self.regional = Regional(self.client, self.store, membership=alone, **options)
        self.held = asyncio.run(self.regional.resumed(held or first, state, {}))
        self.anchor = Anchor(WIDE, AsyncDiLoCoOptions(), self.held.block, self.held.version)

    def train(self, change: torch.Tensor) -> torch.Tensor:
        """Change the island's anchor, and return the difference that the global server decodes."""
        version = self.anchor.version + 1
        values = self.anchor.copy_into(WIDE.new_block())[1][0] + change
        self.anchor = Anchor(WIDE, AsyncDiLoCoOptions(), wide(values), version)
        self.regional.capture(self.anchor)
        (vector,) = WIDE.wire.vectors
        return vector.decoded(self.client.blocks[-1][1][0]).clone()

    def answer(self, change: torch.Tensor) -> None:
        """Answer the contribution with a global anchor that differs from the anchor by ``change``."""
        values = self.anchor.copy_into(WIDE.new_block())[1][0] + change
        report: Any = SimpleNamespace(version=1, applied=(), merged=0)
        self.store.answer = Answer(report, wide(values))
        self.regional.merge(self.anchor)

    def unsent(self) -> torch.Tensor:
        """Return the part of the island's progress that the next contribution has to contain."""
        (reference,) = self.regional.state()["reference"]
        return reference - self.anchor.copy_into(WIDE.new_block())[1][0]


def test_contributions_of_islands_lose_nothing_with_feedback() -> None:
    """Regression: the values that ``wire="topk"`` did not send never reached the global anchor."""
    generator = torch.Generator().manual_seed(0)
    changes = [torch.randn(512, generator=generator) for _ in range(5)]
    island, sent = Islanders(), torch.zeros(512)
    for change in changes:
        sent += island.train(change)
        island.answer(torch.randn(512, generator=generator))
    assert torch.allclose(sent + island.unsent(), -torch.stack(changes).sum(0), atol=1e-4)


def test_the_next_server_of_an_island_sends_the_errors() -> None:
    """Whether the global server has applied the last contribution or not, the next server sends what it lacks."""
    island, change, other = Islanders(), torch.linspace(-1.0, 1.0, 512), torch.full((512,), 0.5)
    sent = island.train(change)
    state = unpacked(packed(island.regional.state()))
    held = HeldAnchor(1, (), island.anchor.copy_into(WIDE.new_block()))
    lost = Islanders(state, held=held, given=HeldAnchor(0, (), wide(other)))
    assert torch.equal(lost.unsent(), -change)
    applied = Islanders(state, held=held, given=HeldAnchor(1, ((1, 1),), wide(other)))
    assert torch.allclose(applied.unsent() + sent, -change)
    assert torch.equal(applied.held.block[1][0], change * 0.75 + other * 0.25), "the anchor itself has no errors"
    island.answer(other - change)
    assert torch.allclose(island.unsent(), applied.unsent())


def test_a_contribution_that_is_not_finite_leaves_no_errors() -> None:
    broken = wide(torch.full((512,), math.nan))
    norm, errors = encode_difference(WIDE, broken, wide(torch.zeros(512)), WIDE.new_contribution()[1], 1.0)
    assert math.isnan(norm) and not errors
