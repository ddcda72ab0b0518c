"""Yields the cases of many covers of all pairs of values, for a long search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from simulation.grid.axes import Case, exported
from simulation.grid.cover import cover
from simulation.grid.models import can_train
from simulation.grid.oracles import check, refusal_of

#: Result of :func:`run` for a case that is refused with one clear error.
REFUSED: Final = "refused"


def cases(seed: int) -> Iterator[Case]:
    """Yield the cases of one cover of each policy, taking the policies in turn, and then of new covers, forever."""
    for number in itertools.count(seed):
        covers = [cover(policy, is_allowed, number) for policy in exported()]
        while covers:
            for each in list(covers):
                case = next(each, None)
                if case is None:
                    covers.remove(each)
                else:
                    yield case


def is_allowed(case: Case) -> bool:
    """Return whether torch can train the model, and the policy's constructor accepts the case."""
    return can_train(case["model"], case["optimizer"]) and not refusal_of(case)


def run(case: Case) -> str:
    """Run a case, and return "", :data:`REFUSED`, or the case and its failure."""
    try:
        return REFUSED if check(case) else ""
    except Exception as error:
        return f"{case}\n    {type(error).__name__}: {error}"
