"""Runs a command on the login node of a real Slurm, whose nodes are hosts of ``tools/hosts``.

    result = run(2, ["srun", "-n", "4", "python", "train.py"]).check()

The daemons are Debian's (packages slurm-wlm, munge and, for PMIx, libpmix-dev). They are started on the virtual hosts
and end with them. A test that calls this function is skipped, with the reason, if they are not installed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support import torchrun

PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "munged": "munge"}
CONFIGURATION = """
ClusterName=test
SlurmctldHost=login
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName=host[1-{count}] CPUs=2
PartitionName=main Nodes=ALL Default=YES OverSubscribe=FORCE:8
"""
START_S = 30.0


def run(count: int, words: Sequence[object], *, timeout_s: float = 100.0) -> torchrun.Result:
    """Run ``words`` on the login node of a Slurm with ``count`` nodes of two cores, until it ends."""
    import pytest  # the program on the login node does not need it

    from support import hosts

    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}: install {package}")
    with tempfile.TemporaryDirectory(prefix="asyncdist-slurm-") as folder:
        command = [sys.executable, __file__, folder, count, *words]
        return hosts.run(count, command, timeout_s=timeout_s)


def main(folder: Path, count: int, words: Sequence[str]) -> None:
    """Start the daemons, on the login node and on the hosts, and become the command."""
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, count=count))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not this machine's control groups
    # The plugin for PMIx makes a folder that only one of the hosts may make.
    (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    places = {"key-file": key.name, "socket": "munge.socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    start("munged", "--force", *(f"--{name}={folder}/{file}" for name, file in places.items()))
    start("slurmctld")
    for number in range(1, count + 1):
        start("ssh", f"host{number}", f"exec slurmd -N host{number} -f {folder}/slurm.conf")
    deadline = time.monotonic() + START_S
    while "idle" not in (states := answer("sinfo", "-h", "-N", "-o", "%T")) or set(states.split()) != {"idle"}:
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
            sys.exit(f"Slurm did not start within {START_S:g} s: {states}\n{logs}")
        time.sleep(0.1)
    os.execvp(words[0], list(words))


def start(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def answer(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
