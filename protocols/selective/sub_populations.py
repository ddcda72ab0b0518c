"""Chooses which ranks copy which in a population whose sub-populations change at different intervals (MF-PBT).

The rules are from Doulazmi et al. (2506.03225). In a decision in which a sub-population evolves:

- Its worst quantile copies its best quantile, each in the order of the metric.
- Its second-worst quantile is compared with all ranks of the other sub-populations. In turn, each rank copies the best
  of them that remains, a *migrant*, if the migrant is better.

A rank has at most one role in a round. Unlike in the paper, a replaced rank is therefore not copied, and a copied rank
is not replaced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncdist.protocols.ranking import is_worse, order_worst_first, replacer_count


def parents_of(
    metrics: Mapping[int, float],
    sub_populations: Sequence[Sequence[int]],
    periods: Sequence[int],
    numbers: range,
    *,
    quantile: float,
    metric_mode: str,
) -> dict[int, int]:
    """Map each replaced rank to the rank that it copies.

    Args:
        periods: Number of rounds after which each sub-population evolves.
        numbers: Numbers of the rounds since the previous decision, one for each report of the fastest rank. A
            sub-population evolves if one of them is a multiple of its period.
        quantile: Fraction of a sub-population's participants that copies its best ranks, and fraction that may copy
            migrants. At most 0.5.
    """
    best_first = list(reversed(order_worst_first(metrics, metric_mode)))
    before, last = numbers.start - 1, numbers.stop - 1
    evolving = [place for place, period in enumerate(periods) if last // period > before // period]
    ranked = {place: [rank for rank in best_first if rank in set(sub_populations[place])] for place in evolving}
    shares = {place: min(replacer_count(len(ranks), quantile), len(ranks) // 2) for place, ranks in ranked.items()}
    parents: dict[int, int] = {}
    for place, ranks in ranked.items():
        share = shares[place]
        pairs = zip(ranks[len(ranks) - share :], ranks[:share], strict=True)
        parents |= {rank: donor for rank, donor in pairs if math.isfinite(metrics[donor])}
    for place, ranks in ranked.items():
        share, own = shares[place], set(sub_populations[place])
        migrants = [rank for rank in best_first if rank not in own and rank not in parents]
        migrants = [rank for rank in migrants if math.isfinite(metrics[rank])]
        for rank in ranks[max(share, len(ranks) - 2 * share) : len(ranks) - share]:
            if migrants and rank not in parents.values() and is_worse(metrics[rank], metrics[migrants[0]], metric_mode):
                parents[rank] = migrants.pop(0)
    return parents
