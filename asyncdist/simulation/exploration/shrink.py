"""Shrinks a fault plan to the fewest faults, with the simplest numbers, that still fail.

The module runs nothing: the function that tells whether a plan fails is an argument.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from asyncdist.simulation.faults import Fault, check_plan


def shrink(plan: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> tuple[Fault, ...]:
    """Return the least of ``plan`` that fails: no fault can be left out, and no number made simpler.

    A fault may be needed only until the numbers of another one are simple, so both are done until nothing changes.

    Args:
        plan: it fails as a whole.
        fails: whether a plan does.
    """
    plan = tuple(plan)
    while (smaller := simplify(minimize(plan, fails), fails)) != plan:
        plan = smaller
    return plan


def minimize(plan: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> tuple[Fault, ...]:
    """Return a part of ``plan`` that fails, and passes without any one of its faults.

    Delta debugging: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.

    Args:
        plan: it fails as a whole.
        fails: whether a part of it does.
    """
    plan = tuple(plan)
    part_count = 2
    while len(plan) >= 2:
        bounds = [len(plan) * index // part_count for index in range(part_count + 1)]
        parts = [plan[low:high] for low, high in itertools.pairwise(bounds)]
        rests = [plan[:low] + plan[high:] for low, high in itertools.pairwise(bounds)]
        if (part := next(filter(fails, parts), None)) is not None:
            plan, part_count = part, 2
        elif (rest := next(filter(fails, rests), None)) is not None:
            plan, part_count = rest, max(part_count - 1, 2)
        elif part_count < len(plan):
            part_count = min(len(plan), 2 * part_count)
        else:
            break
    return plan


def simplify(plan: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> tuple[Fault, ...]:
    """Return ``plan`` with simpler numbers where it still fails: zero, one for counts, fewer digits. Ranks stay."""
    plan = tuple(plan)
    for index, name in [(i, f.name) for i, fault in enumerate(plan) for f in dataclasses.fields(fault)]:
        value = getattr(plan[index], name)
        if name in ("rank", "ranks", "source", "dest") or type(value) not in (int, float):
            continue
        simplest = 1 if isinstance(value, int) else value if name == "factor" else 0.0
        for simpler in _simpler(value, simplest):
            changes: dict[str, Any] = {name: simpler}
            try:
                candidate = (*plan[:index], dataclasses.replace(plan[index], **changes), *plan[index + 1 :])
                check_plan(candidate, sys.maxsize)
            except ValueError:
                continue
            if fails(candidate):
                plan = candidate
                break
    return plan


def _simpler(value: float, simplest: float) -> list[float]:
    """Return ``simplest``, and ``value`` with one digit, two and three."""
    if not value:
        return []
    magnitude = math.floor(math.log10(abs(value)))
    rounded = [round(value, digits - magnitude) for digits in range(3)]
    return [candidate for candidate in dict.fromkeys([simplest, *rounded]) if candidate != value]
