"""Tests the division of ranks into replicas, of a model among their ranks, and decisions on replicas as a whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from asyncdist.tensors.flat_state import FlatState
from protocols.exchange.ledger import Decide, Ledger, Report, reported_weights
from protocols.exchange.replicas.division import parts_of, weighing_of
from protocols.joining.replica_layout import SINGLE, Replicas

REPLICAS = Replicas((0, 1, 2, 4, 5, 7), 2)


def test_mates_and_counterparts() -> None:
    assert REPLICAS.replica_ranks(2) == REPLICAS.replica_ranks(4) == (2, 4)
    assert REPLICAS.counterparts(4) == (1, 4, 7) and REPLICAS.index(7) == 1
    assert SINGLE.replica_ranks(3) == (3,)


def test_a_replica_is_weighed_as_a_whole() -> None:
    seen = {}

    def weigh(reports: dict[int, Report]) -> dict[int, float]:
        seen.update(reports)
        return reported_weights(reports)

    reports = {
        0: Report(2.0, 3.0, (1.0,)),
        1: Report(4.0, 4.0, (2.0,)),
        2: Report(1.0, 1.0, (0.0,)),
        5: Report(1.0, math.nan, (0.0,)),
        7: Report(1.0, 1.0, (0.0,)),
    }
    chosen = weighing_of(REPLICAS, weigh)(reports)  # type: ignore[arg-type]
    assert chosen == {0: 3.0, 1: 3.0}, (
        "only the first replica may count: rank 4 has not reported, and rank 5 is not finite"
    )
    assert seen[0] == Report(3.0, 5.0, (1.5,)) and seen.keys() == {0, 5}
    assert weighing_of(SINGLE, reported_weights) is reported_weights


def test_a_verdict_among_counterparts_has_a_donor_per_replica() -> None:
    ledger = Ledger(REPLICAS.ranks, weigh=weighing_of(REPLICAS, reported_weights))
    for rank in REPLICAS.ranks:
        made = ledger.on_captured(rank, 1, 1.0, float(rank))
    (decided,) = made
    assert isinstance(decided, Decide) and decided.verdict.donors == REPLICAS.ranks
    own = decided.verdict.among(REPLICAS.counterparts(4))
    assert (own.donors, own.weights, own.norms) == ((1, 4, 7), (1.0, 1.0, 1.0), (1.0, 4.0, 7.0))


def test_a_lost_rank_takes_its_replica_out_of_a_decided_round() -> None:
    ledger = Ledger(REPLICAS.ranks, weigh=weighing_of(REPLICAS, reported_weights))
    for rank in REPLICAS.ranks:
        ledger.on_captured(rank, 1, 1.0, 1.0)
    for rank in (2, 4):
        ledger.on_gone(rank)
    for rank in (0, 1, 5):
        assert not ledger.on_census(rank, ledger.census, (), 0)
    *_, decided = ledger.on_census(7, ledger.census, (), 0)
    assert isinstance(decided, Decide) and decided.verdict.donors == (0, 1, 5, 7) and decided.verdict.attempt == 2


def test_a_lost_mate_leaves_no_half_replica_as_donor() -> None:
    """The leader is notified of a replica's ranks in turn, and decides when the first one is lost."""
    ledger = Ledger(REPLICAS.ranks, weigh=weighing_of(REPLICAS, reported_weights))
    for rank in (0, 1, 4, 5, 7):
        assert not ledger.on_captured(rank, 1, 1.0, 1.0)
    (decided,) = ledger.on_gone(2)
    assert isinstance(decided, Decide) and decided.verdict.donors == (0, 1, 5, 7)
    assert ledger.on_gone(4) == [], "the loss of the replica's other rank must not change a verdict"


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_parts_contain_each_entry_once_and_are_of_similar_size(count: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8))
    entries = FlatState(model).entries
    parameters = {name for name, _ in model.named_parameters()}
    chosen = range(1, len(entries))
    parts = parts_of(entries, chosen, parameters, count)
    assert sorted(index for part in parts for index in part) == list(chosen) and len(parts) == count
    buffers = {index for index in chosen if parameters.isdisjoint(entries[index].names)}
    assert buffers <= set(parts[0]) and all(list(part) == sorted(part) for part in parts)
    sizes = [sum(torch.Size(entries[index].shape).numel() for index in part) for part in parts]
    assert max(sizes) - min(sizes) <= 64
