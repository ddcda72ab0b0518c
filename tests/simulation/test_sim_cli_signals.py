"""Tests ``asyncdist sim`` in a separate process: Ctrl-C ends it at once, and seeds that a script sets are used."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until
from support.waits import waits_of_mains

from asyncdist.simulation import run_script
from asyncdist.simulation.exploration.explore import ExploreReport
from asyncdist.simulation.run_script import Script

ENDLESS = """
import os, pathlib, sys
import asyncdist as ad

async def main(world):
    pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
    while True:
        await world.safe_point()

if __name__ == "__main__":
    ad.run(main)
"""


@pytest.mark.workers
@pytest.mark.parametrize(
    "process_count",
    [0, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 2))],
    ids=["one run", "explore here", "explore in 2 processes"],
)
def test_ctrl_c_ends_it_at_once_with_code_130(tmp_path: Path, process_count: int) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    options = ["--explore", "9", "--processes", str(process_count)] if process_count else []
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncdist", "sim", str(script), "--ranks", "3", *options, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == max(1, process_count))
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    if process_count > 1:  # the positions of the others' ranks are not known here
        assert error == "asyncdist sim: interrupted\n"
    else:
        first, *lines = error.splitlines()
        place = r"asyncdist sim: interrupted \(seed 0\) .*\d+\.\d+ s .*"
        assert re.fullmatch(place, first)
        assert set(waits_of_mains(error)) == {0, 1, 2}
        assert any("endless.py:8" in line for line in lines), "at least one rank must wait in line 8"
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_ctrl_c_leaves_what_was_explored_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explore(scenario: object, seeds: range, *, on_progress: Callable[[ExploreReport], None], **_: object) -> None:
        on_progress(ExploreReport(200, frozenset(), {"Kill": 10}, 40.0))
        on_progress(ExploreReport(300, frozenset(), {"Kill": 17}, 60.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(run_script, "explore", explore)
    with pytest.raises(KeyboardInterrupt):
        run_script.run_many(Script(str(tmp_path / "no.py"), (), ranks=3), range(1000), 2)
    assert capsys.readouterr().out == "300 seeds in 60.0 s (5.0/s), 0 different traces, faults fired: Kill 17\n"


SEEDED = """
import random, sys
import numpy as np
import torch
import asyncdist as ad

def draw():
    return random.random(), float(torch.rand(1)), float(np.random.rand())

async def main(world):
    return draw()

random.seed(5)
torch.manual_seed(6)
if "plain" in sys.argv:
    print(draw())
else:
    ad.run(main)
"""


@pytest.mark.workers
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (5, 6))])
def test_what_a_script_seeds_before_run_is_what_every_rank_draws(tmp_path: Path, seed: int) -> None:
    """Regression: if the simulation had the same seed as the script, the script's seed was ignored."""
    path = tmp_path / "seeded.py"
    path.write_text(SEEDED)
    plain = subprocess.run([sys.executable, str(path), "plain"], capture_output=True, text=True, check=True)
    expected = json.loads(plain.stdout.replace("(", "[").replace(")", "]"))
    report = Script(str(path), (), ranks=3)(seed=seed)
    assert [list(drawn[:2]) for drawn in report.results] == [expected[:2]] * 3
    assert len({drawn[2] for drawn in report.results}) == 3, (
        "if the script does not seed numpy, each rank must have its own numbers"
    )


@pytest.mark.workers
@pytest.mark.long
def test_unseeded_draws_differ_between_ranks(tmp_path: Path) -> None:
    """Regression: torch's numbers were equal on all ranks, and with them the models of a population."""
    path = tmp_path / "unseeded.py"
    path.write_text(SEEDED.replace("random.seed(5)\ntorch.manual_seed(6)\n", ""))
    first, again, other = (Script(str(path), (), ranks=3)(seed=seed).results for seed in (6, 6, 7))
    assert first == again
    drawn = [number for result in (*first, *other) for number in result]
    assert len(set(drawn)) == len(drawn) == 18
    processes = [subprocess.run([sys.executable, str(path), "plain"], capture_output=True, check=True) for _ in "ab"]
    assert processes[0].stdout != processes[1].stdout
    assert len({word for done in processes for word in done.stdout.split()}) == 6
