"""Tests when rank 0 announces the labels of lines that all ranks print."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist import environment, rank_program
from asyncdist.integrations import joining


def world_of(rank: int, size: int, *, shares_process: bool) -> Any:
    transport = SimpleNamespace(capabilities=SimpleNamespace(shares_process=shares_process))
    services = SimpleNamespace(engine=SimpleNamespace(transport=transport))
    return SimpleNamespace(rank=rank, size=size, awaited=SimpleNamespace(services=services))


@pytest.mark.parametrize(
    ("rank", "size", "prefix", "count"), [(0, 2, "", 1), (1, 2, "", 0), (0, 1, "", 0), (0, 2, "1", 0)]
)
def test_rank_0_names_prefix_once_where_several_print(
    rank: int, size: int, prefix: str, count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_of(rank, size, shares_process=False)
    monkeypatch.setattr(joining, "_logged", set())
    monkeypatch.setattr(environment, "VARIABLES", {rank_program.PREFIX_VARIABLE: prefix})
    for _ in range(2):
        joining.warn_of_unlabelled_lines(world, "or let rank 0 alone print")
    assert caplog.text.count("asyncdist run --prefix") == count
    assert caplog.text.count("or let rank 0 alone print") == count


def test_ranks_of_one_process_are_not_sent_to_a_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: under run_local the warning named an option of ``asyncdist run``."""
    monkeypatch.setattr(joining, "_logged", set())
    joining.warn_of_unlabelled_lines(world_of(0, 2, shares_process=True), "let rank 0 alone print")
    assert "let rank 0 alone print" in caplog.text and "asyncdist run" not in caplog.text
