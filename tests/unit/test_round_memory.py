"""Tests when the memory of a round is reused: only when the round is over and no stream reads the memory any longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from asyncdist.tensors.codecs.rounding import Float32
from asyncdist.tensors.flat_state import FlatState
from protocols.exchange.layout.wire_layout import WireLayout
from protocols.exchange.rounds import MemberRound, RoundTransfers


class Server:
    """Records the offers, whose streams end when the test calls ``on_free``."""

    def __init__(self) -> None:
        self.offers: list[Any] = []
        self.withdrawn: list[Any] = []

    def offer(self, *_: Any, **__: Any) -> Any:
        self.offers.append(SimpleNamespace(on_free=lambda _: None, streams={}))
        return self.offers[-1]

    def withdraw(self, offer: Any) -> None:
        self.withdrawn.append(offer)


def made() -> tuple[RoundTransfers, Server, MemberRound]:
    """Return the transfers of a member that has offered its contribution to round 1."""
    model = nn.Linear(3, 2)
    names = {name for name, _ in model.named_parameters()}
    entries = FlatState(model).entries
    layout = WireLayout(entries, range(len(entries)), names, 2, Float32(), None)
    fragment: Any = SimpleNamespace(layout=layout, version=0, holds_mean=False, is_frequent=True)
    services: Any = SimpleNamespace(rank=0, shares_memory=False)
    server: Any = Server()
    transfers = RoundTransfers(services, server, [fragment], is_overlapped=False)
    own = MemberRound(1, 0, contribution=transfers.new_encoded(0))
    transfers.offer_contribution(own)
    return transfers, server, own


def address(encoded: Any) -> int:
    return int(encoded[0].untyped_storage().data_ptr())


def test_memory_is_reused_when_the_last_stream_has_ended() -> None:
    transfers, server, own = made()
    contribution = list(own.contribution)
    transfers.retire(own)
    assert server.withdrawn == server.offers and len(server.offers) >= 2
    for offer in server.offers:
        assert address(transfers.new_encoded(0)) != address(contribution), (
            "a stream still reads the contribution, so its memory must not be reused"
        )
        offer.on_free({})
    assert address(transfers.new_encoded(0)) == address(contribution)


def test_memory_that_was_never_offered_is_reused_at_once() -> None:
    transfers, _, _ = made()
    own = MemberRound(2, 0, contribution=transfers.new_encoded(0))
    contribution = list(own.contribution)
    transfers.retire(own)
    assert address(transfers.new_encoded(0)) == address(contribution)


def test_a_moved_contribution_is_kept_until_its_later_round_ends() -> None:
    transfers, server, own = made()
    contribution, first = list(own.contribution), list(server.offers)
    later = MemberRound(2, 0)
    transfers.move_contribution(own, later)
    transfers.retire(own)
    for offer in first:
        offer.on_free({})
    assert address(transfers.new_encoded(0)) != address(contribution)
    transfers.retire(later)
    for offer in server.offers[len(first) :]:
        offer.on_free({})
    assert address(transfers.new_encoded(0)) == address(contribution)
