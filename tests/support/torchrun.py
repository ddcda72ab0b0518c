"""Runs Python on several ranks of torch.distributed, like ``support.mpi``, but without MPI.

    result = run_ranks(3, "tests/support/some_program.py", "--option", timeout_s=60)
    assert result.check().reports == {0: 2, 1: 2}

- The ranks are started here, with the variables that torchrun sets, and without an agent, so a killed rank does not end
  the others. ``run_torchrun`` starts the real torchrun, which takes some seconds more.
- ``support.mpi.report(rank, value)`` in a rank returns values, as under MPI.
- Ranks start warm, even under torchrun; see ``support.warm``.
- At the timeout, all started processes are killed, and the call raises AssertionError with the output so far.
- The lines that Gloo prints on standard output are left out of a result; see ``without_gloo``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncdist.launchers import addresses
from support import warm
from support.mpi import REPORTS, ROOT, base_environment


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a job of torch.distributed.

    Attributes:
        returncodes: Exit codes of the started processes: the ranks in order, or torchrun alone.
        stdout: Output of all ranks in turn.
        stderr: Errors of all ranks in turn.
        seconds: Wall-clock time.
        reports: Values that the ranks passed to ``report``, by rank.
    """

    returncodes: tuple[int, ...]
    stdout: str
    stderr: str
    seconds: float
    reports: Mapping[int, Any] = field(default_factory=dict)

    def check(self, *returncodes: int) -> Result:
        """Fail unless the processes ended with these codes, or all with 0. Returns itself."""
        wanted = returncodes or (0,) * len(self.returncodes)
        if self.returncodes != wanted:
            raise AssertionError(f"the processes ended with {self.returncodes}, expected {wanted}\n{self.output()}")
        return self

    def output(self) -> str:
        """Return everything that was printed, for an error message."""
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, without an agent."""
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}


def run_ranks(
    ranks: int,
    script: str | os.PathLike[str],
    *args: object,
    timeout_s: float = 100.0,
    env: Mapping[str, str] | None = None,
    missing: Sequence[int] = (),
) -> Result:
    """Run a Python script on ``ranks`` ranks; see the module's docstring.

    Args:
        ranks: Number of processes.
        script: Path of the script.
        args: Arguments of the script.
        timeout_s: Wall-clock seconds for everything.
        env: Variables to add to this process's environment.
        missing: Ranks that are not started.
    """
    port = addresses.find_free_port()
    program = warm.command(script, args, base_environment(), env or {})
    command = [sys.executable, *["-S"] * (program[0] == warm.CLIENT), *program]
    started = [rank for rank in range(ranks) if rank not in missing]
    return run_jobs([(command, {**rank_environment(rank, ranks, port), **(env or {})}) for rank in started], timeout_s)


def run_source(ranks: int, source: str, *args: object, **options: Any) -> Result:
    """Call ``run_ranks`` with a program given as text."""
    with tempfile.TemporaryDirectory(prefix="asyncdist-test-") as folder:
        script = Path(folder, "program.py")
        script.write_text(textwrap.dedent(source))
        return run_ranks(ranks, script, *args, **options)


def run_torchrun(ranks: int, source: str, *args: object, options: Sequence[str] = (), timeout_s: float = 100) -> Result:
    """Run a program given as text under the torchrun of this interpreter."""
    with tempfile.TemporaryDirectory(prefix="asyncdist-test-") as folder:
        script = Path(folder, "program.py")
        script.write_text(textwrap.dedent(source))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return run_jobs([([*command, *options, *warm.command(script, args, base_environment(), {})], {})], timeout_s)


def run_torchruns(
    agents: int, source: str, *args: object, options: Sequence[str] = (), timeout_s: float = 300, **env: str
) -> Result:
    """Run a program given as text, with one rank under each of several agents of torchrun, which represent hosts.

    Args:
        agents: Number of agents.
        source: Program as text.
        args: Arguments of the program.
        options: Options of torchrun.
        timeout_s: Wall-clock seconds for everything.
        env: Variables to add to this process's environment.
    """
    where = ["--nnodes", str(agents), "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    where += ["--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{addresses.find_free_port()}"]
    where += ["--local-addr", "127.0.0.1"]
    with tempfile.TemporaryDirectory(prefix="asyncdist-test-") as folder:
        script = Path(folder, "program.py")
        script.write_text(textwrap.dedent(source))
        program = warm.command(script, args, base_environment(), {})  # ``env`` is for the agents
        command = [sys.executable, "-m", "torch.distributed.run", *where, *options, *program]
        return run_jobs([(command, env)] * agents, timeout_s)


def run_alone(script: str | os.PathLike[str], *args: object, timeout_s: float = 100.0) -> Result:
    """Run a Python script of training libraries in one process without a launcher."""
    environ = warm.environment(base_environment(), *warm.LIBRARIES)
    return run_jobs([(warm.alone(environ, script, *args), environ)], timeout_s)


def run_jobs(jobs: Sequence[tuple[list[str], Mapping[str, str]]], timeout_s: float) -> Result:
    """Run commands at the same time until all have ended.

    Args:
        jobs: Each command, with the variables to add to this process's environment.
        timeout_s: Wall-clock seconds for everything.
    """
    with tempfile.TemporaryDirectory(prefix="asyncdist-test-") as folder, contextlib.ExitStack() as stack:
        reports = Path(folder, "reports")
        reports.mkdir()
        began_at = time.monotonic()
        processes = []
        for number, (command, variables) in enumerate(jobs):
            environ = {**base_environment(), REPORTS: str(reports), **variables}
            out, err = (stack.enter_context(Path(folder, f"{number}.{name}").open("wb")) for name in ("out", "err"))
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environ,
                    cwd=ROOT,
                    start_new_session=True,
                )
            )
        finished = _await_end(processes, began_at + timeout_s)
        outputs = [
            "".join(Path(folder, f"{number}.{name}").read_text(errors="replace") for number in range(len(jobs)))
            for name in ("out", "err")
        ]
        values = {int(path.stem): json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))}
        codes = tuple(process.returncode for process in processes)
        stdout, stderr = outputs
        result = Result(codes, without_gloo(stdout), stderr, seconds=time.monotonic() - began_at, reports=values)
        if not finished:
            raise AssertionError(f"{jobs[0][0]} did not end in {timeout_s:g} s: {codes}\n{result.output()}")
        return result


def without_gloo(stdout: str) -> str:
    """Return ``stdout`` without the line that Gloo of torch 2.8 prints for each process group, from C++."""
    return re.sub(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\..*\n", "", stdout)


def _await_end(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Return whether all processes ended on their own; kill the remaining processes in any case."""
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True
