"""Tests ``asyncdist run -m MODULE``, and ``--prefix``: each line begins with the number of the rank that printed it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from . import other
rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if name in os.environ)
print(rank, other.X, sys.argv[1:], __name__, __package__)
print("half", end="")
print(" a line")
print("wrong", file=sys.stderr)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "other.py").write_text("X = 5")
    for name in ("program.py", "__main__.py"):
        (folder / name).write_text(PROGRAM)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncdist", "run", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("transport", "module"),
    [pytest.param("mpi", "folder", marks=pytest.mark.mpi), ("torch", "folder.program")],
)
def test_a_module_of_a_package_runs_as_python_runs_it(package: Path, transport: str, module: str) -> None:
    ended = run(package, "--transport", transport, "-n", "2", "--prefix", "-m", module, "a", "--prefix")
    assert ended.returncode == 0, ended.stderr
    expected = [f"[{rank}] {rank} 5 ['a', '--prefix'] __main__ folder" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == sorted([*expected, "[0] half a line", "[1] half a line"])
    assert sorted(ended.stderr.splitlines()) == ["[0] wrong", "[1] wrong"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-m", "nowhere"], "-m nowhere must be a module"),
        (["-m", "nowhere.deeper"], "-m nowhere.deeper cannot be imported: No module named 'nowhere'"),
        (["-m", "json"], "a package with __main__"),
        ([], "the following arguments are required: script"),
    ],
)
@pytest.mark.long
def test_what_is_no_module(package: Path, words: list[str], told: str) -> None:
    ended = run(package, "-n", "2", *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("asyncdist run: ") and told in line
