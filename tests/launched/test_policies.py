"""Tests the policies in real processes: 2 and 4 ranks under mpirun and on torch, with one job each for many tests.

``scripts/policies.py`` contains the programs; its job fails if anything is left over.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from scripts.population import Mixed, Story, flat_state
from support import mpi, torchrun

from asyncdist.host_memory import cross_memory_attach
from protocols import AverageApplied

SIZES = (pytest.param(2, marks=pytest.mark.long), 4)
MIB = 1 << 20
STATE = flat_state(Mixed())
FLOATING_NBYTES = sum(tensor.nbytes for name, tensor in STATE.items() if name.startswith("float"))
EXACT_NBYTES = sum(tensor.nbytes for name, tensor in STATE.items() if not name.startswith("float"))


Told: TypeAlias = Callable[[int, str], list[dict[str, Any]]]
STARTERS: dict[str, Callable[..., mpi.Result | torchrun.Result]] = {"mpi": mpi.run_ranks, "torch": torchrun.run_ranks}


@functools.cache
def stories(transport: str, ranks: int) -> list[dict[str, Any]]:
    """Return the observations of each rank."""
    result = STARTERS[transport](ranks, "tests/scripts/policies.py", timeout_s=110).check()
    return [result.reports[rank] for rank in range(ranks)]


@pytest.fixture(params=[pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)])
def told(request: pytest.FixtureRequest) -> Told:
    """Return ``told(ranks, name)``: the observations of each of these ranks in one program."""
    return lambda ranks, name: [report[name] for report in stories(request.param, ranks)]


@pytest.mark.parametrize("ranks", SIZES)
def test_only_the_worst_changes_to_exactly_the_others_mean(told: Told, ranks: int) -> None:
    worst, *others = told(ranks, "exactness")
    mean = sum(range(1, ranks)) / (ranks - 1)
    assert worst["replacements"] == 3 and worst["floating"] == [mean]
    assert worst["integers"] == sorted({ranks - 1.0, 1.0})
    assert worst["nbytes"] == [(ranks - 1) * FLOATING_NBYTES + EXACT_NBYTES] * 3
    assert worst["donors"] == [list(range(1, ranks))] * 3
    for other in others:
        assert other["replacements"] == 0 and other["unchanged"]


@pytest.mark.parametrize("ranks", SIZES)
def test_a_metric_that_is_no_number_ranks_worst_and_is_counted(told: Told, ranks: int) -> None:
    *others, last = told(ranks, "diverged")
    assert last["replacements"] == 2 and last["floating"] == [sum(range(ranks - 1)) / (ranks - 1)]
    assert all(other["replacements"] == 0 and other["unchanged"] for other in others)
    assert others[0]["nonfinite_reports"] >= 2


@pytest.mark.parametrize("ranks", SIZES)
def test_every_average_is_the_one_of_its_donors_snapshots(told: Told, ranks: int) -> None:
    """The averages are recomputed here from the donors' reports, bit for bit."""
    reports, story = told(ranks, "walk"), Story()
    for rank, report in enumerate(reports):
        for number, state in report["snapshots"]:
            story.snapshots[number, rank] = typed(state)
        for number, donors, weights, best, state, before in report["applications"]:
            event = AverageApplied(number, tuple(donors), tuple(weights), best, 0, typed(state))
            story.applications.append((rank, event, typed(before)))
    assert story.verify(momentum=0.25) == sum(report["replacements"] for report in reports) >= 4


def typed(state: dict[str, list[float]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(numbers, dtype=getattr(torch, name)) for name, numbers in state.items()}


@pytest.mark.parametrize("ranks", SIZES)
def test_average_all_waits_for_all_and_names_who_left(told: Told, ranks: int) -> None:
    reports = told(ranks, "together")
    mean = sorted({float(torch.tensor(sum(range(ranks)), dtype=t) / ranks) for t in (torch.float32, torch.float64)})
    for rank, report in enumerate(reports):
        assert report["floating"] == [mean] * 3 and report["integers"] == [0.0]
        assert (f"rank {ranks - 1} left" in report["left"]) == (rank != ranks - 1) or "left" in report["left"]
    assert f"rank {ranks - 1} left" in reports[0]["left"]


@pytest.mark.parametrize("ranks", SIZES)
def test_a_policy_that_cannot_start_says_why_on_every_rank(told: Told, ranks: int) -> None:
    *there, absent = told(ranks, "missing")
    assert not absent["error"]
    assert all(f"missing=({ranks - 1},)" in report["error"] for report in there)
    for report in told(ranks, "different"):
        assert "'1.weight'" in report["error"], report
    for report in told(ranks, "disagreeing"):
        for what, here, there in (
            ("class", "AsyncSelectiveAveragingPolicy", "AverageAllPolicy"),
            ("name", "a", "b"),
            ("option", "average_every .*2", "3"),
        ):
            assert re.search(rf"\b{here} .*rank 0 .*\b{there} .*rank {ranks - 1}\b", report[what]), report


def test_large_snapshots_of_one_host_are_read_in_donor_memory(told: Told) -> None:
    worst, *others = told(4, "near")
    assert worst["replacements"] == 4 and worst["weights"] == [2.0] and worst["nbytes"] == [3 * 2 * MIB] * 4
    assert worst["received_nbytes"] == worst["read_nbytes"] + sum(other["sent_nbytes"] for other in others)
    if cross_memory_attach.obstacle() is None:
        assert worst["read_nbytes"] >= 2 * 3 * 2 * MIB
    assert all(other["unchanged"] and not other["read_nbytes"] for other in others)


def test_64_mib_arrive_whole_with_the_expected_bytes_on_the_wire(told: Told) -> None:
    """Two donors send the averaged bytes to each of two replacers, and the exact bytes once per replacer."""
    reports = told(4, "large")
    averaged, exact = 4096 * 4096 * 4, 5 * 8
    assert [report["replacements"] for report in reports] == [1, 1, 0, 0]
    for replacer in reports[:2]:
        assert (replacer["low"], replacer["high"]) == (2.5, 2.5) and replacer["counter"] == [3] * 5
        assert replacer["nbytes"] == [2 * averaged + exact] == [replacer["received_nbytes"]]
    assert all(donor["unchanged"] and donor["received_nbytes"] == 0 for donor in reports[2:])
    assert reports[0]["rounds"] == 1 and not any(report["abandoned"] for report in reports)
    sent = [report["sent_nbytes"] for report in reports]
    assert sent == [0, 0, 2 * averaged, 2 * (averaged + exact)]
    assert sum(sent) == sum(report["received_nbytes"] for report in reports) == 2 * 2 * averaged + 2 * exact


def test_64_mib_travel_once_if_each_donor_adds_up_one_half(told: Told) -> None:
    """Each donor sends one half to the other donor, and the mean of its own half to both replacers."""
    reports = told(4, "sharded")
    half, low, high = 4096 * 4096 * 4 // 2, 2 * 8, 3 * 8  # of the averaged bytes; the counter has five elements
    for replacer in reports[:2]:
        assert (replacer["low"], replacer["high"]) == (2.5, 2.5) and replacer["counter"] == [3] * 5
        assert replacer["nbytes"] == [2 * half + low + high] == [replacer["received_nbytes"]]
    assert all(donor["unchanged"] for donor in reports[2:])
    assert [report["received_nbytes"] for report in reports[2:]] == [half + low, half]
    assert [report["sent_nbytes"] for report in reports] == [0, 0, 3 * half + 2 * low, 3 * half + low + 2 * high]
    assert not any(report["abandoned"] for report in reports)


def test_a_straggler_is_replaced_and_the_others_keep_their_rate(told: Told) -> None:
    reports = told(4, "straggler")
    slow = reports[1]
    assert slow["replacements"] == 3
    for rank in (0, 2, 3):
        assert reports[rank]["steps"] > 2.5 * slow["steps"], reports
    # their steps are pauses of 4 ms, so that waiting for the straggler once per round would show
    assert reports[0]["rounds"] >= 3


def test_the_others_go_on_when_the_last_rank_leaves(told: Told) -> None:
    reports = told(4, "leaver")
    assert reports[0]["replacements"] == 3 and reports[3]["steps"] == 1 and reports[3]["unchanged"]
    assert reports[0]["donors"][-2:] == [[1, 2], [1, 2]]


def test_the_others_go_on_when_the_coordinators_rank_leaves(told: Told) -> None:
    reports = told(4, "headless")
    assert reports[0]["steps"] == 1 and reports[0]["unchanged"]
    assert reports[1]["replacements"] == 3 and reports[1]["donors"][-2:] == [[2, 3], [2, 3]]
    assert reports[0]["applied"]["1"] >= 2  # its task continues, as a part of the world
