"""Reads and averages the snapshots that donors have published, in the background during training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from asyncdist import Group
from asyncdist.collectives.one_sided import OutdatedError, VersionedWindow, VersionRecord
from asyncdist.protocols.one_sided.selection import Choice, Sample
from asyncdist.protocols.parameter_stream.receive_layout import ChunkRing
from asyncdist.tensors.byte_layout import Packing
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool
from asyncdist.tensors.means import WeightedMean


@dataclass(slots=True, eq=False)
class Replacement:
    """State of one replacement of this rank's weights, until its average is applied or it is abandoned.

    Attributes:
        number: Number of the replacement among this rank's replacements, from 1.
        judged_at: Time on the world's clock at which this rank decided to replace its weights.
        donors: Donors whose snapshots were added, in ascending order.
        weights, versions, iterations: Weight, version and iteration of each donor's snapshot, in the order of
            ``donors``.
        best: Donor whose integer and bool entries are copied, or -1 without donors.
        average: Accumulator of the average. None before the first donor, and if weights are reset without donors.
        complete: Whether the next step may apply the average.
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
    """Raised if an attempt to read donors' snapshots has failed, but another attempt may succeed.

    The statistics count failures by the text up to the first colon, so it contains no ranks or values.
    """


class DonorReader:
    """Reads the metrics and snapshots that the other members have published, and averages the snapshots."""

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
        """Return this rank's metric and the newest published metrics of other members, by rank.

        Args:
            count_max: Maximum number of other members to ask. If there are more, a random sample of them is asked.
            deadline: Time on the loop's clock. Members that have not answered by then are omitted.
        """
        asked = self._others if len(self._others) <= count_max else sorted(sample(self._others, count_max))
        records = await self._window.published_by_each(asked, deadline=deadline)
        metrics = {rank: record.metric for rank, record in records.items()}
        return metrics if own_metric is None else {**metrics, self._rank: own_metric}

    async def read(self, replacement: Replacement, choice: Choice, deadline: float) -> WeightedMean:
        """Average the newest snapshots of the chosen donors into ``replacement``, in rank order.

        Raises:
            UnreadableError: A snapshot was overwritten while it was read, or a chosen rank can no longer be a donor.
        """
        replacement.best = choice.best
        for values in (replacement.donors, replacement.weights, replacement.versions, replacement.iterations):
            values.clear()
        mean = WeightedMean(len(choice.donors))
        for donor in choice.donors:
            await self._read_donor(replacement, choice, donor, mean, deadline)
        return mean

    def release(self, replacement: Replacement) -> None:
        """Return the memory of the replacement's average, if there is any, to the pool."""
        if replacement.average is not None:
            self.accumulators.release(replacement.average)
            replacement.average = None

    async def _read_donor(
        self, replacement: Replacement, choice: Choice, donor: int, mean: WeightedMean, deadline: float
    ) -> None:
        """Add the newest snapshot of ``donor`` to the mean, even if it was published after ``donor`` was chosen."""
        record = await self._window.published_by(donor, deadline=deadline)
        if record is None:
            raise UnreadableError(f"a donor has left the policy: rank {donor}")
        weight = choice.weight(record.metric)
        if weight == 0.0:
            raise UnreadableError(f"a donor's newest metric has no weight: {record.metric} of rank {donor}")
        if replacement.average is None:
            replacement.average = self.accumulators.acquire()
        mean.begin(weight)
        try:
            await self._add(replacement, donor, record, mean, deadline, exact=donor == choice.best)
        except OutdatedError as error:
            self._counts["torn"] += 1
            raise UnreadableError(f"a snapshot was overwritten while it was read: {error}") from error
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
        """Add one snapshot to the mean in chunks. If ``exact``, also copy its integer and bool entries."""
        average = replacement.average
        assert average is not None, "no accumulator was acquired"
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
                self._ring = ChunkRing(self._chunk_nbytes)  # chunks of the failed read may still arrive in the old ring
