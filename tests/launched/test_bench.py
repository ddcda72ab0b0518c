"""Tests ``python -m asyncdist.bench`` under real launchers: its output, and the arguments that it refuses."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest
from support import mpi, torchrun

import asyncdist as ad
from asyncdist.bench import __main__ as bench

MAIN = mpi.ROOT / "asyncdist" / "bench" / "__main__.py"
FEW = {
    "latency": ["--sizes", "8,60000", "--repeat", "2", "--loop", "5"],
    "bandwidth": ["--sizes", "1,2", "--repeat", "2"],
    "ringtest": ["--sizes", "8,60000", "--repeat", "2", "--loop", "5"],
    "step": ["--sizes", "10,1000", "--repeat", "2", "--loop", "5"],
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "latency")) for name in FEW])
def test_each_prints_a_table_on_mpi(name: str) -> None:
    check(name, mpi.run_ranks(3, MAIN, name, *FEW[name]).check().stdout, "mpi: ", "mpi4py Send, Recv")


@pytest.mark.parametrize("name", [pytest.param("latency", marks=pytest.mark.long), "ringtest"])
def test_each_prints_a_table_on_torch(name: str) -> None:
    check(name, torchrun.run_ranks(3, MAIN, name, *FEW[name]).check().stdout, "torch: ", "gloo send, recv")


def check(name: str, printed: str, transport: str, rival: str) -> None:
    """Check that only rank 0 has printed, and that each size has a row of two positive numbers and their ratio."""
    said, title, headings, *rows = printed.strip().splitlines()
    assert said.startswith(transport) and title.startswith(f"{name}: ")
    assert (rival if name != "step" else "asyncio.sleep(0)") in headings
    assert len(rows) == 2
    for row in rows:
        found = re.fullmatch(r"\d+ +(\d+\.\d\d) (us|GB/s) +(\d+\.\d\d) \2 +x(\d+\.\d\d)", row)
        assert found is not None, row


def test_a_step_is_timed_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["step", *FEW["step"]]) == 0
    check("step", capsys.readouterr().out, "local: ", "")


def test_one_process_is_told_how_to_start_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["latency"]) == 2
    told = "latency needs at least 2 ranks, got 1: asyncdist run -n 2 -m asyncdist.bench latency"
    assert capsys.readouterr().err == f"python -m asyncdist.bench: {told}\n"


def test_a_simulation_is_refused_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The time of a simulation is virtual: the benchmark would measure only the simulated links."""
    options = argparse.Namespace(name="latency")
    assert ad.simulate(bench._main, options, ranks=2, seed=1, strict=True).results == (2, 2)
    assert capsys.readouterr().err.count("a simulation's time is virtual") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["all"], "invalid choice: 'all' (choose from "),
        ([], "the following arguments are required: NAME"),
        (["latency", "--sizes", "8,x"], "argument --sizes: must be an integer >= 1, got 'x'"),
        (["latency", "--sizes", "60001"], "argument --sizes: each size must be <= 60000, got 60001"),
        (["latency", "--repeat", "0"], "argument --repeat: must be an integer >= 1, got '0'"),
        (["bandwidth", "--loop", "5"], "unrecognized arguments: --loop 5"),
    ],
)
def test_bad_words_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[Any]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(words)
    assert ended.value.code == 2 and told in capsys.readouterr().err
