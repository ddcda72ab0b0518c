"""Makes a replaced rank's hyperparameters: draws new values, perturbs the donor's, or calls the user's function."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from asyncdist import validation
from asyncdist.protocols.population_training.bayesian import BayesianExplore, Observation
from asyncdist.protocols.population_training.hyperparameters import Choice, Space, Value
from asyncdist.protocols.population_training.options import ExploreFunction


class Explorer:
    """Draws a rank's initial hyperparameters, and changes the hyperparameters that it copies from a donor.

    Equal arguments give equal results.

    Args:
        spaces: Possible values of each hyperparameter, by name.
        factors: Factors of perturbations, from which one is drawn.
        function: User's function that replaces the perturbations, or None.
    """

    def __init__(
        self,
        spaces: Mapping[str, Space],
        *,
        factors: Sequence[float],
        resample_probability: float,
        function: ExploreFunction | None,
        seed: int,
    ) -> None:
        self._spaces = spaces
        self._factors = tuple(factors)
        self._resample_probability = resample_probability
        self._function = function
        self._seed = seed

    def first(self, rank: int, given: Mapping[str, Value]) -> dict[str, Value]:
        """Return a rank's initial hyperparameters: the values in ``given``, and random values for the others."""
        generator = random.Random(f"{self._seed} first {rank}")
        drawn = {name: space.draw(generator) for name, space in self._spaces.items()}
        return {**drawn, **given}

    def explored(
        self,
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
            iteration: This rank's iteration. The draws depend on it, because a job that continues from a saved state
                numbers rounds from 1 again.
            known, metric: Observations, and the metric of the copied weights (larger is better), for
                :class:`BayesianExplore`.
        """
        generator = random.Random(f"{self._seed} explore {rank} {round} {iteration}")
        if self._function is not None and not isinstance(self._function, BayesianExplore):
            return self._checked(self._function(dict(inherited), generator))
        changed = {name: self._changed(name, inherited[name], generator) for name in self._spaces}
        if self._function is None:
            return changed
        return {**changed, **self._function.suggest(self._spaces, known, iteration, metric, generator)}

    def _changed(self, name: str, value: Value, generator: random.Random) -> Value:
        space, chance, factor = self._spaces[name], generator.random(), generator.choice(self._factors)
        is_stuck = factor != 1.0 and value == 0 and not isinstance(space, Choice)  # no factor changes 0
        if chance < self._resample_probability or is_stuck:
            return space.draw(generator)
        return space.perturbed(value, factor)

    def _checked(self, found: Any) -> dict[str, Value]:
        if not isinstance(found, Mapping) or found.keys() != self._spaces.keys():
            names = ", ".join(self._spaces)
            validation.refuse("the result of explore", found, f"a dict with the hyperparameters {names}", TypeError)
        return {name: space.clipped(found[name]) for name, space in self._spaces.items()}


def donor_for(donors: Sequence[int], rank: int, round: int, seed: int) -> int:
    """Return the donor that a replaced rank copies in a round. All donors are equally likely.

    The loss of a different donor does not change the choice, so a replacer can request the donor's weights early.
    """
    return max(donors, key=lambda donor: (random.Random(f"{seed} donor {round} {rank} {donor}").random(), donor))
