"""Tests ``asyncdist run --places`` and ``--join``: ranks of other launchers join a running world."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.mpi import REPORTS, ROOT, base_environment
from torch.distributed import TCPStore

from asyncdist import environment
from asyncdist.launch import local_ranks
from asyncdist.launch.supervision.endings import describe_end
from asyncdist.trust import job_secret
from asyncdist.trust.job_secret import SEAL_NBYTES

#: Generous limits: they fail only tests that hang, not tests that are slow.
TIMEOUT_S = 280.0
SCRIPT = ROOT / "tests" / "scripts" / "joins.py"


class Story:
    """Launchers in one folder, to which their ranks report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.give_up_at = time.monotonic() + TIMEOUT_S
        self.launchers: list[subprocess.Popen[bytes]] = []
        (folder / "reports").mkdir()

    def launch(self, name: str, cwd: Path, *options: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a launcher in a directory; its output goes to a file with this name."""
        base = base_environment()
        words = [sys.executable, "-m", "asyncdist", "run", *options, *warm.command(SCRIPT, (self.folder,), base, {})]
        environ = {**base, REPORTS: str(self.folder / "reports"), **env}
        with (self.folder / name).open("wb") as said:
            launcher = subprocess.Popen(words, cwd=cwd, env=environ, stdout=said, stderr=said)
        self.launchers.append(launcher)
        return launcher

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def until(self, name: str) -> dict[str, Any]:
        """Wait until a process has reported its identity."""
        while not (self.folder / name).exists():
            assert time.monotonic() < self.give_up_at, f"no {name}: {self.everything()}"
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(self.said(name))
        return found

    def address(self, name: str) -> str:
        """Return the address that a launcher has printed."""
        while not (found := re.search(r"--join (\S+:\d+) ", self.said(name))):
            assert time.monotonic() < self.give_up_at, self.everything()
            time.sleep(0.02)
        return found[1]

    def everything(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in self.folder.iterdir() if path.is_file())

    def code(self, launcher: subprocess.Popen[bytes]) -> int:
        try:
            return launcher.wait(max(0.0, self.give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs\n{self.everything()}") from None


@contextlib.contextmanager
def story(folder: Path) -> Iterator[Story]:
    told = Story(folder)
    try:
        yield told
    finally:
        for launcher in told.launchers:
            launcher.kill()
            launcher.wait()


def listens_at(port: int) -> set[str]:
    """Return the addresses at which processes of this host listen at a port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {words[1].partition(":")[0] for words in lines if words[1].endswith(f":{port:04X}") and words[3] == "0A"}


def command_lines() -> str:
    """Return the command lines of all processes of this host."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return "\n".join(found)


def second_process_of_rank_1(folder: Path, port: int, job: str, secret: str) -> str:
    """Run a process with the variables of rank 1, which is running; return its output."""
    script = folder / "second.py"
    script.write_text("import asyncdist as ad\nasync def main(world): pass\nad.run(main)")
    variables = {
        **local_ranks.rank_variables(1, 3, local_rank=1, local_size=2, address="127.0.0.1", port=port, run_id=job),
        **local_ranks.newcomer_variables(0, 1),
        environment.SECRET_VARIABLE: secret,
    }
    base = base_environment()
    words, environ = [sys.executable, *warm.command(script, (), base, {})], {**base, **variables}
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 1
    return ended.stderr


@pytest.mark.timeout(300)
def test_an_outsider_is_refused_and_disturbs_no_rank(tmp_path: Path) -> None:
    """Regression: any local user could join by the address, and an invalid value ended the thread that admits ranks."""
    with story(tmp_path) as told:
        first = told.launch("first", ROOT, "--transport", "torch", "-n", "2", "--places", "3")
        address = told.address("first")
        port = int(address.partition(":")[2])
        pids = [told.until(f"{rank}.0")["pid"] for rank in range(2)]
        assert listens_at(port) == {"0100007F"}, "the rank may only listen on the loopback interface"
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), wait_for_workers=False)
        running = json.loads(store.get("asyncdist/running")[SEAL_NBYTES:])
        world = running["world"]
        for key, value in (("newcomer/1", "no numbers"), ("newcomer/2", "1 1 deadbeef"), ("closed/0.0", "")):
            assert store.compare_set(f"asyncdist/{world}/{key}", "", value) == value.encode()
        store.set("asyncdist/over", "")
        stranger = told.launch("stranger", ROOT, "--join", address, ASYNCDIST_JOB_SECRET="not that of the job")
        assert told.code(stranger) == 2
        assert "the job's secret differs from this command's" in told.said("stranger")
        joins = told.launch("joins", ROOT, "--join", address)
        assert told.until("2.1")["admitted_at"] > 0
        secret = job_secret.find(job_secret.name_of(port), environment.shared_directories())
        assert secret is not None and secret not in command_lines()
        double = second_process_of_rank_1(told.folder, port, running["job"], secret)
        assert "rank 1 " in double and f"process {pids[1]} " in double
        told.folder.joinpath("enough").touch()
        assert (told.code(joins), told.code(first)) == (0, 0)
        assert secret not in told.everything()
        refusals = [line for line in told.said("first").splitlines() if "without a valid seal" in line]
        assert 1 <= len(refusals) <= 2, "ranks 0 and 1 must report the refusal, each at most once"
        assert job_secret.find(job_secret.name_of(port), environment.shared_directories()) is None


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_place_is_taken_lost_and_taken_again(tmp_path: Path) -> None:
    """The first launcher starts two of three ranks, which continue whatever happens to the third."""
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()
    with story(folder) as told:
        first = told.launch("first", ROOT, "--transport", "torch", "-n", "2", "--places", "3")
        address = told.address("first")
        assert "asyncdist run: 1 of 3 places is free; to join, run: asyncdist run --join" in told.said("first")
        killed = told.launch("killed", elsewhere, "--join", address)
        newcomer = told.until("2.1")
        assert newcomer["size"] == 3 and newcomer["admitted_at"] > 0, (
            "a newcomer must continue with a member's iteration"
        )
        for rank in range(2):
            assert told.until(f"{rank}.0")["absent"] == [2], (
                "main must know from its first line on that rank 2 is absent"
            )
        refused = told.launch("refused", elsewhere, "--join", address)
        assert told.code(refused) == 2
        refusal = rf"asyncdist run: --join {address}: none of the job's 3 places is free.*\n"
        assert re.fullmatch(refusal, told.said("refused"))

        os.kill(newcomer["pid"], signal.SIGKILL)
        assert told.code(killed) == 128 + signal.SIGKILL
        assert f"rank 2 {describe_end(-signal.SIGKILL)}" in told.said("killed")
        stopped = told.launch("stopped", elsewhere, "--join", address)
        told.until("2.2")
        stopped.terminate()
        assert told.code(stopped) == 128 + signal.SIGTERM
        assert told.said("stopped") == "asyncdist run: joins as rank 2 of 3\n"

        last = told.launch("last", elsewhere, "--join", address)
        told.until("2.4")
        assert told.said("first").count("\n") == 1, "the first job must print only one line"

        os.kill(told.until("1.0")["pid"], signal.SIGKILL)  # a rank of the first launcher
        while f"rank 1 {describe_end(-signal.SIGKILL)}" not in told.said("first"):
            assert time.monotonic() < told.give_up_at, told.everything()
            time.sleep(0.02)
        taking = told.launch("taking", elsewhere, "--join", address)
        told.until("1.1")
        (folder / "enough").touch()
        assert [told.code(launcher) for launcher in (first, last, taking)] == [0, 0, 0], told.everything()
        for name, rank in (("last", 2), ("taking", 1)):
            assert f"rank {rank} of 3" in told.said(name) and told.said(name).count("\n") == 1
        assert told.said("first").count("\n") == 2
        reports = [json.loads(path.read_text()) for path in (folder / "reports").iterdir()]
    assert len(reports) == 3, reports


@pytest.mark.slow
def test_a_silent_listener_does_not_keep_the_claiming_process() -> None:
    """Regression: after the launcher was killed, the process waited forever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"'127.0.0.1', {listener.getsockname()[1]}, 1, ''"
        source = f"from asyncdist.launch import place_claims as p; p._SILENT_S = 1; p.main({place})"
        command, environ = [sys.executable, "-c", source], {**base_environment(), "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=environ, timeout=100, check=False)
    assert ended.returncode == -signal.SIGALRM
