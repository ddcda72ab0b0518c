"""The cases of ``helpers``, on local ranks."""

from __future__ import annotations

import pytest
from helpers.cases import all_cases, run_case

import asyncdist as ad

NAMES = list(all_cases())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_local(name: str, ranks: int) -> None:
    assert ad.run_local(run_case, name, ranks=ranks, strict=True) == [name] * ranks
