"""Tests the mutants tool in separate processes: its checks, the mutants that it refuses, and the found mutants."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


#: One mutant of selective averaging and one of the synchronous average, each of which few seeds find.
QUICK = ("own-rank-unheard", "world-size-divisor")


def run_tool(top: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(top / "tools" / "mutations" / "run.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def copy_of_sources(top: Path) -> Path:
    for name in ("asyncdist", "protocols", "tools/mutations"):
        shutil.copytree(TOP / name, top / name, ignore=shutil.ignore_patterns("__pycache__"))
    return top


def test_every_replacement_still_applies() -> None:
    checked = run_tool(TOP, "--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("change", ["gone", "twice", "broken"])
def test_a_replacement_without_its_place_is_named(tmp_path: Path, change: str) -> None:
    top = copy_of_sources(tmp_path)
    place = top / "asyncdist" / "collectives" / "algorithms" / "by_messages.py"
    text = place.read_text()
    line = "            work = fold([*receive])\n"
    assert line in text
    changed = {"gone": text.replace(line, ""), "twice": text.replace(line, line * 2), "broken": text + "\n)"}[change]
    place.write_text(changed)
    checked = run_tool(top, "--check")
    assert checked.returncode == 1
    assert re.findall("^mutant ([a-z-]+)", checked.stderr, re.MULTILINE) == ["world-size-divisor"]
    assert "by_messages.py" in checked.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("nobody",), "no mutant is called 'nobody'"),
        (("--seed", "3"), "--seed needs the name of one mutant"),
        (("--jobs", "0"), "must be 1 or more"),
        (("--seeds", "0"), "must be 1 or more"),
        (("--budget-s", "0"), "above 0"),
    ],
)
def test_bad_options_are_one_line(options: tuple[str, ...], said: str) -> None:
    refused = run_tool(TOP, *options)
    assert refused.returncode == 2
    assert said in refused.stderr


@pytest.mark.long
@pytest.mark.timeout(600)  # two processes for each mutant import torch, on any number of cores
def test_quick_mutants_are_found(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    completed = run_tool(TOP, *QUICK, "--seeds", "60", "--budget-s", "500", "--json", str(out))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    hunts = json.loads(out.read_text())
    assert sorted(hunt["mutant"] for hunt in hunts) == sorted(QUICK)
    for hunt in hunts:
        assert hunt["trouble"] == "" and hunt["seed"] in range(60) and hunt["error"], hunt
        assert len(hunt["faults"]) <= 2, hunt
        assert f"{hunt['mutant']}: found: ./tools/mutants {hunt['mutant']} --seed {hunt['seed']}" in completed.stdout
    repeated = run_tool(TOP, hunts[0]["mutant"], "--seed", str(hunts[0]["seed"]))
    assert repeated.returncode == 0, repeated.stdout + repeated.stderr
    assert hunts[0]["error"] in repeated.stdout


@pytest.mark.long
def test_a_mutant_that_no_seed_shows_survives(tmp_path: Path) -> None:
    """In a copy whose scenario checks nothing, the tool must not claim that it has found the mutant."""
    top = copy_of_sources(tmp_path)
    for name in ("tests/scripts", "tests/simulation", "tests/support", "tests/unit"):
        shutil.copytree(TOP / name, top / name, ignore=shutil.ignore_patterns("__pycache__"))
    scenarios = top / "tools" / "mutations" / "scenarios.py"
    text = scenarios.read_text()
    assert text.count("def leaving(") == 1
    blind = "\n\ndef leaving(seed, faults=None):\n    return simulate(_nothing, ranks=1, seed=seed)\n"
    scenarios.write_text(f"{text}{blind}\n\nasync def _nothing(world):\n    pass\n")
    completed = run_tool(top, "quorum-of-all", "--seeds", "2", "--budget-s", "500")
    assert completed.returncode == 1
    assert "quorum-of-all: survived" in completed.stdout
    assert "0 of 1 mutants found" in completed.stdout
