"""Measures the cost of a step of the one-sided policy in which it neither publishes nor replaces.

As ``step.py`` times the other policy's step, with its models, its other task and its rival: every single ``await
policy.step()`` of a tight loop, on both ranks at once. The exposure is open and each rank has published once, so there
is something to read; the next cadence is far away. ``"age"`` is the mode that has something to look at in every step.
"""

from __future__ import annotations

import functools
from typing import Final

import step
from harness import Results, main, optimizer_of
from torch import nn

import asyncdist as ad
from protocols import OneSidedSelectiveAveragingPolicy

RANKS: Final = (2,)
FULL: Final = step.FULL
QUICK: Final = step.QUICK
_NEVER: Final = 10**9


def policy_of(model: nn.Module) -> OneSidedSelectiveAveragingPolicy:
    """A policy that is due in its first step, and then not for a long time."""
    policy = OneSidedSelectiveAveragingPolicy(
        model, optimizer_of(model), average_every=_NEVER, age_range=(_NEVER, _NEVER), metric=lambda: 0.0
    )
    policy.iteration = _NEVER - 1
    return policy


async def measure(world: ad.World, settings: step.Settings) -> Results | None:
    """Alternate the models; each block has its own policy."""
    return await step.measure(world, settings, policy_of=policy_of)


rows: Final = functools.partial(step.rows, kind="one-sided idle step")


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
