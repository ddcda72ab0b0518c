"""Tests that every example runs when it is started as docs/examples.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import mpi, warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "tools" / "examples"
#: Expected output of each example.
PRINTS = {
    "hello_ranks.py": "rank 3 of 4 on ",
    "classifier.py": "accuracy ",
    "replay_buffer.py": "640",
    "own_protocol.py": "8 ranks, seed 1: ",
    "simulated_bug.py": " was first",
    "population_checkpoints.py": "epoch 2 is saved",
    "ddp_replicas.py": "rank 3 has trained to a loss of ",
    "lightning_fit.py": "trained",
    "transformers_train.py": "trained",
}

#: Examples whose parts have their own tests.
LONG = {
    "ddp_replicas.py",
    "lightning_fit.py",
    "population_checkpoints.py",
    "replay_buffer.py",
    "simulated_bug.py",
    "transformers_train.py",
}


def starts() -> dict[str, str]:
    """Return the command of each file on the page."""
    page = (ROOT / "docs" / "examples.md").read_text()
    return dict(re.findall(r"^\| \[`(\w+\.py)`\].*?\| `(.*?)` \|$", page, re.MULTILINE))


def test_every_example_is_on_the_page() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")}
    page = (ROOT / "docs" / "examples.md").read_text()
    assert files == set(PRINTS) == set(starts())
    assert all(f"../tools/examples/{path.name}" in page for path in EXAMPLES.iterdir() if path.is_file())
    for name, command in starts().items():
        assert command in (EXAMPLES / name).read_text(), f"{name} must show the command that starts it"


@pytest.mark.mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in PRINTS]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    first = run(name, tmp_path)
    assert PRINTS[name] in first
    if name == "population_checkpoints.py":
        assert "epoch 4 is saved" in run(name, tmp_path)


def run(name: str, folder: Path) -> str:
    """Run an example as the page says, and return its output."""
    words = [word.replace("tools/examples", str(EXAMPLES)) for word in starts()[name].split()[1:]]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [sys.executable, "-m", "asyncdist", *words],
        cwd=folder,
        env=warm.environment({**mpi.base_environment(), "PATH": path}, *warm.LIBRARIES),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == (name == "simulated_bug.py"), ended.stdout + ended.stderr
    return ended.stdout + ended.stderr
