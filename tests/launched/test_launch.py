"""Tests jobs under the real mpirun: the ranks' environment, their ends, and the errors of jobs that cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support import mpi, warm
from support.launchers import HYDRA, OPENMPI, TORCHRUN
from support.mpi import base_environment
from support.seeds import in_ci

from asyncdist import environment as launch
from asyncdist.launch import guardians, mpirun
from asyncdist.launch.supervision.endings import describe_end


def make_program(directory: Path, name: str, prints: str) -> str:
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(f"#!/bin/sh\necho '{prints}'\n")
    program.chmod(0o755)
    return str(program)


def test_launchers_are_found_by_what_they_say_and_the_first_wins(tmp_path: Path) -> None:
    own = make_program(tmp_path / "own", "mpirun", "mpirun (Open MPI) 5.0.11")
    make_program(tmp_path / "system", "mpirun", "mpirun (Open MPI) 4.1.4")
    hydra = make_program(tmp_path / "system", "mpiexec.hydra", "HYDRA build details:")
    make_program(tmp_path / "strange", "mpirun", "something else")
    directories = [str(tmp_path / name) for name in ("missing", "strange", "own", "system")]
    assert mpirun.find_launchers(directories) == {"openmpi": own, "mpich": hydra}


@pytest.mark.parametrize("words", [("run", "-n", "2", "-m", "json.tool"), ("report", "/runs")])
def test_a_deleted_directory_is_refused_in_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Regression: the error was a traceback, or one of mpirun or of torch's libraries."""
    source = "import os, sys; from asyncdist import cli; os.rmdir(os.getcwd()); cli.main(sys.argv[1:])"
    command = [sys.executable, "-c", source, *words]
    environ = {**os.environ, "PYTHONPATH": str(Path(launch.__file__).parents[1])}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    said = f"asyncdist {words[0]}: the working directory has been deleted: cd to an existing directory\n"
    assert (ended.returncode, ended.stderr) == (2, said)


INTERRUPTED_IMPORT = """
import os, signal, sys
from asyncdist.__main__ import main

class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
main()
"""


@pytest.mark.parametrize("module", ["asyncdist.cli", "asyncdist.launch.hosts.remote_hosts", "asyncdist.launch.mpirun"])
def test_ctrl_c_during_the_imports_of_the_launcher_is_silent(tmp_path: Path, module: str) -> None:
    """Regression: Ctrl-C in the first 0.3 s of ``asyncdist run`` printed a traceback of 20 lines."""
    command = [sys.executable, "-c", INTERRUPTED_IMPORT.format(module=module), "run", "-n", "2", "no_script.py"]
    environ = {**os.environ, "PYTHONPATH": str(Path(launch.__file__).parents[1])}
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode in (-signal.SIGINT, 130) and (ended.stdout, ended.stderr) == ("", "")


def test_a_job_runs_with_its_standard_files_closed(tmp_path: Path) -> None:
    """Regression: with stdout closed, the launcher failed with an AttributeError before it had started anything."""
    (tmp_path / "script.py").write_text("import sys; print('words'); sys.exit(7)")
    command = f"'{sys.executable}' -m asyncdist run --transport torch -n 1 script.py <&- >&-"
    ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (7, f"asyncdist run: rank 0 {describe_end(7)}\n")


def test_no_mpi_at_all_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    (tmp_path / "script.py").write_text("")
    ended = start(tmp_path, "", environ={"PYTHONPATH": str(tmp_path)})
    output = ended.communicate(timeout=30)
    assert ended.returncode == 2
    assert "cannot load MPI library" in output[1]
    assert output[1].count("\n") == 1


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, f"ranks on MPI need mpi4py, which is not installed for {sys.executable} "),
        pytest.param(
            "raise RuntimeError('cannot load MPI library\\nlibmpi.so.12: nowhere')",
            "mpi4py found none that works (cannot load MPI library): pip",
            marks=pytest.mark.long,
        ),
    ],
    ids=["no mpi4py", "no library"],
)
def test_ranks_without_mpi_say_so_in_a_line(tmp_path: Path, said: str | None, words: str) -> None:
    """The ranks start as under a plain mpirun, without the checks of ``asyncdist run``."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(said or "raise ModuleNotFoundError('No module named mpi4py')")
    source = "import asyncdist as ad\nasync def main(world): pass\nad.run(main, transport='mpi')\n"
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(launch.__file__).parents[1]}"}
    ended = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert words in ended.stderr.splitlines()[-1], ended.stderr


def start(
    tmp_path: Path,
    body: str,
    *arguments: str,
    ranks: int = 3,
    options: Sequence[str] = (),
    environ: dict[str, str] | None = None,
    is_warm: bool = False,
) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(body)
    program = warm.command(script, arguments, base_environment(), {}) if is_warm else [str(script), *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "asyncdist", "run", *options, "-n", str(ranks), *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
        cwd=tmp_path,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, error = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, output, error


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    try:
        return not status.parent.parent.is_dir() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.mpi
def test_a_run_gives_each_rank_arguments_modules_and_no_input(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 'found'\n")
    # A colon alone would begin another program: either `touch` ran, or nothing did.
    arguments = ["--", "--flag", "-n", "7", ":", "touch", "file", "::", "a:", ""]
    code, output, error = finish(
        start(
            tmp_path,
            "import os, sys, beside\nfrom mpi4py import MPI\n"
            "world = MPI.COMM_WORLD\n"
            "print(world.rank, world.size, beside.VALUE, sys.argv[1:], __name__, repr(sys.stdin.read()))\n",
            *arguments,
        )
    )
    expected = [f"{rank} 3 found {arguments} __main__ ''" for rank in range(3)]
    assert (code, sorted(output.splitlines()), error) == (0, expected, "")


@pytest.mark.mpi
def test_ranks_belong_to_the_innermost_launcher(tmp_path: Path) -> None:
    """Regression: in a worker of torchrun they joined torchrun's job, and with an old variable each trained alone."""
    source = (
        "from mpi4py import MPI\nfrom asyncdist.launchers import detection\n"
        "print(MPI.COMM_WORLD.size, detection.detect().transport)\n"
    )
    around = TORCHRUN | OPENMPI | HYDRA | {"ASYNCDIST_TRANSPORT": "local"}
    code, output, error = finish(start(tmp_path, source, options=["--transport", "mpi"], environ=around))
    assert (code, output.splitlines(), error) == (0, ["3 mpi"] * 3, "")


#: The line about ranks that have each run alone.
LONE = (
    "asyncdist run: no rank opened a world, so each rank ran alone: call asyncdist.run(main), or, without async def, "
    "asyncdist.blocking.run(main)\n"
)


@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=pytest.mark.mpi), "torch"])
def test_ranks_that_train_alone_are_reported(tmp_path: Path, transport: str) -> None:
    """Regression: a script without a world ended with 0 and without a word, as if its ranks had trained together."""
    (tmp_path / "torch.py").write_text("")
    assert finish(start(tmp_path, "import torch", options=["--transport", transport])) == (0, "", LONE)


@pytest.mark.parametrize("code", in_ci(["", "0"], ""))
def test_ranks_that_exit_with_0_are_reported_as_alone(tmp_path: Path, code: str) -> None:
    """Regression: nothing was printed after ``sys.exit(main())``, with which many scripts end."""
    (tmp_path / "torch.py").write_text("")
    source = f"import torch, sys; sys.exit({code})"
    assert finish(start(tmp_path, source, ranks=2, options=["--transport", "torch"])) == (0, "", LONE)


def test_ranks_that_print_help_are_not_reported_as_alone(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    source = "import torch, argparse; argparse.ArgumentParser().parse_args()"
    code, output, error = finish(start(tmp_path, source, "--help", ranks=2, options=["--transport", "torch"]))
    assert (code, output.count("usage: script.py"), error) == (0, 2, "")


@pytest.mark.parametrize(
    "source",
    [
        "import os\nif os.environ['RANK'] == '0': import torch",
        "import torch, os\nif os.fork() == 0: os._exit(0)\nos.wait()",
    ],
)
def test_no_rank_is_reported_as_alone_if_one_may_not_be(tmp_path: Path, source: str) -> None:
    (tmp_path / "torch.py").write_text("")
    assert finish(start(tmp_path, source, ranks=2, options=["--transport", "torch"])) == (0, "", "")


OPENED_IN_A_LOOP = """
import asyncio, os, asyncdist, torch

async def main():
    async with asyncdist.open_world():
        assert torch.get_num_threads() <= max(1, os.cpu_count() // 2)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "source",
    [
        "import asyncdist\nwith asyncdist.blocking.open_world(): pass",
        pytest.param("async def main(world): pass\nimport asyncdist; asyncdist.run(main)", marks=pytest.mark.long),
        pytest.param(OPENED_IN_A_LOOP, marks=pytest.mark.long),
        "import torch.distributed as dist; dist.init_process_group('gloo'); dist.destroy_process_group()",
    ],
)
def test_ranks_that_communicate_are_not_reported_as_alone(tmp_path: Path, source: str) -> None:
    """Regression: a script with ``open_world`` was reported as ranks that ran alone, and used a thread per core."""
    is_warm = source != OPENED_IN_A_LOOP  # torch chooses its threads when it is imported
    job = start(tmp_path, source, ranks=2, options=["--transport", "torch"], is_warm=is_warm)
    assert finish(job) == (0, "", "")


def test_a_single_rank_is_not_reported_as_alone(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    assert finish(start(tmp_path, "import torch", ranks=1, options=["--transport", "torch"])) == (0, "", "")


BEFORE_MPI = """
import os, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
if rank == 1:
    {failure}
time.sleep(45)
"""


AFTER_MPI = """
import sys
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    {failure}
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("failure", "code", "message", "body"),
    [
        ("raise RuntimeError('story')", 1, "RuntimeError: story", AFTER_MPI),
        ("sys.exit(7)", 7, "", BEFORE_MPI),
        pytest.param("raise RuntimeError('story')", 1, "RuntimeError: story", BEFORE_MPI, marks=pytest.mark.long),
        pytest.param("sys.exit(7)", 7, "", AFTER_MPI, marks=pytest.mark.long),
    ],
    ids=[
        "exception-after MPI_Init",
        "exit code-before MPI_Init",
        "exception-before MPI_Init",
        "exit code-after MPI_Init",
    ],
)
def test_a_failing_rank_ends_the_others_with_its_exit_code(
    tmp_path: Path, body: str, failure: str, code: int, message: str
) -> None:
    begin = time.monotonic()
    ended, _, error = finish(start(tmp_path, body.format(failure=failure)))
    assert ended == code
    assert error.count(message) == 1 or not message
    assert "rank_program.py" not in error
    assert time.monotonic() - begin < 30


@pytest.mark.mpi
@pytest.mark.parametrize("number", in_ci([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], signal.SIGTERM, signal.SIGHUP))
def test_a_signal_to_launcher_or_guardian_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Regression: UCX, which both MPIs use, took a SIGHUP to the rank for a request to debug."""
    process = start(
        tmp_path,
        "import os, pathlib, sys, time\nfrom mpi4py import MPI\n"
        "pathlib.Path(sys.argv[1], f'{os.getpid()}.pid').touch()\ntime.sleep(45)\n",
        str(tmp_path),
    )
    assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 3), finish(process)
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    is_for_rank = number == signal.SIGHUP and guardians.ARE_SUPPORTED
    os.kill(parent_of(parent_of(pids[0])) if is_for_rank else process.pid, number)
    code, _, _ = finish(process)
    assert code != 0
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids), 5)


UNGUARDED = """
import multiprocessing, os, subprocess, sys
import asyncdist as ad

async def main(world):
    if len(sys.argv) > 1:
        print("opened a second time")
        return
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=print)
        process.start()
        process.join()
        print(method, process.exitcode)
    print("subprocess", subprocess.run([sys.executable, __file__, "child"]).returncode)
    child = os.fork()
    if not child:
        try:
            ad.run(main)
        except ad.TransportError:
            os._exit(5)
    print("fork", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

ad.run(main)
"""


@pytest.mark.mpi
@pytest.mark.long
def test_a_child_of_a_rank_is_told_in_a_line_that_it_is_no_rank(tmp_path: Path) -> None:
    """Regression: the child, of a script without a __main__ guard, opened its parent's MPI, and hung or crashed."""
    code, output, error = finish(start(tmp_path, UNGUARDED, ranks=1))
    assert (code, output.splitlines()) == (0, ["spawn 1", "forkserver 1", "subprocess 1", "fork 5"]), error
    lines, last = error.splitlines(), UNGUARDED.count("\n")
    assert len(lines) == 3, error
    assert all(
        line.startswith("asyncdist: a child of local rank 0, ") and f"script.py:{last}: " in line for line in lines
    )
    assert sum('start under if __name__ == "__main__":' in line for line in lines) == 2
    assert sum("it is a child of the rank with pid " in line for line in lines) == 1


IMPORTS_MPI = """
import os, subprocess, sys
from mpi4py import MPI
import torch
import asyncdist as ad

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index, MPI.COMM_WORLD.size])

async def main(world):
    if world.rank:
        for _ in range(8):
            await ad.barrier()
        return
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
    for batch in loader:
        await ad.barrier()
    asks = "import os; from mpi4py import MPI; secret = os.getenv('ASYNCDIST_JOB_SECRET')"
    asks += "; os.write(1, f'alone {MPI.COMM_WORLD.size} {secret}{chr(10)}'.encode())"  # in one piece
    subprocess.run([sys.executable, "-c", asks], check=True)
    is_named = any(name.startswith(("PMI_", "PMIX_")) for name in os.environ)
    print("read", *batch[0].tolist(), "of", MPI.COMM_WORLD.size, is_named)

if __name__ == "__main__":
    ad.run(main)
"""


@pytest.mark.mpi
def test_children_of_a_rank_that_import_mpi4py_are_alone_in_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a spawned worker opened MPI with the variables of its rank, and crashed or hung.

    Each child of a rank on MPI also received the secret of the job.
    """
    monkeypatch.setenv("ASYNCDIST_JOB_SECRET", "0123456789abcdef")
    code, output, error = finish(start(tmp_path, IMPORTS_MPI, ranks=2, is_warm=True))
    assert code == 0, error
    assert sorted(output.splitlines()) == ["alone 1 None", "read 7 1 of 2 True"], error


FORKING = """
import os, sys, torch
import asyncdist as ad
from protocols import AverageAllPolicy

async def train(world, how):
    model = torch.nn.Linear(2, 1)
    async with AverageAllPolicy(model, torch.optim.SGD(model.parameters()), average_every=1) as policy:
        await policy.step()
        if world.rank == 1:
            child = os.fork()
            if not child:
                if how == "return":
                    return True
                if how == "raise":
                    raise ValueError("in a child")
                if how == "step":
                    await policy.step()
                sys.exit(how)
            print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        await policy.step()
    await ad.barrier()

async def main(world):
    for how in ("return", 0, 5, "raise", "step"):
        await train(world, how)

if __name__ == "__main__":
    ad.run(main)
    print("returned")
"""


@pytest.mark.mpi
@pytest.mark.parametrize("transport", ["mpi", pytest.param("torch", marks=pytest.mark.long)])
def test_a_forked_child_ends_where_it_leaves_a_policy(tmp_path: Path, transport: str) -> None:
    """Regression: the child left policy and world as if it were the rank, hung, and took the rank's sockets away."""
    process = start(tmp_path, FORKING, ranks=2, options=["--transport", transport], is_warm=True)
    code, output, error = finish(process)
    assert code == 0, error
    assert sorted(output.splitlines()) == ["0 0", "5 5", "raise 1", "return 0", "returned", "returned", "step 1"], error
    assert error.count("may do; end such a process with sys.exit() or os._exit()") == 1, error
    assert error.count("Traceback") == error.count("ValueError: in a child") == 1, error


FORKS = """
import atexit, os, sys
import asyncdist as ad
from mpi4py import MPI

atexit.register(print, "exit of a rank")
world = ad.blocking.process_world()
for how in (0, 3, "text", "raise", "called"):
    ad.blocking.barrier()
    if world.rank == 1:
        child = os.fork()
        if not child:
            atexit.register(print, "exit of a child", how)
            if how == "raise":
                raise ZeroDivisionError("in a child")
            if how == "called":
                ad.blocking.barrier()
            sys.exit(how)
        print("ended", how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    ad.blocking.barrier()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("how", in_ci(["mpirun", "mpi", "torch"], "mpirun"))
def test_the_exit_of_a_forked_child_touches_nothing_of_its_rank(tmp_path: Path, how: str) -> None:
    """Regression: the child left the rank's world and called MPI_Finalize; it hung or crashed, and the rank with it."""
    source = FORKS if how != "torch" else FORKS.replace("from mpi4py import MPI", "")
    if how == "mpirun":
        result = mpi.run_source(2, source).check()
        code, output, error = result.returncode, result.stdout, result.stderr
    else:
        code, output, error = finish(start(tmp_path, source, ranks=2, options=["--transport", how]))
    assert code == 0, error
    told = ["ended 0 0", "ended 3 3", "ended text 1", "ended raise 1", "ended called 1"]
    assert [line for line in output.splitlines() if line.startswith("ended")] == told, output
    assert output.count("exit of a rank") == 2, output
    assert output.count("exit of a child") == 5, "the exit functions registered by the children must have been called"
    assert error.count("ZeroDivisionError: in a child") == 1, error
    assert error.count("this process is a forked child of rank 1 and cannot use its world") == 1, error


LEAVES_CHILDREN = """
import os, pathlib, signal, subprocess, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
children = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
for pid in (os.getpid(), *(child.pid for child in children)):
    (folder / f"{pid}.pid").touch()
while len(list(folder.glob("*.pid"))) < 9:
    time.sleep(0.01)
if rank == 1 and sys.argv[2] == "rank":
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


@pytest.mark.mpi
@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="elsewhere nothing ends them")
@pytest.mark.parametrize("killed", ["rank", "mpirun"])
def test_no_child_of_a_rank_survives_a_kill_in_the_job(tmp_path: Path, killed: str) -> None:
    """Regression: Open MPI waited for the child of a killed rank, and ranks without MPI survived a killed mpirun."""
    process = start(tmp_path, LEAVES_CHILDREN, str(tmp_path), killed)
    assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 9), finish(process)
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    if killed == "mpirun":
        process.kill()
    code, _, _ = finish(process)
    assert code != 0
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.mpi
def test_files_with_the_next_process_number_hinder_no_job(tmp_path: Path) -> None:
    """Regression: asyncdist run removed these files, which crashed a job in another container with the same /tmp."""
    script = tmp_path / "main.py"
    script.write_text("print('it runs')\n")
    with subprocess.Popen(["true"]) as process:
        begun = process.pid
    files = [tmp_path / f"ompi.{number}" / "pmix.here.tool" for number in range(begun, begun + 500)]
    for file in files:
        file.parent.mkdir()
        file.touch()
    command = [sys.executable, "-m", "asyncdist", "run", "-n", "1", str(script)]
    environ = {**base_environment(), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "it runs\n"), ended.stderr
    assert all(file.exists() for file in files)


#: Prints the files of Open MPI that this rank has mapped.
SHOWS_FILES = """
from mpi4py import MPI
lines = [line for line in open("/proc/self/maps") if "/dev/shm/" in line or "ompi." in line]
print(*sorted({line.split()[5] for line in lines}))
"""


@pytest.mark.mpi
@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="the test reads /proc")
def test_open_mpis_files_are_in_private_folders(tmp_path: Path) -> None:
    """Regression: other users who had made /dev/shm/sm_segment.* or /tmp/ompi.PID first could read all messages."""
    if mpi.flavour() != "openmpi":
        pytest.skip("MPICH opens no existing file")
    said = mpi.run_source(2, SHOWS_FILES, env={"TMPDIR": str(tmp_path)}).check().stdout.splitlines()
    for line in said:
        folders = {Path(path).parts[:-1] for path in line.split()}
        assert all(any(part.startswith("asyncdist-mpi-") for part in folder) for folder in folders), line
        assert "/sm_segment." in line and "/ompi." in line
        assert not any(Path(path).exists() for path in line.split())
    assert len(said) == 2


@pytest.mark.mpi
@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="the test reads /proc")
def test_ranks_of_a_plain_mpirun_share_private_memory(tmp_path: Path) -> None:
    installation = mpirun.find_installation(os.environ)
    if mpi.flavour() != "openmpi":
        pytest.skip("MPICH opens no existing file")
    script = tmp_path / "show.py"
    script.write_text(f"import asyncdist as ad\nad.blocking.process_world()\n{SHOWS_FILES}")
    program = [sys.executable, *warm.command(script, (), base_environment(), {})]
    command = [installation.launchers["openmpi"], "-n", "2", "--host", "localhost:2", *program]
    environ = mpirun.build_environment("openmpi", base_environment(), ranks=2, threads=1)
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=True)
    shared = [path for path in ended.stdout.split() if "/sm_segment." in path]
    assert shared and all(f"/asyncdist-{os.getuid()}/" in path for path in shared), ended.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("given", "seen"), in_ci([({}, "^ofi"), ({"OMPI_MCA_btl": "self,sm"}, "self,sm")], ({}, "^ofi"))
)
def test_a_job_on_one_host_looks_for_no_fabric_unless_asked(given: dict[str, str], seen: str) -> None:
    """Regression: Open MPI slept for one second of each start."""
    source = "import os\nprint(os.environ.get('OMPI_MCA_btl'))"
    said = mpi.run_source(1, source, env=given).check().stdout
    assert said == f"{seen if mpi.flavour() == 'openmpi' or given else None}\n"
