"""Two transports as one. That messages arrive as they should is the conformance suite's."""

from __future__ import annotations

import pytest

from asyncdist.errors import RankLostError, TransportError
from asyncdist.tags import BULK_FIRST, BULK_LAST
from asyncdist.transports.local import LocalHub
from asyncdist.transports.planes import TwoPlaneTransport

BULK = range(BULK_FIRST, BULK_LAST + 1)


def planes(size: int, rank: int = 0) -> tuple[LocalHub, LocalHub, TwoPlaneTransport]:
    control, bulk = LocalHub(size), LocalHub(size)
    return control, bulk, TwoPlaneTransport(control.transport(rank), bulk.transport(rank), BULK)


def test_a_message_goes_by_its_tag() -> None:
    control, bulk, transport = planes(2)
    for hub, tag in ((control, BULK_FIRST - 1), (bulk, BULK_FIRST), (bulk, BULK_LAST), (control, BULK_LAST + 1)):
        buffer = bytearray(1)
        arriving = hub.transport(1).irecv(buffer, 0, tag)
        assert transport.isend(b"x", 1, tag).test()
        assert arriving.test(), tag
        assert buffer == b"x"


def test_a_rank_lost_on_either_is_lost_and_told_once() -> None:
    control, bulk, transport = planes(4)
    told: list[int] = []
    transport.set_loss_listener(told.append)
    bulk.lose(2)
    control.lose(2)
    control.lose(3)
    assert told == [2, 3]
    assert transport.lost_ranks() == {2, 3}
    with pytest.raises(RankLostError, match="rank 2 is gone"):
        transport.isend(b"", 2, BULK_FIRST).test()


def test_both_ring() -> None:
    control, bulk, transport = planes(2)
    rings: list[str] = []
    transport.set_doorbell(lambda: rings.append("!"))
    control.transport(1).isend(b"", 0, 1)
    bulk.transport(1).isend(b"", 0, 1)
    assert len(rings) == 2


def test_planes_that_number_the_ranks_differently_are_refused() -> None:
    with pytest.raises(TransportError, match=r"rank 1 of 3 on local \(control\), but rank 0 of 2 on local \(bulk\)"):
        TwoPlaneTransport(LocalHub(3).transport(1), LocalHub(2).transport(0), BULK)


def test_a_bulk_plane_without_room_for_the_tags_is_refused() -> None:
    with pytest.raises(TransportError, match="local takes tags up to 32767, bulk needs 40000"):
        TwoPlaneTransport(LocalHub(1).transport(0), LocalHub(1).transport(0), range(39000, 40001))
