"""Tests cases of the grid, and that the grid has all policies and options and finds planted faults."""

from __future__ import annotations

import inspect
import itertools
import random
from typing import Any

import pytest
import torch
from support.seeds import seeds

from asyncdist.functional.checkpoints import population_loading
from protocols import AverageAllPolicy, StepInfo
from simulation.grid import search
from simulation.grid.axes import DEFAULT, LEFT_OUT, OPTIONS, Case, axes_of, exported, kind_of
from simulation.grid.cover import all_pairs, cover, drawn, pairs_of
from simulation.grid.oracles import check


def test_each_exported_policy_and_option_is_on_an_axis() -> None:
    assert sorted(OPTIONS) == exported()
    taken: set[str] = set()
    for policy in exported():
        options = set(inspect.signature(kind_of(policy)).parameters) - {"model", "optimizer"} - LEFT_OUT
        taken |= options
        assert options <= axes_of(policy).keys(), policy
        assert all(set(axes_of(policy)[name]) - {DEFAULT} for name in options), policy
    assert {name for values in OPTIONS.values() for name in values} <= taken


def test_a_cover_contains_all_pairs_that_are_allowed() -> None:
    refused = ("event", "joined"), ("lr", "zero")

    def allowed(case: Case) -> bool:
        return not all(case[axis] == value for axis, value in refused)

    found = list(cover("AverageAllPolicy", allowed, seed=0))
    wanted = {pair for pair in all_pairs("AverageAllPolicy") if set(pair) != set(refused)}
    assert set().union(*map(pairs_of, found)) == wanted
    assert all(map(allowed, found)) and len(found) < 1000


def test_a_shown_case_can_be_made_again() -> None:
    for policy in exported():  # some of them have an option "seed"
        case = drawn(policy, random.Random(3), share=1.0)
        assert eval(str(case)) == case


@pytest.mark.parametrize("seed", seeds(12))
@pytest.mark.parametrize("policy", exported())
def test_seeds(policy: str, seed: int) -> None:
    check(drawn(policy, random.Random(f"{policy} {seed}")))


def test_a_search_tries_each_policy_in_turn() -> None:
    found = list(itertools.islice(search.cases(1), len(OPTIONS)))
    assert [case.policy for case in found] == exported()


def test_a_step_that_changes_weights_secretly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AverageAllPolicy._step

    async def step(self: Any, metric: Any) -> StepInfo:
        info = await original(self, metric)
        if self.iteration == 6:
            with torch.no_grad():
                next(self.model.parameters()).add_(1.0)
        return info

    monkeypatch.setattr(AverageAllPolicy, "_step", step)
    with pytest.raises(AssertionError, match="reports no average"):
        check(Case.of("AverageAllPolicy", average_every="2"))


def test_a_checkpoint_without_moments_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population_loading, "load_exactly", lambda optimizer, state: None)
    with pytest.raises(AssertionError, match="must not change them"):
        check(Case.of("AverageAllPolicy", average_every="2", optimizer="momentum", start="resumed"))
