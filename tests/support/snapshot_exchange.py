"""Runs the snapshot exchange of one replacer and five donors in one process, for a state of many dtypes."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.population import Mixed, State, expected_average, fill, same_bits

from asyncdist import World
from asyncdist.tensors.flat_state import FlatBuffers, FlatState
from protocols.parameter_stream.neighbours import Neighbours
from protocols.parameter_stream.receive_layout import ChunkRing
from protocols.parameter_stream.receiver import SnapshotReceiver, new_ring
from protocols.parameter_stream.server import Offer, SnapshotServer
from support.local import eventually

SCOPE = 77
ROUND = 5
DONORS = (1, 2, 3, 4, 5)
WEIGHTS = (1.0, 3.0, 0.7, 1.0, 0.25)
BEST = 4
#: A float32 sum of them depends on the order of its terms.
VALUES = {1: 1e8, 2: -3.3333334e7, 3: 1.0, 4: 0.1, 5: -7.0}


@dataclass(slots=True)
class Party:
    """One replacer, rank 0, and donors with a snapshot each, of states that differ only in their values."""

    worlds: list[World]
    state: FlatState
    desks: list[SnapshotServer]
    snapshots: dict[int, FlatBuffers]
    offers: dict[int, Offer]
    freed: list[FlatBuffers]

    @classmethod
    def of(cls, made: list[World], *, late: bool = False) -> Party:
        model = Mixed(width=16)
        state = FlatState(model)
        party = cls(made, state, [SnapshotServer(world.services, SCOPE) for world in made], {}, {}, [])
        for donor in DONORS:
            fill(model, VALUES[donor])
            party.snapshots[donor] = state.new_buffers()
            state.snapshot(party.snapshots[donor])
            if not late:
                party.offer(donor)
        return party

    def offer(self, donor: int) -> None:
        """Record that the donor has its snapshot."""
        self.offers[donor] = self.desks[donor].offer(Offer(ROUND, self.snapshots[donor], self.freed.append))

    def intake(
        self,
        ring: ChunkRing | None = None,
        accumulator: FlatBuffers | None = None,
        neighbours: Neighbours | None = None,
    ) -> tuple[SnapshotReceiver, FlatBuffers]:
        accumulator = accumulator or self.state.new_buffers(accumulate=True)
        intake = SnapshotReceiver(
            self.worlds[0].services,
            self.desks[0].channel,
            accumulator,
            ring or new_ring(),
            donors=DONORS,
            best=BEST,
            round=ROUND,
            neighbours=neighbours,
        )
        return intake, accumulator

    def deadline(self) -> float:
        return self.worlds[0].time() + 60.0

    def check(self, accumulator: FlatBuffers) -> None:
        """Check that the accumulator contains the average, bit for bit."""
        given: dict[int, State] = {rank: dict(snapshot.by_name()) for rank, snapshot in self.snapshots.items()}
        for name, tensor in accumulator.by_name().items():
            assert same_bits(tensor, expected_average(name, given, WEIGHTS, BEST, None, 0.0)), name

    async def is_over(self) -> None:
        """Return whether nothing of the exchange is left, on either side."""
        world = self.worlds[0]
        await eventually(lambda: not world.services.slots.taken_count and not world.services.slots.discarding_count)
        await eventually(lambda: not any(offer.streams for offer in self.offers.values()))
        await eventually(lambda: all(world.services.engine.is_idle for world in self.worlds))
