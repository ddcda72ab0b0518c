"""Reads and averages the snapshots that donors have published, in the background during training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncdist.collectives.one_sided import OutdatedError, VersionedWindow
from asyncdist.protocols.one_sided.selection import Choice, Sample
from asyncdist.protocols.own_state import NewWeights
from asyncdist.protocols.parameter_stream.receive_layout import ChunkRing
from asyncdist.tensors.byte_layout import Packing
from asyncdist.tensors.byte_views import byte_view
from asyncdist.tensors.flat_state import FlatBuffers, FlatState, SnapshotPool
from asyncdist.tensors.means import WeightedMean


@dataclass(slots=True, kw_only=True, eq=False)
class Replacement(NewWeights):
    """Stores one replacement of this rank's weights, until the average is applied or the replacement is abandoned.

    ``round`` is its number among this rank's replacements, from 1. ``weights`` has the weight of each donor's snapshot
    in the average; each is added when that donor's snapshot is read.

    Attributes:
        complete: Whether the next step may apply the average.
    """

    donors: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    iterations: tuple[int, ...] = ()
    best: int = -1
    average: FlatBuffers | None = None
    nbytes: int = 0
    complete: bool = False


class UnreadableError(Exception):
    """Raised if an attempt to read donors' snapshots has failed, but another attempt may succeed.

    The statistics count failures by the text up to the first colon, so it contains no ranks or values.
    """


class DonorReader:
    """Reads the metrics and snapshots that the other members have published, and averages the snapshots."""

    def __init__(
        self,
        others: Sequence[int],
        window: VersionedWindow,
        packing: Packing,
        flat: FlatState,
        counts: Counter[str],
        *,
        chunk_nbytes: int,
    ) -> None:
        self._others = others
        self._window = window
        self._packing = packing
        self._counts = counts
        self._chunk_nbytes = chunk_nbytes
        self._ring = ChunkRing(chunk_nbytes)
        self.accumulators = SnapshotPool(flat, accumulate=True)

    async def metrics(self, count_max: int, sample: Sample, deadline: float) -> dict[int, float]:
        """Return the newest published metrics of other members, by rank.

        Args:
            count_max: Maximum number of other members to ask. If there are more, a random sample of them is asked.
            deadline: Time on the loop's clock. Members that have not answered by then are omitted.
        """
        asked = self._others if len(self._others) <= count_max else sorted(sample(self._others, count_max))
        records = await self._window.published_by_each(asked, deadline=deadline)
        return {rank: record.metric for rank, record in records.items()}

    async def read(self, replacement: Replacement, choice: Choice, deadline: float) -> WeightedMean:
        """Average the newest snapshots of the chosen donors into ``replacement``, in rank order.

        Raises:
            UnreadableError: A snapshot was overwritten while it was read, or a chosen rank can no longer be a donor.
        """
        replacement.best = choice.best
        replacement.donors = replacement.weights = replacement.versions = replacement.iterations = ()
        mean = WeightedMean(len(choice.donors))
        for donor in choice.donors:
            await self._read_donor(replacement, choice, donor, mean, deadline)
        return mean

    def release(self, replacement: Replacement) -> None:
        """Give the memory of the replacement's average, if any, back to the pool."""
        if replacement.average is not None:
            self.accumulators.release(replacement.average)
            replacement.average = None

    async def _read_donor(
        self, replacement: Replacement, choice: Choice, donor: int, mean: WeightedMean, deadline: float
    ) -> None:
        """Add the newest snapshot of ``donor`` to the mean, even if it was published after ``donor`` was chosen.

        The best donor's integer and bool entries are copied.
        """
        record = await self._window.published_by(donor, deadline=deadline)
        if record is None:
            raise UnreadableError(f"a donor has left the policy: rank {donor}")
        weight = choice.weight(record.metric)
        if weight == 0.0:
            raise UnreadableError(f"a donor's newest metric has no weight: {record.metric} of rank {donor}")
        if replacement.average is None:
            replacement.average = self.accumulators.acquire()
        average, is_exact, ring = replacement.average, donor == choice.best, self._ring
        end = self._packing.nbytes if is_exact else self._packing.averaged_nbytes
        starts = range(0, end, self._chunk_nbytes)
        chunks = [ring.take(torch.uint8, min(self._chunk_nbytes, end - start)) for start in starts]
        mean.begin(weight)

        def take(index: int) -> None:
            start = starts[index]
            replacement.nbytes += chunks[index].nbytes
            self._counts["received"] += chunks[index].nbytes
            for piece in self._packing.pieces(start, start + chunks[index].nbytes):
                into = piece.of_flat(average.tensors[piece.dtype])
                if piece.averaged:
                    mean.add(into, piece.of_chunk(chunks[index]))
                elif is_exact:
                    into.copy_(piece.of_chunk(chunks[index]))

        try:
            if chunks:
                await self._window.read(donor, record, [byte_view(chunk) for chunk in chunks], take, deadline=deadline)
        except BaseException as error:
            if self._ring is ring:
                self._ring = ChunkRing(self._chunk_nbytes)  # chunks of the failed read may still arrive in the old ring
            if not isinstance(error, OutdatedError):
                raise
            self._counts["torn"] += 1
            raise UnreadableError(f"a snapshot was overwritten while it was read: {error}") from error
        replacement.donors += (donor,)
        replacement.weights += (weight,)
        replacement.versions += (record.version,)
        replacement.iterations += (record.iteration,)
