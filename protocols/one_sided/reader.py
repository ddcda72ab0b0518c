"""Reads the snapshots that donors have published, and averages them: the background part of a one-sided replacement."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from asyncdist import Group
from asyncdist.collectives.one_sided import OutdatedError, VersionedWindow, VersionRecord
from asyncdist.protocols.one_sided.rules import Choice, Sample
from asyncdist.protocols.parameter_stream.landing import ChunkRing
from asyncdist.tensors.byte_layout import Packing
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool
from asyncdist.tensors.means import WeightedMean


@dataclass(slots=True, eq=False)
class Replacement:
    """Tracks one replacement of this rank's weights, from the judgement until the average is applied or given up.

    Attributes:
        number: counts the replacements of this rank, from 1.
        judged_at: when the rank judged that it was to be replaced, on the world's clock.
        donors: whose snapshots have been added, ascending.
        weights, versions, iterations: of the donors' snapshots, in the donors' order.
        best: the donor of the integer and bool entries; -1 without donors.
        average: the accumulator; None before the first donor, and for fresh weights.
        complete: whether the next step may apply it.
        nbytes: received so far.
    """

    number: int
    judged_at: float
    donors: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    iterations: list[int] = field(default_factory=list)
    best: int = -1
    average: FlatBuffers | None = None
    complete: bool = False
    nbytes: int = 0


class UnreadableError(Exception):
    """An attempt to read the donors failed; another one may succeed."""


class DonorReader:
    """Reads metrics and snapshots of the other members.

    Args:
        rank: this rank.
        group: the policy's members.
        window: the versions that the members publish.
        packing: where the entries of the state lie in a snapshot.
        flat: the state of this rank's model.
        counts: the policy's; ``torn`` counts discarded reads, ``received`` counts bytes.
        chunk_nbytes: of the pieces in which a snapshot is read.

    Attributes:
        accumulators: lends the buffers in which averages are made.
    """

    def __init__(
        self,
        rank: int,
        group: Group,
        window: VersionedWindow,
        packing: Packing,
        flat: FlatState,
        counts: Counter[str],
        *,
        chunk_nbytes: int,
    ) -> None:
        self._rank = rank
        self._others = [member for member in group.ranks if member != rank]
        self._window = window
        self._packing = packing
        self._counts = counts
        self._chunk_nbytes = chunk_nbytes
        self._ring = ChunkRing(chunk_nbytes)
        self.accumulators = SnapshotPool(flat, accumulate=True)

    async def metrics(
        self, own_metric: float | None, count_max: int, sample: Sample, deadline: float
    ) -> dict[int, float]:
        """Return the newest metric of each member that is looked at, and this rank's own; a member may have none.

        Args:
            own_metric: this rank's.
            count_max: how many others are looked at. Where there are more, so many of them are drawn.
            sample: draws them.
            deadline: on the loop's clock. Those that have to answer, and have not by then, have none.
        """
        asked = self._others if len(self._others) <= count_max else sorted(sample(self._others, count_max))
        records = await self._window.published_by_each(asked, deadline=deadline)
        metrics = {rank: record.metric for rank, record in records.items()}
        return metrics if own_metric is None else {**metrics, self._rank: own_metric}

    async def read(self, replacement: Replacement, choice: Choice, deadline: float) -> WeightedMean:
        """Average the newest snapshots of the chosen donors into ``replacement``, in rank order.

        Raises:
            UnreadableError: a snapshot was overwritten while it was read, or its donor has nothing to give any more.
        """
        replacement.best = choice.best
        for values in (replacement.donors, replacement.weights, replacement.versions, replacement.iterations):
            values.clear()
        mean = WeightedMean(len(choice.donors))
        for donor in choice.donors:
            await self._read_donor(replacement, choice, donor, mean, deadline)
        return mean

    def release(self, replacement: Replacement) -> None:
        """Take the accumulator back, if there is one."""
        if replacement.average is not None:
            self.accumulators.release(replacement.average)
            replacement.average = None

    async def _read_donor(
        self, replacement: Replacement, choice: Choice, donor: int, mean: WeightedMean, deadline: float
    ) -> None:
        """Add the newest snapshot of ``donor``, even if it is newer than the one that the donor was chosen for.

        So a slow rank succeeds, however often its donors have published since it chose.
        """
        record = await self._window.published_by(donor, deadline=deadline)
        if record is None:
            raise UnreadableError(f"rank {donor} left")
        weight = choice.weight(record.metric)
        if weight == 0.0:
            raise UnreadableError(f"the metric of rank {donor} is {record.metric} by now")
        if replacement.average is None:
            replacement.average = self.accumulators.acquire()
        mean.begin(weight)
        try:
            await self._add(replacement, donor, record, mean, deadline, exact=donor == choice.best)
        except OutdatedError as error:
            self._counts["torn"] += 1
            raise UnreadableError(f"overwritten under its reader: {error}") from error
        replacement.donors.append(donor)
        replacement.weights.append(weight)
        replacement.versions.append(record.version)
        replacement.iterations.append(record.iteration)

    async def _add(
        self,
        replacement: Replacement,
        donor: int,
        record: VersionRecord,
        mean: WeightedMean,
        deadline: float,
        *,
        exact: bool,
    ) -> None:
        """Add one snapshot to the mean, each chunk as it arrives; with ``exact``, copy what is not averaged, too."""
        average = replacement.average
        assert average is not None, "nowhere to add to"
        end = self._packing.nbytes if exact else self._packing.averaged_nbytes
        starts = range(0, end, self._chunk_nbytes)
        ring = self._ring
        chunks = [ring.take(torch.uint8, min(self._chunk_nbytes, end - start)) for start in starts]

        def take(index: int) -> None:
            start = starts[index]
            replacement.nbytes += chunks[index].nbytes
            self._counts["received"] += chunks[index].nbytes
            for piece in self._packing.pieces(start, start + chunks[index].nbytes):
                into = piece.of_flat(average.tensors[piece.dtype])
                if piece.averaged:
                    mean.add(into, piece.of_chunk(chunks[index]))
                elif exact:
                    into.copy_(piece.of_chunk(chunks[index]))

        whole = False
        try:
            if chunks:
                await self._window.read(donor, record, [byte_view(chunk) for chunk in chunks], take, deadline=deadline)
            whole = True
        finally:
            if not whole and self._ring is ring:
                self._ring = ChunkRing(self._chunk_nbytes)  # discarded chunks may still land in the old one
