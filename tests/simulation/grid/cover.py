"""Covers all pairs of values on two axes with few cases."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import TypeAlias

from simulation.grid.axes import Case, axes_of

Pair: TypeAlias = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(case: Case) -> set[Pair]:
    """Return all pairs of values of a case."""
    return set(itertools.combinations(case.values, 2))


def all_pairs(policy: str) -> set[Pair]:
    """Return all pairs of values on two different axes of a policy."""
    axes = [[(axis, value) for value in values] for axis, values in axes_of(policy).items()]
    return {pair for one, two in itertools.combinations(axes, 2) for pair in itertools.product(one, two)}


def drawn(policy: str, chance: random.Random, fixed: Pair | tuple[()] = (), share: float = 0.3) -> Case:
    """Return a random case with the values ``fixed``. Most other axes are drawn with probability ``share``."""
    given = dict(fixed)
    values = []
    for axis, names in axes_of(policy).items():
        is_free = axis in ("model", "optimizer", "event") or chance.random() < share
        values.append((axis, given.get(axis, chance.choice(names) if is_free else names[0])))
    return Case(policy, tuple(values), chance.randrange(1000))


def cover(policy: str, allowed: Callable[[Case], bool], seed: int, tries: int = 12) -> Iterator[Case]:
    """Yield allowed cases until each pair of values that an allowed case can have is in one of them.

    A pair for which no allowed case is found in ``tries`` draws is left out.
    """
    chance = random.Random(f"{policy} {seed}")
    open_pairs = all_pairs(policy)
    order = sorted(open_pairs)
    chance.shuffle(order)
    for pair in order:
        if pair not in open_pairs:
            continue
        found = [drawn(policy, chance, pair, share) for share in (0.6, 0.3, 0.1) for _ in range(tries // 3)]
        fit = [case for case in found if allowed(case)]
        if fit:
            best = max(fit, key=lambda case: len(open_pairs & pairs_of(case)))
            open_pairs -= pairs_of(best)
            yield best
