"""Tests ``asyncdist init``: each script that it writes runs as the script says."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import mpi, warm

from asyncdist.cli import _STARTERS


def asyncdist(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncdist", *words]
    env = warm.environment(mpi.base_environment(), *warm.LIBRARIES)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.mpi
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "flavour",
    [pytest.param(each, marks=[pytest.mark.long] * (each in ("lightning", "transformers"))) for each in _STARTERS],
)
def test_it_runs(flavour: str, tmp_path: Path) -> None:
    written = asyncdist(tmp_path, "init", flavour, "mine.py")
    command = "sim" if flavour == "protocol" else "run"
    assert (written.returncode, written.stderr) == (0, "")
    assert written.stdout == f"wrote mine.py; start it with: asyncdist {command} -n 4 mine.py\n"
    text = (tmp_path / "mine.py").read_text()
    assert "mine.py" in text and "train.py" not in text and "gossip.py" not in text
    if flavour == "protocol":
        ended = asyncdist(tmp_path, "sim", "mine.py", "--ranks", "5", "--explore", "20", "--processes", "1")
        assert "20 seeds" in ended.stdout
    else:
        ended = asyncdist(tmp_path, "run", "-n", "2", "mine.py")
    assert ended.returncode == 0, ended.stderr
    if flavour != "protocol":
        assert "round 1: " in ended.stdout, "the rank on which the round was decided must print it"
    if flavour == "plain":
        assert ended.stdout.count("accuracy") == 2
    if flavour == "protocol":
        started = asyncdist(tmp_path, "run", "-n", "2", "mine.py")
        assert sorted(started.stdout.splitlines()) == ["rank 0: 0.500", "rank 1: 0.500"]
    folders = {path.name for path in tmp_path.rglob("rank*")}
    assert folders == (set() if flavour in ("plain", "protocol") else {"rank0", "rank1"})


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    ended = asyncdist(tmp_path, "init", "plain")
    assert (ended.returncode, ended.stderr) == (
        2,
        "asyncdist init: 'train.py': the file already exists; choose another name\n",
    )
    assert (tmp_path / "train.py").read_text() == "mine"
    ended = asyncdist(tmp_path, "init", "jax")
    assert ended.returncode == 2 and "'plain', 'lightning', 'transformers', 'protocol'" in ended.stderr
    ended = asyncdist(tmp_path, "init", "plain", "nowhere/train.py")
    assert ended.returncode == 2 and os.strerror(errno.ENOENT) in ended.stderr


@pytest.mark.parametrize("name", ["lightning.py", "torch.py", "asyncdist.py"])
def test_no_script_hides_a_module_that_it_imports(tmp_path: Path, name: str) -> None:
    ended = asyncdist(tmp_path, "init", "lightning", name)
    assert (
        ended.returncode == 2
        and f"'{name}': the file must not be named like a module that the script imports" in ended.stderr
    )
    assert not list(tmp_path.iterdir())
