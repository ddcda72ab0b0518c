"""Chooses a replaced rank's hyperparameters and its donor, and keeps the history of its weights.

Equal arguments give equal results.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncdist import validation
from asyncdist.protocols.population_training.bayesian import BayesianExplore, Observation
from asyncdist.protocols.population_training.hyperparameters import Choice, Value
from asyncdist.protocols.population_training.options import ExploringOptions

#: Number of entries of a history that are kept in addition to the first, since the history is sent with the weights.
_COUNT_MAX: Final = 999


def first_values(options: ExploringOptions, rank: int) -> dict[str, Value]:
    """Return a rank's initial hyperparameters: the values in option ``initial``, and random values for all others."""
    generator = random.Random(f"{options.seed} first {rank}")
    drawn = {name: space.draw(generator) for name, space in options.spaces.items()}
    return {**drawn, **options.initial}


def explored(
    options: ExploringOptions,
    inherited: Mapping[str, Value],
    rank: int,
    round: int,
    *,
    known: Sequence[Observation] = (),
    iteration: int = 0,
    metric: float | None = None,
) -> dict[str, Value]:
    """Return the new values of a rank that has copied a donor with the values ``inherited``.

    Args:
        iteration: This rank's iteration. The draws depend on it, because a resumed job numbers its rounds from 1 again.
        known, metric: Observations, and the metric of the copied weights (larger is better), for
            :class:`BayesianExplore`.
    """
    generator = random.Random(f"{options.seed} explore {rank} {round} {iteration}")
    spaces, explore = options.spaces, options.explore
    if explore is not None and not isinstance(explore, BayesianExplore):
        found: Any = explore(dict(inherited), generator)
        if not isinstance(found, Mapping) or found.keys() != spaces.keys():
            allowed = f"a dict with the hyperparameters {', '.join(spaces)}"
            validation.refuse("the result of explore", found, allowed, TypeError)
        return {name: space.clipped(found[name]) for name, space in spaces.items()}
    changed: dict[str, Value] = {}
    for name, space in spaces.items():
        value, chance, factor = inherited[name], generator.random(), generator.choice(options.perturb)
        is_stuck = factor != 1.0 and value == 0 and not isinstance(space, Choice)  # no factor changes 0
        is_drawn = chance < options.resample_probability or is_stuck
        changed[name] = space.draw(generator) if is_drawn else space.perturbed(value, factor)
    if explore is None:
        return changed
    return {**changed, **explore.suggest(spaces, known, iteration, metric, generator)}


def donor_for(donors: Sequence[int], rank: int, round: int, seed: int) -> int:
    """Return the donor that a replaced rank copies in a round. All donors are equally likely.

    The loss of another donor does not change the choice, so a replacer can request the donor's weights early.
    """
    return max(donors, key=lambda donor: (random.Random(f"{seed} donor {round} {rank} {donor}").random(), donor))


# -- the history of a rank's weights ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineageEntry:
    """Records the hyperparameters with which a rank's current weights were trained from some iteration on.

    Attributes:
        iteration: Iteration at which ``rank`` began to train with these hyperparameters.
        round: Round in which the rank copied the weights of ``donor``; 0 for the first entry.
        donor: Rank whose weights were copied; -1 for the first entry.
    """

    iteration: int
    rank: int
    round: int
    donor: int
    hyperparameters: Mapping[str, Any] = field(hash=False)


def extended(lineage: Sequence[LineageEntry], entry: LineageEntry) -> tuple[LineageEntry, ...]:
    """Return a history, oldest entry first, with one more entry. The first and the newest entries are kept."""
    entries = (*lineage, entry)
    return entries if len(entries) <= _COUNT_MAX + 1 else (entries[0], *entries[-_COUNT_MAX:])


def pack_lineage(lineage: Sequence[LineageEntry]) -> str:
    """Return a history as a string that :func:`unpack_lineage` reads."""
    return json.dumps([[e.iteration, e.rank, e.round, e.donor, dict(e.hyperparameters)] for e in lineage])


def unpack_lineage(text: str) -> tuple[LineageEntry, ...]:
    """Return the history that :func:`pack_lineage` has packed.

    Raises:
        TypeError, ValueError: The string has another format.
    """
    rows = json.loads(text)
    return tuple(LineageEntry(int(i), int(rank), int(r), int(d), dict(values)) for i, rank, r, d, values in rows)
