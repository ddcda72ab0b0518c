"""Tests that an unplugged host, which sends nothing, is noticed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import unplugged
from support import hosts

#: Runs a program instead of mpirun.
WATCH = """
import os, sys
from asyncdist.launch.supervision import endings, mpirun_process
command = [sys.executable, "-c", sys.argv[1]]
sys.exit(mpirun_process.run(sys.executable, command, os.environ, endings.JobEnds(1)))
"""
#: The same, with an agent that sends nothing, in a job whose ranks survive losses.
SILENT = """
import os, sys, types
from asyncdist.launch.hosts import remote_hosts
from asyncdist.launch.supervision import endings, mpirun_process
remote_hosts.PROBE_S = remote_hosts.SILENCE_S = 0.1
host = types.SimpleNamespace(name="host2")
agent = types.SimpleNamespace(host=host, is_silent=True, probe=lambda: None, close=lambda _: None)
command = [sys.executable, "-c", sys.argv[1]]
ends = endings.JobEnds(1, survives=True)
sys.exit(mpirun_process.run(sys.executable, command, os.environ, ends, agents=[agent]))
"""
KILLED = "asyncdist run: mpirun was killed by SIGKILL (the kernel kills processes when memory is short: see dmesg)\n"
ENDS = "asyncdist run: mpirun has lost a host, and ended the job early\n"


def test_an_unplugged_host_and_the_others_lose_each_other() -> None:
    start = ["asyncdist", "run", "--hosts", "host1:2,host2:1", "--transport", "torch"]
    reports = hosts.run(2, [*start, *hosts.script("unplugged.py", "eth0")]).check().reports
    assert [reports[rank]["lost"] for rank in (0, 1)] == [unplugged.VICTIM] * 2
    assert reports[unplugged.VICTIM]["lost"] in (0, 1)
    assert [reports[rank]["left"] for rank in range(3)] == [2, 2, 1]
    assert all(report["steps"] > 20 for report in reports.values()), "the ranks must train until they learn of the loss"


@pytest.mark.mpi
@pytest.mark.long
def test_a_job_that_mpirun_ends_for_a_lost_host_has_failed() -> None:
    """The exit code of mpirun itself is 0, and mpirun takes eight minutes to notice."""
    start = ["asyncdist", "run", "--hosts", "host1:2,host2:1", "--survive"]
    names = ("time", "intvl", "probes")
    soon = {f"PRTE_MCA_oob_tcp_keepalive_{name}": str(value) for name, value in zip(names, (2, 1, 2), strict=True)}
    result = hosts.run(2, [*start, unplugged.__file__, "eth0"], **soon)
    assert result.returncodes == (1,), result.output()
    assert "PRTE has lost communication with a remote daemon" in result.stderr
    assert result.stderr.count("asyncdist run: mpirun ") == 1


#: The network card of host2 sends nothing to host1, while mpirun reaches both hosts.
SEPARATED = """
import socket, subprocess
import asyncdist as ad

if socket.gethostname() == "host2":
    subprocess.run(["ip", "route", "add", "unreachable", "10.213.77.1/32"], check=True)

async def main(world):
    print("in main")

ad.run(main)
"""


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("", "asyncdist run: rank 1 on host2 could not connect to host1 (10.213.77.1 on port 1024: No route"),
        (
            "--survive",
            "TransportError: rank 1 on host2 failed while it waited for all 2 ranks to open their worlds: MPI",
        ),
    ],
    ids=["ending", "surviving"],
)
def test_hosts_that_do_not_reach_each_other_are_named(option: str, message: str, tmp_path: Path) -> None:
    """Regression: the first showed only lines of Open MPI's C code, the second mpi4py's traceback."""
    script = tmp_path / "separated.py"
    script.write_text(SEPARATED)
    start = ["asyncdist", "run", "--transport", "mpi", "--hosts", "host1:1,host2:1", *option.split()]
    result = hosts.run(2, [*start, script])
    assert result.returncodes != (0,) and "in main" not in result.stdout
    assert result.stderr.count(message) == 1, result.output()
    assert "OMPI_MCA_btl_tcp_if_include" in result.stderr


#: After the ranks' communicators are made, or before MPI starts, host2 sends nothing to host1, or to any host.
CUT = """
import os, pathlib, signal, socket, subprocess, sys
import asyncdist as ad
from asyncdist.transports.torch_distributed import sockets
from asyncdist.transports import mpi

sockets.IDLE_S = sockets.INTERVAL_S = sockets.PROBE_COUNT = sockets.UNACKNOWLEDGED_S = 1

def cut(*given):
    probe_all(*given)
    if socket.gethostname() == "host2":
        subprocess.run(["ip", *sys.argv[2:]], check=True)

if sys.argv[1] == "at once":
    if socket.gethostname() == "host2":
        subprocess.run(["ip", *sys.argv[2:]], check=True)
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            if b"host_agent.py" in path.read_bytes():  # its ssh is a pipe here, which the network does not break
                os.kill(int(path.parent.name), signal.SIGSTOP)
else:
    probe_all, mpi.probe_all = mpi.probe_all, cut

async def main(world):
    await ad.barrier()

ad.run(main)
"""


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize(
    ("when", "how", "option", "said"),
    [
        (
            "at once",
            "link set eth0 down",
            "",
            "mpirun has lost a host, and ended the job early: see that host2",
        ),
        ("at once", "link set eth0 down", "--survive", "host2 has not answered for 30 s, and not all ranks are"),
        (
            "in Dup",
            "route add blackhole 10.213.77.1/32",
            "",
            r"rank \d on host\d lost its connection to host\d \(",
        ),
    ],
    ids=["card", "card, surviving", "link"],
)
def test_a_network_that_is_lost_as_ranks_meet_ends_the_job(
    when: str, how: str, option: str, said: str, tmp_path: Path
) -> None:
    """Regression: the first two hung until a probe of mpirun after 8 minutes, the third until TCP gave up."""
    script = tmp_path / "cut.py"
    script.write_text(CUT)
    start = ["asyncdist", "run", "--transport", "mpi", "--hosts", "host1:1,host2:1", *option.split()]
    result = hosts.run(2, [*start, script, when, *how.split()])
    assert result.returncodes != (0,)
    assert len(re.findall(f"asyncdist run: {said}", result.stderr)) == 1, result.output()


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, KILLED),
        ("import sys; print('PRTE has lost communication with a remote daemon.', file=sys.stderr)", 1, ENDS),
        ("import sys; print('A daemon failed to report back after being spawned.', file=sys.stderr)", 1, ENDS),
        ("import sys; sys.exit('PRTE has lost communication with a remote daemon.')", 1, ""),
    ],
)
def test_the_exit_code_of_a_watched_mpirun(program: str, code: int, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", WATCH, program], capture_output=True, text=True, check=False)
    assert ended.returncode == code
    own = [line for line in ended.stderr.splitlines(keepends=True) if "daemon" not in line]
    assert "".join(own) == said


def test_a_silent_host_ends_a_job_whose_ranks_have_not_met() -> None:
    command = [sys.executable, "-c", SILENT, "import time; time.sleep(600)"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == (
        "asyncdist run: host2 has not answered for 0.1 s, and not all ranks are connected yet, so the job ends: check "
        "that it runs and that the network is up\n"
    )


#: Runs ranks on two hosts, which are this one. The agent of rank 1's host is stopped.
FROZEN = """
import os, sys
from asyncdist import cli
from asyncdist.launch.hosts import remote_hosts
remote_hosts.PROBE_S, remote_hosts.SILENCE_S = 0.5, 2.0
hosts = ["--hosts", "localhost:1,127.0.0.1:1", "--ssh", sys.argv[1]]
cli.main(["run", *hosts, "--transport", "torch", sys.argv[2], sys.argv[3], str(os.getpid())])
"""
FREEZES = """
import os, pathlib, signal, sys, time
frozen = pathlib.Path(__file__).with_name("frozen")
if os.environ["RANK"] == "1":
    guardian = int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    agent = int(pathlib.Path(f"/proc/{guardian}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGSTOP)
    frozen.touch()
    time.sleep(600)
while not frozen.exists():
    time.sleep(0.01)
if sys.argv[1] == "stopped":
    os.kill(int(sys.argv[2]), signal.SIGTERM)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the script finds its agent through procfs")
@pytest.mark.parametrize(("how", "code"), [("trained", 255), ("stopped", 128 + signal.SIGTERM)])
def test_a_frozen_host_is_given_up_when_the_others_have_ended(how: str, code: int, tmp_path: Path) -> None:
    """Regression: the command waited until ssh noticed, which may take hours, and ignored Ctrl-C and SIGTERM."""
    ssh, script = tmp_path / "ssh", tmp_path / "freezes.py"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    script.write_text(FREEZES)
    command = [sys.executable, "-c", FROZEN, str(ssh), str(script), how]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == code, ended.stderr
    lost = "the connection to 127.0.0.1 has ended (exit code -9; the host has not answered for 2 s), and with it rank 1"
    assert ended.stderr.count(lost) == 1, ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_watched_mpirun_gets_signals_and_dies_with_its_watcher(number: signal.Signals) -> None:
    program = f"""if True:
        import signal, sys, time
        signal.signal({int(number)}, lambda *_: sys.exit(9))
        print("ready", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", WATCH, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        os.kill(watcher.pid, number)
        assert watcher.wait(30) == 128 + number
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        watcher.kill()
        assert watcher.stdout.read() == b"", "the other end of the pipe must be closed"
