"""Shares what one rank of a host has fetched from reducers on other hosts with the other replacers of its host.

In a sharded round each part of the mean goes to each host once: one of the replacers there asks the reducer, and the
others ask that replacer, which offers the part as the reducer does, as soon as it has it whole. What it offers lies in
the memory in which its own mean is made. That does not change any more, and is in use until the round has ended and
nothing leaves from it.

A part that does not come is refused, and those who have asked for it ask the reducer.
"""

from __future__ import annotations

from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.protocols.selective.messages import Assign
from asyncdist.protocols.selective.roles.exchange_buffers import Accumulator


class Relay:
    """Offers fetched parts of one round after the other.

    Args:
        rank: this rank.
        server: gives the parts.

    Attributes:
        shared_count: parts that have been offered.
    """

    def __init__(self, rank: int, server: SnapshotServer) -> None:
        self._rank = rank
        self._server = server
        self._round = 0
        self._fetched: set[Part] = set()  # to be offered
        self._offers: list[Offer] = []
        self.shared_count = 0

    def begin(self, round: int, assign: Assign) -> None:
        """Keep the requests of other replacers for the parts that this rank is to fetch."""
        assert not self._offers, f"round {round} begins while this rank shares what another one has brought"
        self._round = round
        self._fetched = {
            Part(number, len(assign.reducers))
            for number, source in enumerate(assign.sources)
            if source == self._rank != assign.reducers[number]
        }

    def share(self, round: int, part: Part, accumulator: Accumulator) -> None:
        """Offer a part that lies in ``accumulator``, if this rank is to."""
        if round != self._round or part not in self._fetched:
            return
        self._fetched.remove(part)
        accumulator.hold()
        self._offers.append(
            self._server.offer(round, part.of(accumulator.buffers), lambda _: accumulator.release(), mean_of=part)
        )
        self.shared_count += 1

    def refuse_rest(self, round: int) -> None:
        """Refuse the parts that have not been offered: they will not come any more."""
        if round == self._round:
            for part in self._fetched:
                self._server.end_mean(round, part)
            self._fetched.clear()

    def stop(self) -> None:
        """Offer nothing any more."""
        self.refuse_rest(self._round)
        while self._offers:
            self._server.withdraw(self._offers.pop())
