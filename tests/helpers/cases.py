"""Collects the cases of all modules by name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import asyncdist as ad
from helpers import cases_everyday, cases_models, cases_roles, cases_soups

Case = Callable[[ad.World], Coroutine[Any, Any, None]]
MODULES = (cases_everyday, cases_models, cases_roles, cases_soups)


def all_cases() -> dict[str, Case]:
    """Return all cases by name, such as ``everyday.zero_only`` for :func:`helpers.cases_everyday.case_zero_only`."""
    return {
        f"{module.__name__.partition('cases_')[2]}.{name.removeprefix('case_')}": case
        for module in MODULES
        for name, case in vars(module).items()
        if name.startswith("case_")
    }


async def run_case(world: ad.World, name: str) -> str:
    """Run a case and return its name."""
    await all_cases()[name](world)
    return name
