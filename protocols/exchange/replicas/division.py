"""Lets an exchange decide on replicas of several ranks as a whole, and divides the model among a replica's ranks.

Only counterparts (ranks with the same part of the model) exchange data, but all ranks are members of one exchange. A
replica contributes all of its parts or none. A replica with a lost rank or a non-finite part is left out.

A mean is added to the fragments' states only when all members have received it. If a rank is lost before that, no
member has added any part, and the round is decided again for all parts. All parts of a round therefore have the same
donors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncdist.protocols.exchange.ledger import Report, Weighing
from asyncdist.protocols.joining.replica_layout import Replicas
from asyncdist.tensors.flat_state import Entry


def weighing_of(replicas: Replicas, weigh: Weighing) -> Weighing:
    """Convert ``weigh``, which decides on replicas, to a function that decides on ranks.

    ``weigh`` gets one report for each replica whose ranks have all reported, keyed by the replica's first rank. This
    report has the means of the ranks' weights and scores, and the norm of all parts together. The new function returns
    the weight of each rank.
    """
    if replicas.size == 1:
        return weigh

    def weigh_replicas(reports: Mapping[int, Report]) -> Mapping[int, float]:
        whole = {}
        for first in replicas.ranks[:: replicas.size]:
            replica_ranks = replicas.replica_ranks(first)
            if all(rank in reports for rank in replica_ranks):
                whole[first] = _joint([reports[rank] for rank in replica_ranks])
        return {rank: weight for first, weight in weigh(whole).items() for rank in replicas.replica_ranks(first)}

    return weigh_replicas


def _joint(reports: Sequence[Report]) -> Report:
    weight = math.fsum(report.weight for report in reports) / len(reports)
    scores = tuple(sum(each) / len(reports) for each in zip(*(report.scores for report in reports), strict=False))
    return Report(weight, math.hypot(*(report.norm for report in reports)), scores)


def parts_of(
    entries: Sequence[Entry], chosen: Sequence[int], parameters: set[str], count: int
) -> tuple[tuple[int, ...], ...]:
    """Divide a fragment into ``count`` parts of similar size, for replicas whose ranks all have the whole model.

    Parameters are divided by size. All other entries, such as BatchNorm's statistics, belong to part 0, because DDP
    uses the first rank's values.

    Args:
        chosen: Indices of the fragment's entries.
        parameters: Names of the model's parameters.

    Returns:
        The indices of each part's entries in ascending order. A part may be empty.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    nbytes = [0] * count
    sizes = {index: math.prod(entries[index].shape) * entries[index].dtype.itemsize for index in chosen}
    trained = {index for index in chosen if not parameters.isdisjoint(entries[index].names)}
    for index in sorted(chosen, key=lambda index: (index in trained, -sizes[index], index)):
        part = nbytes.index(min(nbytes)) if index in trained else 0
        parts[part].append(index)
        nbytes[part] += sizes[index]
    return tuple(tuple(sorted(part)) for part in parts)
