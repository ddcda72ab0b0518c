"""Shares the parts that one rank has fetched from reducers on other hosts with the other replacers of its host.

In a sharded round, each part of the mean is sent to each host once: one replacer there asks the reducer, and the others
ask that replacer, which offers the part once it is complete. The part lies in the memory of the replacer's own mean. It
no longer changes, and stays in use until the round has ended and all streams from it have ended.

A part that does not arrive is refused, and the ranks that have asked for it ask the reducer.
"""

from __future__ import annotations

from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.protocols.selective.messages import Assign
from asyncdist.protocols.selective.roles.exchange_buffers import Accumulator


class Relay:
    """Offers the fetched parts of one round at a time.

    Args:
        rank: This rank.
        server: Gives the parts.

    Attributes:
        shared_count: Number of parts that have been offered.
    """

    def __init__(self, rank: int, server: SnapshotServer) -> None:
        self._rank = rank
        self._server = server
        self._round = 0
        self._fetched: set[Part] = set()  # still to be offered
        self._offers: list[Offer] = []
        self.shared_count = 0

    def begin(self, round: int, assign: Assign) -> None:
        """Expect the parts that this rank is to fetch, so that other replacers' requests for them are kept."""
        assert not self._offers, f"round {round} begins while this rank shares parts of another round"
        self._round = round
        self._fetched = {
            Part(number, len(assign.reducers))
            for number, source in enumerate(assign.sources)
            if source == self._rank != assign.reducers[number]
        }

    def share(self, round: int, part: Part, accumulator: Accumulator) -> None:
        """Offer a part in ``accumulator``, if this rank is to share it."""
        if round != self._round or part not in self._fetched:
            return
        self._fetched.remove(part)
        accumulator.hold()
        self._offers.append(
            self._server.offer(round, part.of(accumulator.buffers), lambda _: accumulator.release(), mean_of=part)
        )
        self.shared_count += 1

    def refuse_rest(self, round: int) -> None:
        """Refuse the parts that have not been offered: they will not arrive."""
        if round == self._round:
            for part in self._fetched:
                self._server.end_mean(round, part)
            self._fetched.clear()

    def stop(self) -> None:
        """Withdraw all parts."""
        self.refuse_rest(self._round)
        while self._offers:
            self._server.withdraw(self._offers.pop())
