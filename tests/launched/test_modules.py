"""Tests ``asyncdist run -m MODULE``, archives as scripts, and ``--prefix``.

With ``--prefix``, each line begins with the number of the rank that printed it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from asyncdist import rank_program

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


def test_a_script_that_changes_the_folder_finds_its_file(tmp_path: Path) -> None:
    """Regression: ``__file__`` was relative, so that a recording named a file that did not exist."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "script.py").write_text(
        "import os, sys\nos.chdir('elsewhere')\nprint(__file__, os.path.exists(__file__), sys.argv)\n"
    )
    programs = [[rank_program.PROGRAM, "script.py", "a"], ["script.py", "a"]]
    runs = [subprocess.run([sys.executable, *p], capture_output=True, text=True, cwd=tmp_path) for p in programs]
    assert runs[0].stdout == runs[1].stdout == f"{tmp_path / 'script.py'} True ['script.py', 'a']\n", runs


@pytest.mark.parametrize("name", ["__main__.py", "other.py"])
def test_an_archive_is_run_as_python_runs_it(tmp_path: Path, name: str) -> None:
    """Regression: a zipapp was refused as invalid Python."""
    archive = tmp_path / "job.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(
            name, "import sys, beside\nprint(beside.X, __file__, __spec__.name, __package__, sys.path[0], *sys.argv)\n"
        )
        file.writestr("beside.py", "X = 3\n")
    error = rank_program.find_syntax_error(str(archive))
    assert error is None if name == "__main__.py" else error is not None and "__main__" in error
    programs = [[rank_program.PROGRAM, str(archive), "a"], [str(archive), "a"]]
    runs = [subprocess.run([sys.executable, *words], capture_output=True, text=True) for words in programs]
    assert runs[0].stdout == runs[1].stdout and bool(runs[0].returncode) == (error is not None), runs
