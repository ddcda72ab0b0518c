"""Tests that warm ranks (``support.warm``) behave like cold ranks, and that MPI is hidden from tests by default."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import mpi, torchrun, warm

from asyncdist.launch import mpirun

is_possible = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="every rank starts cold here")


@is_possible
def test_arguments_variables_folder_and_output_are_the_ranks_own() -> None:
    source = """
        import os, sys
        from support.mpi import report

        assert "mpi4py" not in sys.modules and "torch" in sys.modules
        print("out", os.environ["STORY"], "PYTEST_CURRENT_TEST" in os.environ)
        print("err", file=sys.stderr)
        report(0, [sys.argv[1:], os.getcwd(), __name__, sys.stdin.read()])
    """
    result = torchrun.run_source(1, source, "--flag", 7, env={"STORY": "told"}).check()
    assert (result.stdout, result.stderr) == ("out told True\n", "err\n")
    assert result.reports == {0: [["--flag", "7"], str(mpi.ROOT), "__main__", ""]}


@is_possible
@pytest.mark.parametrize(
    ("ending", "code", "word"),
    [
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        # The server's end ends every rank. The next run waits for a new server.
        pytest.param("os.kill(os.getppid(), signal.SIGKILL); time.sleep(300)", 1, "", marks=pytest.mark.long),
    ],
)
def test_it_ends_as_its_rank_does(ending: str, code: int, word: str) -> None:
    result = torchrun.run_source(1, f"import os, signal, sys, time\n{ending}").check(code)
    assert result.stderr.count("Traceback") == bool(word) and word in result.stderr
    if "getppid" in ending:
        warm._server.cache_clear()


@is_possible
def test_only_libraries_outlive_the_end_of_a_warm_rank() -> None:
    source = """
        import atexit, ctypes, sys, weakref
        import asyncdist, torch

        def tell(word):
            ctypes.CDLL(None).printf(word + b"\\n")  # C prints it when the process ends

        atexit.register(tell, b"exit handler")
        for name, module in (("asyncdist", asyncdist), ("torch", torch)):
            module.planted = type("Planted", (), {"__del__": lambda self, word=name.encode(), tell=tell: tell(word)})()
        sys.exit(7)
    """
    assert torchrun.run_source(1, source).check(7).stdout.splitlines() == ["exit handler", "asyncdist"]


@is_possible
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_is_ended_takes_the_rank_along(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1], str(os.getpid())).touch()\ntime.sleep(300)"
    )
    command = [sys.executable, *warm.command(script, (tmp_path,), mpi.base_environment(), {})]
    with subprocess.Popen(command) as process:
        eventually(lambda: any(path.name.isdecimal() for path in tmp_path.iterdir()))
        [rank] = [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]
        assert rank != process.pid
        process.send_signal(number)
        assert process.wait(60) == -number
    eventually(lambda: not Path(f"/proc/{rank}").exists())


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_is_asked_at_imports_starts_cold() -> None:
    assert warm.command("script.py", (1,), os.environ, {"PYTHONHASHSEED": "1"}) == ["script.py", "1"]


def test_mpi_is_hidden() -> None:
    installation = mpirun.find_installation(os.environ)
    assert installation.library is None and "without @pytest.mark.mpi" in installation.version


@pytest.mark.mpi
def test_mpi_is_there() -> None:
    mpi.require_mpi()
    assert mpirun.find_installation(os.environ).library == mpi.flavour() != ""


@is_possible
@pytest.mark.parametrize(("threads", "word"), [("1", "warm"), ("2", "cold")])
@pytest.mark.long
def test_ranks_started_by_others_are_warm_with_server_variables(threads: str, word: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('warm' if 'torch' in sys.modules else 'cold', __name__, sys.argv[1:])")
    env = {**warm.environment(mpi.base_environment()), "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-m", "asyncdist", "run", "--transport", "torch", "-n", "2", str(script), "a"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, f"{word} __main__ ['a']\n" * 2), ended.stderr
