"""Tests when rank 0 announces the labels of lines that all ranks print."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist import environment, rank_program
from asyncdist.integrations import joining


@pytest.mark.parametrize(
    ("rank", "size", "prefix", "count"), [(0, 2, "", 1), (1, 2, "", 0), (0, 1, "", 0), (0, 2, "1", 0)]
)
def test_rank_0_names_prefix_once_where_several_print(
    rank: int, size: int, prefix: str, count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world: Any = SimpleNamespace(rank=rank, size=size)
    monkeypatch.setattr(joining, "_told", set())
    monkeypatch.setattr(environment, "VARIABLES", {rank_program.PREFIX_VARIABLE: prefix})
    for _ in range(2):
        joining.warn_of_unlabelled_lines(world, "or let rank 0 alone print")
    assert caplog.text.count("asyncdist run --prefix") == count
    assert caplog.text.count("or let rank 0 alone print") == count
