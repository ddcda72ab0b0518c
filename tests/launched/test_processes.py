"""Tests ``asyncdist run --transport torch``: processes with torchrun's variables, their ends and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import torchrun, warm
from support.mpi import base_environment

from asyncdist import cli, environment, local_host
from asyncdist.launch import guardians, local_ranks, run_command
from asyncdist.launch.supervision import supervisor
from asyncdist.launch.supervision.endings import describe_end
from asyncdist.launchers import detection, launcher_signals
from asyncdist.launchers.variables import Launch

#: Generous limits: they fail only tests that hang, not tests that are slow.
TIMEOUT_S = 90.0

PRINT_VARIABLES = """
import json, os, sys
names = [name for name in os.environ if name.startswith(
    ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_", "ASYNCDIST_"))]
print(json.dumps({"variables": {name: os.environ[name] for name in names}, "arguments": sys.argv[1:],
                  "input": sys.stdin.read(), "main": __name__, "torch": "torch" in sys.modules}))
"""


@contextmanager
def running(
    tmp_path: Path,
    source: str,
    *arguments: str,
    ranks: int = 3,
    environ: Mapping[str, str] | None = None,
    is_warm: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Run ``asyncdist run --transport torch`` as a shell would start it."""
    script = tmp_path / "script.py"
    script.write_text(source)
    program = warm.command(script, arguments, base_environment(), {}) if is_warm else [str(script), *arguments]
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncdist", "run", "--transport", "torch", "-n", str(ranks), *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=own | dict(environ or {}),
        cwd=tmp_path,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, error = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output, error


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(folder: Path, count: int) -> list[int]:
    """Wait until this number of ranks have written their process IDs."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(found := list(folder.glob("*.pid"))) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} ranks have started"
        time.sleep(0.02)
    return [int(path.stem) for path in found]


def check_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} still run"
        time.sleep(0.02)


def test_ranks_get_the_variables_of_torchrun_and_are_the_script(tmp_path: Path) -> None:
    arguments = ["--", "--flag", "-n", "7", ":", "::", "a:", ""]
    with running(tmp_path, PRINT_VARIABLES, *arguments) as process:
        code, output, error = finish(process)
    assert (code, error) == (0, "")
    reports = sorted((json.loads(line) for line in output.splitlines()), key=lambda one: one["variables"]["RANK"])
    port, run_id = (reports[0]["variables"][name] for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    assert 0 < int(port) < 65536
    assert run_id
    for rank, report in enumerate(reports):
        variables = report["variables"]
        assert len(variables.pop("ASYNCDIST_JOB_SECRET")) == 64
        assert variables == {
            "ASYNCDIST_LOOPBACK": "1",
            "ASYNCDIST_RUN_ID": run_id,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": str(max(1, local_host.available_cores() // 3)),
        }
        facts = {name: report[name] for name in ("arguments", "input", "main", "torch")}
        assert facts == {"arguments": arguments, "input": "", "main": "__main__", "torch": False}
        assert detection.detect(variables) == Launch("torch", 3, rank, "TORCHELASTIC_RUN_ID")


def test_every_job_has_a_port_and_a_name_of_its_own() -> None:
    jobs = [local_ranks.build_environments({}, ranks=2, threads=None)[1] for _ in range(3)]
    assert len({job["TORCHELASTIC_RUN_ID"] for job in jobs}) == 3
    assert all(0 < int(job["MASTER_PORT"]) < 65536 for job in jobs)


@pytest.mark.parametrize(
    ("environ", "threads", "expected"),
    [({}, None, "2"), ({"OMP_NUM_THREADS": "5"}, None, "5"), ({"OMP_NUM_THREADS": "5"}, 3, "3")],
)
def test_threads_are_a_share_of_the_cores_unless_the_user_chose(
    environ: dict[str, str], threads: int | None, expected: str
) -> None:
    made = local_ranks.build_environments({"PATH": "p"} | environ, ranks=4, threads=threads, cores=8)
    assert [(one["OMP_NUM_THREADS"], one["PATH"]) for one in made] == [(expected, "p")] * 4


def test_the_variables_of_another_launcher_do_not_win(tmp_path: Path) -> None:
    source = "from asyncdist.launchers import detection; print(detection.detect())"
    around = {"RANK": "7", "WORLD_SIZE": "9", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
    with running(tmp_path, source, ranks=1, environ=around) as process:
        code, output, _ = finish(process)
    assert (code, output) == (0, f"{Launch('torch', 1, 0, 'TORCHELASTIC_RUN_ID')}\n")


# --------------------------------------------------------------------------------------------------------- ends

WAITS = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
{before}
(folder / f"{{os.getpid()}}.pid").touch()
if rank == 1:
    while len(list(folder.glob("*.pid"))) < 3:
        time.sleep(0.01)
    {failure}
time.sleep(600)
"""
IGNORES_SIGNALS = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
)


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        pytest.param(
            "raise RuntimeError('story')",
            1,
            ["RuntimeError: story", f"rank 1 {describe_end(1)}"],
            marks=pytest.mark.long,
        ),
        ("sys.exit(7)", 7, [f"rank 1 {describe_end(7)}"]),
        ("sys.exit('what went wrong')", 1, ["what went wrong"]),
        (
            "os.kill(os.getpid(), 9)",
            137,
            [f"rank 1 {describe_end(-signal.SIGKILL)}"],
        ),
        ("os._exit(3)", 3, [f"rank 1 {describe_end(3)}"]),
    ],
    ids=["exception", "exit", "exit with words", "killed", "gone"],
)
def test_a_failing_rank_ends_the_others_with_its_exit_code(
    tmp_path: Path, failure: str, code: int, words: list[str]
) -> None:
    with running(tmp_path, WAITS.format(before="", failure=failure), str(tmp_path)) as process:
        pids = pids_in(tmp_path, 3)
        ended, _, error = finish(process)
    assert ended == code
    assert [error.count(word) for word in words] == [1] * len(words), error
    assert "rank_program.py" not in error
    check_gone(pids)


AFTER = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
if rank == {last}:
    while len(list(folder.glob("*.gone"))) < {gone}:
        time.sleep(0.01)
    {failure}
import atexit
atexit.register((folder / f"{{rank}}.gone").touch)
raise RuntimeError("rank {last} is lost")
"""


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        ("sys.exit(3)", 3, f"rank 1 {describe_end(3)}"),
        ("os.kill(os.getpid(), 6)", 134, f"rank 1 {describe_end(-signal.SIGABRT)}"),
        ("raise ValueError('story')", 1, f"ranks 0-2 {describe_end(1)}"),
    ],
)
def test_ranks_that_end_before_the_failed_one_are_not_the_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    failure: str,
    code: int,
    words: str,
) -> None:
    """Regression: the exit code was 1, from other ranks, which end first, instead of the failed rank's 3."""
    monkeypatch.setattr(supervisor, "SETTLE_S", TIMEOUT_S)
    script = tmp_path / "script.py"
    script.write_text(AFTER.format(last=1, gone=2, failure=failure))
    assert local_ranks.run(str(script), [str(tmp_path)], ranks=3, environ=environment.environment()) == code
    assert f"asyncdist run: {words}" in (said := capfd.readouterr().err)
    assert said.count("asyncdist run: ") == 1


def test_ranks_that_do_not_stop_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_signals, "STOP_S", 0.2)
    script = tmp_path / "script.py"
    script.write_text(WAITS.format(before=IGNORES_SIGNALS, failure="sys.exit(7)"))
    code = local_ranks.run(str(script), [str(tmp_path)], ranks=3, environ=environment.environment())
    assert code == 7
    check_gone(pids_in(tmp_path, 3))


@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="elsewhere only its process group does")
def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    source = """
        import os, pathlib, subprocess, sys
        for options in ({}, {"start_new_session": True}):
            pid = subprocess.Popen(["sleep", "600"], **options).pid
            pathlib.Path(sys.argv[1], f"{pid}.pid").touch()
    """
    with running(tmp_path, textwrap.dedent(source), str(tmp_path), ranks=2) as process:
        children = pids_in(tmp_path, 4)
        process.wait(TIMEOUT_S)
        assert not any(is_alive(pid) for pid in children)
    assert process.returncode == 0


@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="elsewhere nothing tells a process of its parent's end")
def test_processes_of_a_rank_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    source = WAITS.format(before="import subprocess; pid = subprocess.Popen(['sleep', '600']).pid", failure="pass")
    source = source.replace('.pid").touch()', '.pid").touch(); (folder / f"{pid}.pid").touch()')
    with running(tmp_path, source, str(tmp_path)) as process:
        pids = pids_in(tmp_path, 6)
        process.kill()
        check_gone(pids)


@contextmanager
def heard(number: signal.Signals) -> Iterator[None]:
    """Processes started here must not ignore the signal, even if the tests run under nohup."""
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    with heard(number), running(tmp_path, WAITS.format(before="", failure="pass"), str(tmp_path)) as process:
        pids = pids_in(tmp_path, 3)
        process.send_signal(number)
        code, _, error = finish(process)
    assert code == 128 + number
    assert "asyncdist run: rank" not in error
    check_gone(pids)


def test_a_signal_reaches_a_rank_once_and_leaves_it_time(tmp_path: Path) -> None:
    source = """
import os, pathlib, signal, sys, time
caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append(1))
pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
while not caught:
    time.sleep(0.01)
time.sleep(0.5)
print("caught", len(caught))
"""
    with running(tmp_path, source, str(tmp_path)) as process:
        pids_in(tmp_path, 3)
        process.send_signal(signal.SIGINT)
        code, output, _ = finish(process)
    assert (code, output.splitlines()) == (130, ["caught 1"] * 3)


@pytest.mark.skipif(not guardians.ARE_SUPPORTED, reason="elsewhere the descendants are not listed")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_one_signal_to_all_processes_leaves_ranks_time(tmp_path: Path, number: signal.Signals) -> None:
    """Regression: copies of the signal, from the guardians and the launcher, ended the ranks at once."""
    source = """
import os, pathlib, sys, time
import asyncdist as ad

async def main(world):
    await ad.barrier()
    pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
    try:
        await world.sleep(300)
    finally:
        time.sleep(0.5)
        print("saved")

ad.run(main)
"""
    with running(tmp_path, source, str(tmp_path), ranks=2, is_warm=True) as process:
        handles = [guardians.ProcessHandle(pid) for pid in (process.pid, *pids_in(tmp_path, 2))]
        for handle in (*handles, *guardians.open_descendants(process.pid)):
            handle.send(number)
            handle.close()
        code, output, error = finish(process)
    assert (code, output.splitlines()) == (128 + number, ["saved"] * 2), error


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere nothing tells a process of its parent's end"
)
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, WAITS.format(before=IGNORES_SIGNALS, failure="pass"), str(tmp_path)) as process:
        pids = pids_in(tmp_path, 3)
        process.kill()
        check_gone(pids)


def test_starting_ranks_imports_no_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    source = (
        "import sys; from asyncdist import cli\n"
        f"try: cli.main(['run', '--transport', 'torch', '-n', '1', {str(script)!r}])\n"
        "except SystemExit as error: print(error.code, 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert ended.stdout == "0 False\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2", "--transport", "tcp", "script.py"], "'tcp'"),
        (["-n", "2", "--transport", "torch", "no_such_script.py"], "'no_such_script.py' does not exist"),
        (["-n", "2", "--transport", "torch", "."], "'.' is a directory"),
        (["-n", "2", "--transport", "torch", "--mpi", "openmpi", __file__], "--mpi needs"),
        (["-n", "0", "--transport", "torch", __file__], "'0'"),
        (["-n", "2", "--stall-s", "soon", __file__], "'soon'"),
        (["--transport", "torch", __file__], "-n/--ranks"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *arguments])
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert words in error
    assert error.count("\n") == 1


def test_stall_s_reaches_the_ranks_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Mapping[str, str]] = []
    monkeypatch.setattr(local_ranks, "run", lambda *_, environ, **__: given.append(environ) or 0)
    with pytest.raises(SystemExit):
        cli.main(["run", "-n", "2", "--transport", "torch", "--stall-s", "20", __file__])
    assert environment.stall_s(given[0]) == 20.0


def test_a_process_that_cannot_be_started_ends_those_that_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITS.format(before="", failure="pass"))
    real, started = local_ranks.RankProcess, []

    def refuse_the_third(*arguments: object, **options: object) -> object:
        if len(started) == 2:
            pids_in(tmp_path, 2)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(real(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(local_ranks, "RankProcess", refuse_the_third)
    with pytest.raises(local_host.LaunchError, match=r"rank 2 cannot be started: .*Resource temporarily unavailable"):
        local_ranks.run(str(script), [str(tmp_path)], ranks=3, environ=environment.environment())
    check_gone(pids_in(tmp_path, 2))


@pytest.mark.parametrize(
    ("named", "variable", "expected"),
    [
        (None, None, ("mpi", None)),
        (None, "auto", ("mpi", None)),
        (None, "torch", ("torch", None)),
        ("mpi", "torch", ("mpi", None)),
        ("torch", "local", ("torch", None)),
    ],
)
def test_a_named_transport_overrides_the_variable_of_the_ranks(
    named: str | None, variable: str | None, expected: tuple[str, str | None]
) -> None:
    """Regression: ASYNCDIST_TRANSPORT reached the ranks, which then trained alone, without any backend."""
    environ = {"PATH": "p"} | ({} if variable is None else {"ASYNCDIST_TRANSPORT": variable})
    transport, chosen = detection.choose_transport(named, environ)
    assert (transport, chosen.get("ASYNCDIST_TRANSPORT"), chosen["PATH"]) == (*expected, "p")


def test_no_ranks_are_started_for_local() -> None:
    with pytest.raises(ValueError, match=r"ASYNCDIST_TRANSPORT must be one of .*, got 'local'"):
        detection.choose_transport(None, {"ASYNCDIST_TRANSPORT": "local"})


def test_every_option_with_a_value_is_known_before_the_script() -> None:
    """The value of an unknown option would be taken for the script's name."""
    commands = next(action for action in cli._parser("run")._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    options = [action for action in commands.choices["run"]._actions if action.option_strings and action.nargs != 0]
    assert {name for action in options for name in action.option_strings} == {*run_command.OPTIONS}


def test_a_killed_rank_is_told_where_sigchld_is_ignored(tmp_path: Path) -> None:
    """Regression: the job counted as a success, because the kernel then keeps no exit codes."""
    (tmp_path / "script.py").write_text("import os; os.kill(os.getpid(), 9)")
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-m", "asyncdist", "run", "--transport", "torch", "-n", "1", str(tmp_path / "script.py")]
    ended = subprocess.run(
        [sys.executable, "-c", ignoring, *command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 137
    assert f"rank 0 {describe_end(-signal.SIGKILL)}" in ended.stderr


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--transport", "mpi"], marks=pytest.mark.mpi),
        ["--transport", "torch", "--restarts", "1"],
        ["--transport", "torch", "--places", "2"],
    ],
)
def test_the_launcher_closes_its_pipes(options: list[str], tmp_path: Path) -> None:
    """Regression: with PYTHONWARNINGS=error, the launcher ended with "ResourceWarning: unclosed file"."""
    (tmp_path / "script.py").write_text("print('done')")
    command = [sys.executable, "-m", "asyncdist", "run", *options, "-n", "1", "script.py"]
    environ = {**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n") and "ResourceWarning" not in ended.stderr, ended.stderr


# ---------------------------------------------------------------------------------------------- torch.distributed in it


def test_process_groups_meet_in_it_as_under_torchrun(tmp_path: Path) -> None:
    source = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), total.item())
dist.destroy_process_group()
"""
    with running(tmp_path, source, is_warm=True) as process:
        code, output, error = finish(process)
    printed = sorted(torchrun.without_gloo(output).splitlines())
    assert (code, printed) == (0, ["0 3 6.0", "1 3 6.0", "2 3 6.0"]), error
