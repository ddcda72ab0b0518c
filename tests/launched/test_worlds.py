"""Tests the table of worlds in docs/worlds.md: one file, started in each world, gives the same bits.

``scripts/worlds.py`` is this file. Its expected output is computed here by plain torch, without a world: the training
steps of all ranks in turn, and the averages by hand. ``test_slurm.py`` starts jobs by ``srun``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import worlds, worlds_blocking
from support import mpi, torchrun, warm
from support.facts import names

import asyncdist as ad
from asyncdist.launch import mpirun

SCRIPT = Path(worlds.__file__)
BLOCKING = Path(worlds_blocking.__file__)
RANKS = 3
TIMEOUT_S = 300.0  # most starts import torch three times

LAUNCH_SUBPROCESSES = f"""
import asyncdist as ad
from scripts import worlds, worlds_blocking
if __name__ == "__main__":
    ad.launch_subprocesses(worlds.main, ad.MultiprocessConfig(world_size={RANKS}))
"""


# -- by hand ----------------------------------------------------------------------------------------------------------


@functools.cache
def by_hand(ranks: int) -> list[list[float]]:
    """Return the final weights of all ranks: rank 0 has taken the others' average twice, after four steps each."""
    made = [worlds.build(rank) for rank in range(ranks)]
    for number, strategy in enumerate(worlds.STRATEGIES):
        for rank, (model, optimizer) in enumerate(made):
            for step in range(worlds.EVERY):
                worlds.train_step(model, optimizer, rank, worlds.EVERY * number + step)
        if ranks > 1:
            take_average([model for model, _ in made], strategy)
    for rank, (model, optimizer) in enumerate(made):
        worlds.train_step(model, optimizer, rank, worlds.EVERY * len(worlds.STRATEGIES))
    return [worlds.weights_of(model) for model, _ in made]


@torch.no_grad()
def take_average(models: list[torch.nn.Module], strategy: str) -> None:
    """Average as the policy does. Rank r's metric is r - ranks, so rank 0 is the worst, and rank r is better by r."""
    worst, *donors = models
    weights = [1.0] * len(donors) if strategy == "mean" else [float(rank) for rank in range(1, len(models))]
    for parameter, *given in zip(worst.parameters(), *(donor.parameters() for donor in donors), strict=True):
        total = torch.zeros_like(parameter)
        for tensor, weight in zip(given, weights, strict=True):
            total += tensor * weight
        parameter.copy_(total / sum(weights))


def test_the_averages_make_a_difference() -> None:
    """Without averages, equal weights would prove little."""
    alone, two, three = by_hand(1), by_hand(2), by_hand(RANKS)
    assert alone[0] not in two + three and two[0] not in three and two[1] == three[1]
    assert len({tuple(weights) for weights in three}) == RANKS


# -- processes --------------------------------------------------------------------------------------------------------


def plain_mpirun() -> tuple[list[str], dict[str, str]]:
    """Return the mpirun of the library that mpi4py loads, with the options that root and few cores need."""
    mpi.require_mpi()
    installation = mpirun.find_installation(os.environ)
    flavour = mpirun.choose_flavour(installation, None)
    options = ["--host", f"localhost:{RANKS}", "--bind-to", "none"] if flavour == "openmpi" else []
    command = [installation.launchers[flavour], "-n", str(RANKS), *options, sys.executable, str(SCRIPT)]
    return command, mpirun.build_environment(flavour, {}, ranks=RANKS, threads=1)


def asyncdist_run(*options: str, script: Path = SCRIPT) -> tuple[list[str], dict[str, str]]:
    """The ranks start warm: plain mpirun, and a benchmark's command on torch, test cold ranks."""
    program = warm.command(script, (), mpi.base_environment(), {})
    return [sys.executable, "-m", "asyncdist", "run", *options, "-n", str(RANKS), *program], {}


def asyncdist_run_on_mpi() -> tuple[list[str], dict[str, str]]:
    mpi.require_mpi()
    return asyncdist_run()


def asyncdist_run_on_torch() -> tuple[list[str], dict[str, str]]:
    return asyncdist_run("--transport", "torch")


def blocking_on_mpi() -> tuple[list[str], dict[str, str]]:
    mpi.require_mpi()
    return asyncdist_run(script=BLOCKING)


def blocking_on_torch() -> tuple[list[str], dict[str, str]]:
    return asyncdist_run("--transport", "torch", script=BLOCKING)


def torch_run() -> tuple[list[str], dict[str, str]]:
    options = ["--standalone", "--nproc-per-node", str(RANKS)]
    program = warm.command(SCRIPT, (), mpi.base_environment(), {})
    return [sys.executable, "-m", "torch.distributed.run", *options, *program], {}


def launch_subprocesses() -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-c", LAUNCH_SUBPROCESSES], {}


def asyncdist_sim(script: Path = SCRIPT) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "asyncdist", "sim", str(script), "--ranks", str(RANKS), "--seed", "7"], {}


def blocking_in_sim() -> tuple[list[str], dict[str, str]]:
    return asyncdist_sim(BLOCKING)


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("command", "world"),
    [
        pytest.param(plain_mpirun, "mpi", marks=[pytest.mark.mpi, pytest.mark.long]),
        pytest.param(asyncdist_run_on_mpi, "mpi", marks=[pytest.mark.mpi, pytest.mark.long]),
        (asyncdist_run_on_torch, "torch"),
        pytest.param(torch_run, "torch", marks=pytest.mark.long),
        pytest.param(launch_subprocesses, "torch", marks=pytest.mark.long),
        pytest.param(asyncdist_sim, "sim", marks=pytest.mark.long),
        pytest.param(blocking_on_mpi, "mpi", marks=pytest.mark.mpi),
        pytest.param(blocking_on_torch, "torch", marks=pytest.mark.long),
        pytest.param(blocking_in_sim, "sim", marks=pytest.mark.long),
    ],
)
def test_every_way_to_start_three_ranks_ends_with_the_same_bits(
    command: Callable[[], tuple[list[str], dict[str, str]]], world: str
) -> None:
    result = torchrun.run_jobs([command()], TIMEOUT_S).check()
    assert told(result.stdout) == {"world": world, "ranks": RANKS, "weights": by_hand(RANKS)}


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_ranks_that_are_told_by_variables_alone() -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by any other program."""
    result = torchrun.run_ranks(2, SCRIPT, timeout_s=TIMEOUT_S).check()
    assert told(result.stdout) == {"world": "torch", "ranks": 2, "weights": by_hand(2)}


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("script", [SCRIPT, pytest.param(BLOCKING, marks=pytest.mark.long)])
def test_python_alone_is_one_rank_that_keeps_its_weights(script: Path) -> None:
    result = torchrun.run_alone(script, timeout_s=TIMEOUT_S).check()
    assert result.stderr.count("\n") == 1 and names(result.stderr, f"asyncdist run -n 4 {script}"), result.stderr
    assert told(result.stdout) == {"world": "local", "ranks": 1, "weights": by_hand(1)}


def told(output: str) -> Any:
    """Return the only line of rank 0."""
    [line] = [line for line in output.splitlines() if line.startswith('{"world"')]
    return json.loads(line)


# -- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("main", [worlds.main, ad.blocking.hosted(worlds_blocking.main)], ids=["awaited", "blocking"])
@pytest.mark.parametrize("ranks", [1, 2, RANKS])
def test_hosted_on_one_loop(ranks: int, main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert ad.run(main, transport="local", ranks=ranks, strict=True) == by_hand(ranks)
    assert ad.run_local(main, ranks=ranks, strict=True) == [by_hand(ranks), *[None] * (ranks - 1)]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 10))])
def test_simulated(seed: int) -> None:
    for ranks in (1, 2, RANKS):
        report = ad.simulate(worlds.main, ranks=ranks, seed=seed, strict=True)
        assert report.value() == by_hand(ranks)
        without_loop = ad.simulate(ad.blocking.hosted(worlds_blocking.main), ranks=ranks, seed=seed, strict=True)
        assert (without_loop.value(), without_loop.trace_digest) == (report.value(), report.trace_digest)
