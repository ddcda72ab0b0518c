"""Tests ``asyncdist run --hosts`` on virtual hosts: jobs, their ends, and hosts that lack something."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support import hosts, mpi, warm
from support.mpi import ROOT, base_environment
from support.processes import wait_until

import asyncdist as ad
from asyncdist import local_host
from asyncdist.launch.hosts import host_agent, remote_hosts
from asyncdist.launch.hosts.remote_hosts import Host
from asyncdist.launch.supervision.endings import describe_end

RUN = "asyncdist run"
SSH = hosts.PROGRAM.parent / "ssh"
LAYOUTS = {2: "host1:2,host2:2", 3: "host1:2,host2:1,host3:1"}
#: Mbit/s of each host's network card if messages should wait for it.
RATE = 200
#: Cases of the helpers with much and little data, from one rank and from all; the other cases only compute.
CASES = (
    "everyday.large_and_small_values_together",
    "everyday.two_groups_at_once_and_nobody_else",
    "models.large_models_are_summed_in_rank_order",
    "models.large_ragged_tensors_in_any_memory_layout",
    "roles.by_host",
)
MPI, MORE = pytest.mark.mpi, pytest.mark.more_hosts


def require(transport: str) -> None:
    """Skip the calling test if ranks of several hosts cannot communicate over this transport."""
    if transport == "mpi":
        mpi.require_mpi()
        if mpi.flavour() == "mpich":
            pytest.skip("on MPICH messages between hosts get lost when a second policy starts (docs/clusters.md)")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "count", "cases", "rate"),
    [
        pytest.param("torch", 3, CASES, None, marks=pytest.mark.long),
        pytest.param("mpi", 2, CASES, None, marks=MPI),
        pytest.param("torch", 2, (), RATE, marks=MORE),
        pytest.param("mpi", 3, (), RATE, marks=[MPI, MORE]),
    ],
)
def test_a_policy_helpers_and_a_replay_buffer(
    transport: str, count: int, cases: tuple[str, ...], rate: int | None
) -> None:
    require(transport)
    where = ["--hosts", LAYOUTS[count], "--ssh", f"{SSH} -x", "--transport", transport]
    words = ["asyncdist", "run", *where, *hosts.script("on_hosts.py", *cases)]
    reports = hosts.run(count, words, rate=rate, timeout_s=280).check().reports
    names = [name for host in LAYOUTS[count].split(",") for name in [host[:5]] * int(host[6:])]
    assert [reports[rank]["host"] for rank in range(4)] == names
    assert {report["transport"] for report in reports.values()} == {transport}
    worst, *others = (reports[rank]["policy"] for rank in range(4))
    assert worst["replacements"] == 3 and worst["floating"] == [2.0]  # the mean of 1, 2 and 3
    assert all(other["replacements"] == 0 and other["unchanged"] for other in others)


@pytest.mark.parametrize(("where", "count"), [((), 4), (("--hosts", LAYOUTS[2]), 0)])
def test_the_demo_ends_ranks_by_their_numbers_on_this_host_alone(
    monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...], count: int
) -> None:
    class Started(Exception):
        pass

    def start(command: list[str], histories: list[object], output: Path) -> None:
        assert len(histories) == count
        raise Started

    monkeypatch.syspath_prepend(ROOT / "tools" / "hypergrid")
    demo = pytest.importorskip("demo")
    monkeypatch.setattr(demo, "Job", start)
    with pytest.raises(Started):
        demo.run(demo.parse_arguments(where), None)


@pytest.mark.more_hosts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", [pytest.param("mpi", marks=MPI), "torch"])
@pytest.mark.parametrize(("count", "layout", "rate"), [(2, LAYOUTS[2], None), (3, "host1:2,host2:1,host3:2", RATE)])
def test_the_demo(transport: str, count: int, layout: str, rate: int | None, tmp_path: Path) -> None:
    """With three hosts, a fifth rank serves a replay buffer."""
    pytest.importorskip("gfn")
    require(transport)
    demo = [sys.executable, ROOT / "tools" / "hypergrid" / "demo.py", "--hosts", layout, "--transport", transport]
    words = [*demo, "--quick", "--verify", "--buffer-ranks", count - 2]
    words += ["--chart", tmp_path / "chart.png", "--report", tmp_path / "report.html"]
    result = hosts.run(count, words, rate=rate, timeout_s=500).check()
    assert re.search(r"All [1-9]\d* averages equal those recomputed", result.stdout), result.output()
    assert ("They drew " in result.stdout) == (count == 3)


# -- how jobs end -----------------------------------------------------------------------------------------------------

#: Each rank leaves a process in its own session; rank 2 ends as the argument says, and the others wait.
ENDING = """
import os, signal, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "{mark}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
rank, how, folder = int(os.environ["RANK"]), *sys.argv[1:]
open(f"{{folder}}/{{rank}}", "w").close()
while len(os.listdir(folder)) < 4:
    time.sleep(0.02)
print("rank", rank, "of", os.environ["GROUP_RANK"], "here", flush=True)
if rank == 2 and how == "exit":
    sys.exit(7)
if rank == 2 and how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how != "well":
    time.sleep(1000)
"""
#: Waits until the processes exist on no host: the login node sees all of them.
GONE = "while pgrep -x -f 'sleep {mark}' >/dev/null; do sleep 0.05; done; echo gone"
STARTED = "while [ $(ls {folder} | wc -l) != 4 ]; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("how", "after", "code", "message"),
    [
        ("well", "wait $job", 0, ""),
        pytest.param(
            "exit",
            "wait $job",
            7,
            f"asyncdist run: rank 2 {describe_end(7)}",
            marks=pytest.mark.long,
        ),
        ("kill", "wait $job", 137, f"asyncdist run: rank 2 {describe_end(-signal.SIGKILL)}"),
        pytest.param("stay", "kill -TERM $job; wait $job", 143, "", marks=pytest.mark.long),
        ("stay", "kill -KILL $job; wait $job", 137, ""),
        (  # the ranks of one host end, and the others continue
            "stay",
            "kill -KILL $(pgrep -P $job | tail -1); while [ $(pgrep -c -x -f 'sleep {mark}') != 2 ]; do sleep 0.05; "
            "done; kill -TERM $job; wait $job",
            143,
            "the connection to host2 has ended",
        ),
    ],
    ids=["well", "an exit code", "a signal", "launcher told", "launcher killed", "connection lost"],
)
def test_a_job_ends_everywhere_and_leaves_nothing(
    how: str, after: str, code: int, message: str, tmp_path: Path
) -> None:
    names = {"mark": f"98766.{os.getpid()}", "folder": tmp_path / "started"}
    names["folder"].mkdir()
    script = tmp_path / "ending.py"
    script.write_text(ENDING.format(**names))
    start = f"{RUN} --hosts {LAYOUTS[2]} --transport torch {script} {how} {names['folder']} & job=$!"
    steps = [start, STARTED, after, "code=$?", GONE, "exit $code"]
    result = hosts.run(2, ["sh", "-c", "\n".join(steps).format(**names)]).check(code)
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stdout.splitlines()[-1] == "gone"
    said = {f"rank {rank} of {rank // 2} here" for rank in range(4)}
    assert said.issuperset(result.stdout.splitlines()[:-1])
    if how == "well":
        assert said.issubset(result.stdout.splitlines())


@MPI
def test_a_job_on_mpi_that_has_lost_a_host_has_failed(tmp_path: Path) -> None:
    """The exit code of mpirun is 0, even if ranks may not be lost."""
    names = {"folder": tmp_path / "started"}
    names["folder"].mkdir()
    script = tmp_path / "staying.py"
    script.write_text("import sys, tempfile, time\ntempfile.mkstemp(dir=sys.argv[1])\ntime.sleep(98767)\n")
    start = f"{RUN} --hosts {LAYOUTS[2]} --transport mpi {script} {names['folder']} & job=$!"
    kill = "kill -KILL $(pgrep -x prted | tail -1)"
    result = hosts.run(2, ["sh", "-c", "\n".join([start, STARTED, kill, "wait $job"]).format(**names)]).check(1)
    assert result.stderr.count("asyncdist run: mpirun ") == 1


@MPI
def test_open_mpis_files_on_other_hosts_are_private(tmp_path: Path) -> None:
    """Regression: other users of a host who had made the folder prted.PID first could replace the files in it."""
    script = tmp_path / "show.py"
    script.write_text("import os\nfrom mpi4py import MPI\nprint(os.environ['PMIX_SERVER_TMPDIR'], flush=True)\n")
    start = f"{RUN} --hosts host1:1,host2:1 --transport mpi {script}"
    left = "for host in host1 host2; do ssh $host 'ls -d /dev/shm/asyncdist-mpi-*'; done"
    result = hosts.run(2, ["sh", "-c", f"{start} && ! ({left})"]).check()
    folders = result.stdout.splitlines()
    assert len(folders) == 2 and all("/asyncdist-mpi-" in folder for folder in folders), result.output()


#: Rank 2 ends as the argument says; with "stay" all ranks wait for a signal. Rank 0 reports when all are ready.
MPI_ENDING = """
import os, signal, sys
import torch
import asyncdist as ad

async def main(world):
    await ad.barrier()
    if world.rank == 2 and sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 0:
        open(sys.argv[2], "w").close()
    await world.receive_stream(torch.zeros(1), (world.rank + 1) % 4)

ad.run(main)
"""
#: A shell makes its background children ignore SIGINT.
HEEDS_CTRL_C = "python -c 'import os, signal as s, sys; s.signal(2, s.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])'"


@MPI
@pytest.mark.parametrize(
    ("how", "after", "code", "said"),
    [
        pytest.param(
            "kill",
            "",
            137,
            r"^asyncdist run: rank 2 was killed by SIGKILL .*; stopping the others \(--survive lets",
            marks=pytest.mark.long,
        ),
        ("stay", "kill -INT $job", 130, r"^asyncdist: rank 3 (?:was interrupted|stopped: .*); rank 3 was waiting for "),
    ],
)
def test_how_a_job_on_mpi_ends_between_hosts(how: str, after: str, code: int, said: str, tmp_path: Path) -> None:
    """Regression: MPI ended the job with 14 before the killed rank was known, or ranks before they printed."""
    script, there = tmp_path / "ending.py", tmp_path / "there"
    script.write_text(MPI_ENDING)
    program = " ".join(warm.command(script, (how, there), base_environment(), {}))
    start = f"{HEEDS_CTRL_C} {RUN} --hosts {LAYOUTS[2]} --transport mpi {program} & job=$!"
    steps = [start, *([f"while ! [ -e {there} ]; do sleep 0.02; done", after] if after else []), "wait $job; exit $?"]
    result = hosts.run(2, ["sh", "-c", "\n".join(steps)]).check(code)
    assert len(re.findall(said, result.stderr, re.MULTILINE)) == 1, result.output()
    assert "exited due to process rank" not in result.stderr, "mpirun reports another rank as the cause"


# -- missing on a host ------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "works" / "train.py"
    path.parent.mkdir()
    path.write_text("print('it runs')\n")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "mount -t tmpfs none {folder}",
            "host2: the directory {folder}/works does not exist: start in a",
        ),
        ("mount --bind /dev/null {python}", "host2: the interpreter {python} does not exist: install this environment"),
        ("mount -t tmpfs none {agent.parent}", "host2: asyncdist is not installed at {agent}: install it"),
        ("mount -t tmpfs none {script.parent}", "host2: the script '{script}' does not exist"),
        (
            "mount --bind {other} {version}",
            f"host2: asyncdist must be equal on all hosts, but it is 9.9 there and {ad.__version__} here",
        ),
    ],
    ids=["directory", "interpreter", "agent", "script", "version"],
)
def test_what_is_missing_on_a_host_is_one_line(change: str, message: str, script: Path, tmp_path: Path) -> None:
    other = tmp_path / "version.py"
    other.write_text('__version__ = "9.9"\n')
    names = {
        "folder": tmp_path,
        "python": sys.executable,
        "agent": Path(host_agent.PROGRAM),
        "script": script,
        "other": other,
        "version": Path(ad.__file__).with_name("_version.py"),
    }
    steps = f"cd {script.parent} && ssh host2 {change} && {RUN} --hosts host1:1,host2:1 --transport torch {script}"
    result = hosts.run(2, ["sh", "-c", steps.format(**names)]).check(2)
    assert result.stdout == ""
    assert result.stderr.startswith("asyncdist run: " + message.format(**names)) and result.stderr.count("\n") == 1


def test_a_host_that_does_not_answer_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, script: Path) -> None:
    monkeypatch.setattr(remote_hosts, "HELLO_S", 0.3)
    silent = ["sh", "-c", f"exec sleep 98767.{os.getpid()}"]  # the host and the command line are its arguments
    hosts = remote_hosts.parse_hosts("a:1,b:1")
    with (
        pytest.raises(local_host.LaunchError, match=r"^a, b: the host did not answer within 0\.3 s$"),
        remote_hosts.connected(hosts, silent, str(script)),
    ):
        pytest.fail("no host has answered, so connected() must raise")
    assert subprocess.run(["pgrep", "-f", silent[2]], capture_output=True, check=False).stdout == b""


#: Takes the place of ssh: host "lost" gets only the launcher's first line, so that its connection ends after ``hello``.
LOSING_SSH = ["sh", "-c", 'test "$0" = lost && head -n 1 | sh -c "$1" || exec sh -c "$1"']


def test_a_rank_fails_if_its_host_was_lost_before_its_start(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Regression: if the connection ended between the check and the start, the launcher waited forever."""
    with remote_hosts.connected([Host("lost", 2)], LOSING_SSH, str(script)) as [agent]:
        assert wait_until(lambda: "lost stdout" not in [thread.name for thread in threading.enumerate()])
        ended = threading.Event()
        rank = agent.start(1, ["sleep", "600"], {}, ended.set)
        assert ended.is_set() and rank.returncode == 255 and not agent.has_ranks
    (line,) = capfd.readouterr().err.splitlines()
    assert "the connection to lost has ended" in line and line.endswith("rank 1")


def test_the_other_hosts_are_left_if_one_cannot_be_reached(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if ssh could not be started for the second host, the first host's ssh remained."""
    began: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if began:
            raise OSError(errno.EMFILE, "too many open files")
        began.append(popen(*args, **options))
        return began[0]

    monkeypatch.setattr(remote_hosts.subprocess, "Popen", start)
    with (
        pytest.raises(local_host.LaunchError, match="too many open files"),
        remote_hosts.connected([Host("a", 1), Host("b", 1)], LOSING_SSH, str(script)),
    ):
        pytest.fail("connected() must raise")
    assert began[0].returncode is not None


@pytest.mark.parametrize("last", ['{"start": 1, "command": ["/bin/sl', "no JSON\n"])
def test_an_agent_ends_its_ranks_if_a_line_is_cut_off(last: str, tmp_path: Path) -> None:
    """Regression: if the launcher or its ssh was killed within a line, the agent and its ranks ran forever."""
    script = tmp_path / "script.py"
    script.touch()
    lines = [
        {"script": str(script), "count": 1, "needs": [], "reports": ""},
        {"start": 0, "command": [shutil.which("sleep"), "600"], "environ": {}},
    ]
    told = "".join(f"{json.dumps(line)}\n" for line in lines) + last
    agent = subprocess.run(
        [sys.executable, host_agent.PROGRAM, "token"], input=told.encode(), capture_output=True, timeout=60, check=False
    )
    assert b"hello" in agent.stdout
