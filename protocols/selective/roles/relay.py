"""Shares parts of an average, which one rank has fetched from another host, with the other ranks on its host.

In a sharded round, each part of the mean is sent to each host only once. One replacer (a rank that adopts the mean)
requests the part from the reducer that has averaged it. The other replacers on the host request it from that replacer.
If the part does not arrive, their requests are refused, and they request the part from the reducer.
"""

from __future__ import annotations

from asyncdist.protocols.parameter_stream.parts import Part
from asyncdist.protocols.parameter_stream.server import Offer, SnapshotServer
from asyncdist.protocols.selective.messages import Assign
from asyncdist.protocols.selective.roles.exchange_buffers import Accumulator


class Relay:
    """Lets other ranks on this host copy the parts of an average that this rank has fetched from other hosts."""

    def __init__(self, rank: int, server: SnapshotServer) -> None:
        self._rank = rank
        self._server = server
        self._round = 0
        self._fetched: set[Part] = set()  # parts that this rank must fetch and has not offered
        self._offers: list[Offer] = []
        self.shared_count = 0

    def begin(self, round: int, assign: Assign) -> None:
        """Determine which parts of the average this rank must fetch for its host.

        Requests for such a part wait until it arrives.
        """
        assert not self._offers, f"round {round} begins while this rank shares parts of another round"
        self._round = round
        self._fetched = {
            Part(number, len(assign.reducers))
            for number, source in enumerate(assign.sources)
            if source == self._rank != assign.reducers[number]
        }

    def share(self, round: int, part: Part, accumulator: Accumulator) -> None:
        """Offer a part that has arrived in ``accumulator`` if this rank fetches it for its host."""
        if round != self._round or part not in self._fetched:
            return
        self._fetched.remove(part)
        accumulator.hold()
        self._offers.append(
            self._server.offer(round, part.of(accumulator.buffers), lambda _: accumulator.release(), mean_of=part)
        )
        self.shared_count += 1

    def refuse_rest(self, round: int) -> None:
        """Refuse requests for the parts of the average that will not arrive on this rank."""
        if round == self._round:
            for part in self._fetched:
                self._server.end_mean(round, part)
            self._fetched.clear()

    def stop(self) -> None:
        """Stop offering all parts of the average, and refuse further requests."""
        self.refuse_rest(self._round)
        while self._offers:
            self._server.withdraw(self._offers.pop())
