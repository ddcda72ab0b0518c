"""Measures the cost of a step of the one-sided policy in which it neither publishes nor replaces.

Models, other task and rival are as in ``step.py``. Both ranks time every ``await policy.step()`` of a tight loop at
once. Each rank has published once, so there is something to read, and the next cadence is far away. The mode ``"age"``
is measured, because it checks something in every step.
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
    """Return a policy that is due in its first step, and then not for a long time."""
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
