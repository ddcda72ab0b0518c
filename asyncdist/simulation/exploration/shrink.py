"""Shrinks a failing fault plan to the fewest faults, with the simplest numbers, that still fail."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from asyncdist.simulation.faults import Fault, check_plan


def shrink(plan: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> tuple[Fault, ...]:
    """Return a minimal subset of ``plan`` that fails, with numbers that are as simple as possible.

    ``fails`` runs a plan and returns whether it fails. Removing faults and simplifying numbers alternate until nothing
    changes, because a simpler number may make another fault unnecessary.
    """
    plan = tuple(plan)
    while (smaller := simplify(minimize(plan, fails), fails)) != plan:
        plan = smaller
    return plan


def minimize(plan: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> tuple[Fault, ...]:
    """Return a subset of ``plan`` that fails, but passes if any one of its faults is removed.

    The algorithm is delta debugging (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002).
    ``fails`` runs a plan and returns whether it fails.
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
    """Return a plan that still fails, with simpler numbers (0, 1 for counts, fewer digits) but the same ranks."""
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
    """Return simpler candidates for ``value``: ``simplest``, and the value rounded to one, two and three digits."""
    if not value:
        return []
    magnitude = math.floor(math.log10(abs(value)))
    rounded = [round(value, digits - magnitude) for digits in range(3)]
    return [candidate for candidate in dict.fromkeys([simplest, *rounded]) if candidate != value]
