"""Tests ``asyncdist top`` and ``asyncdist run --live``, which show the ranks while they work."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from support import mpi
from support.processes import is_alive, wait_until

from asyncdist.story import sockets
from asyncdist.story.finding import job_of_process

pytest.importorskip("rich", reason="rich is not installed")

#: Trains until the file ``stop`` exists; rank 1 computes from its 20th step on, and its event loop does not run.
TRAINS = """
    import os, signal, sys, time, torch
    import asyncdist as ad
    from protocols import AsyncSelectiveAveragingPolicy

    async def main(world, fails):
        signal.signal(signal.SIGUSR2, lambda *_: print(f"rank {world.rank} has received it", flush=True))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=5, name="mine") as policy:
            while not os.path.exists("stop"):
                await policy.step(-float(world.rank))
                time.sleep(0.01)
                while world.rank == 1 and policy.iteration >= 20 and not os.path.exists("stop"):
                    time.sleep(0.01)
            print(f"rank {world.rank} has seen the file after {policy.iteration} steps", flush=True)
        if fails:
            sys.exit(1)  # as a rank does that hears of the other's end before

    ad.run(main, len(sys.argv) > 1)
"""


def command(folder: Path, *options: str, transport: str, arguments: tuple[str, ...] = ()) -> list[str]:
    script = folder / "script.py"
    script.write_text("\n".join(line[4:] for line in TRAINS.splitlines()))
    program = [str(script), *arguments]  # not warm, because the ranks must be children of the command
    return [sys.executable, "-m", "asyncdist", "run", "--transport", transport, "-n", "2", *options, *program]


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-m", "asyncdist", "top", *arguments]
    environ = {**mpi.base_environment(), "COLUMNS": "120"}
    return subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=60, check=False)


def check_top(folder: Path, transport: str) -> None:
    with (folder / "said").open("w") as said:
        environ = mpi.base_environment()
        job = subprocess.Popen(command(folder, transport=transport), cwd=folder, env=environ, stdout=said, stderr=said)
    try:
        told = ""

        def is_told() -> bool:
            nonlocal told
            ended = top(str(job.pid))  # the job may not have begun yet, and other jobs may run on this host
            told = ended.stdout + ended.stderr
            return re.search(r"^ +1 +mine +20 ", ended.stdout, re.MULTILINE) is not None

        assert wait_until(is_told), f"{told}\n{(folder / 'said').read_text()}"
        head, names, first, second = told.splitlines()[:4]
        assert re.match(r"job [0-9a-f]{8}: 2 of 2 ranks, [\d.]+ steps/s", head), told
        assert names.split()[:6] == ["rank", "policy", "step", "step/s", "metric", "round"], told
        assert float(first.split()[3]) > 0, told
        assert (second.split()[3], second.split()[4]) == ("0.0", "-1"), told
        assert "job " + head[4:12] in top(head[4:12]).stdout
    finally:
        (folder / "stop").touch()
        assert job.wait(60) == 0, (folder / "said").read_text()


@pytest.mark.mpi
@pytest.mark.long
def test_top_shows_ranks_of_mpi_also_one_that_computes(tmp_path: Path) -> None:
    check_top(tmp_path, "mpi")


@pytest.mark.long
def test_top_shows_ranks_of_torch_also_one_that_computes(tmp_path: Path) -> None:
    check_top(tmp_path, "torch")


def page_address(page: subprocess.Popen[str]) -> str:
    """Return the address that the command prints."""
    assert page.stdout is not None
    return page.stdout.readline().split()[-1]


@pytest.mark.long
def test_page_of_a_real_job_follows_it_to_its_end(tmp_path: Path) -> None:
    """Ctrl-C ends the command without a traceback."""
    words, environ = command(tmp_path, transport="torch"), mpi.base_environment()
    with (tmp_path / "said").open("w") as said:
        job = subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=said, stderr=said)
    told: dict[str, Any] = {}

    def ask() -> dict[str, Any]:
        with urllib.request.urlopen(address.replace("/?", "/job.json?"), timeout=30) as answer:
            told.update(json.load(answer))
        return told

    def steps() -> list[float | None]:
        names = [column["name"] for column in ask()["columns"]]
        return [line["values"][names.index("step")] for line in told["lines"]]

    def has_still_rank() -> bool:
        is_there = steps()[1:] == [20]
        return is_there and any(note["rank"] == 1 and "in main" in note["text"] for note in told["notes"])

    page: subprocess.Popen[str] | None = None
    try:
        assert wait_until(lambda: job_of_process(job.pid, sockets.jobs()) is not None), (tmp_path / "said").read_text()
        web = [sys.executable, "-m", "asyncdist", "top", "--web", str(job.pid)]
        page = subprocess.Popen(web, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        address = page_address(page)
        assert wait_until(has_still_rank), told
        assert (steps()[0] or 0) > 20 and told["is_running"], told
        (tmp_path / "stop").touch()
        assert wait_until(lambda: not ask()["is_running"]), told
        assert [line["rank"] for line in told["lines"]] == [0, 1], "each rank must have one line of answers"
        page.send_signal(signal.SIGINT)
        assert page.communicate(timeout=30)[1] == "" and page.returncode == 0
    finally:
        (tmp_path / "stop").touch()
        if page is not None:
            page.kill()
            page.communicate()
        assert job.wait(60) == 0, (tmp_path / "said").read_text()


def test_top_of_a_job_that_is_not_there_is_one_line() -> None:
    ended = top("no-such-job")
    assert ended.returncode == 2
    assert ended.stderr.startswith("asyncdist top: no job ")
    assert ended.stderr.count("\n") == 1


def leading(words: list[str]) -> list[str]:
    """Return a command that starts ``words`` as the leader of a session whose terminal is standard input."""
    begin = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", begin, *words]


class Terminal:
    """A job in its own terminal."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._own, its = pty.openpty()
        environ = {**mpi.base_environment(), "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        self.job = subprocess.Popen(
            words, cwd=folder, env=environ, stdin=its, stdout=its, stderr=its, start_new_session=True
        )
        os.close(its)
        os.set_blocking(self._own, False)
        self.said = ""

    def shows(self, pattern: str) -> bool:
        """Return whether the pattern has been shown so far."""
        try:
            self.said += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self._own, 1 << 20).decode(errors="replace"))
        except (BlockingIOError, OSError):  # nothing new, or the end of the output
            time.sleep(0.05)
        return re.search(pattern, self.said, re.MULTILINE) is not None

    def close(self) -> None:
        """Close the terminal, as its window does."""
        os.close(self._own)

    def ended(self) -> int:
        """Return the exit code, and read the rest of the output."""
        assert wait_until(lambda: not self.shows("^cannot be$") and self.job.poll() is not None), self.said
        self.shows("")
        os.close(self._own)
        return self.job.returncode


@pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("torch", marks=pytest.mark.long)]
)
def test_live_shows_the_table_below_output_with_true_last_steps(tmp_path: Path, transport: str) -> None:
    """Signals and the exit code are passed on, too.

    Regression: the last table showed how far ranks were a second before the end.
    """
    terminal = Terminal(command(tmp_path, "--live", transport=transport, arguments=("fails",)), tmp_path)
    try:
        assert wait_until(lambda: terminal.shows(r"^ +1 +mine +20 +0\.0 +-1 ")), terminal.said
        assert wait_until(lambda: terminal.shows(r"^rank 1 (blocks|computes) for .* in main")), terminal.said
        terminal.job.send_signal(signal.SIGUSR2)
        assert wait_until(lambda: terminal.shows("rank 0 has received it")), terminal.said
        assert wait_until(lambda: terminal.shows("rank 1 has received it")), terminal.said
    finally:
        (tmp_path / "stop").touch()
    assert terminal.ended() == 1, terminal.said
    steps = dict(re.findall(r"rank (\d) has seen the file after (\d+) steps", terminal.said))
    assert sorted(steps) == ["0", "1"], terminal.said
    last = re.split(r"^\W*job ", terminal.said, flags=re.MULTILINE)[-1]
    assert dict(re.findall(r"^ +(\d) +mine +(\d+) ", last, re.MULTILINE)) == steps, terminal.said
    assert "before the end" not in terminal.said, "the last table must show only current values"


@pytest.mark.long
def test_a_signal_to_the_command_ends_the_job(tmp_path: Path) -> None:
    terminal = Terminal(command(tmp_path, "--live", transport="torch"), tmp_path)
    try:
        assert wait_until(lambda: terminal.shows(r"^ +0 +mine")), terminal.said
        terminal.job.send_signal(signal.SIGTERM)
        assert terminal.ended() == 128 + signal.SIGTERM, terminal.said
    finally:
        (tmp_path / "stop").touch()


@pytest.mark.long
def test_no_rank_outlives_a_killed_command(tmp_path: Path) -> None:
    """Regression: the job continued without a launcher, a terminal and output."""
    terminal = Terminal(command(tmp_path, "--live", transport="torch"), tmp_path)
    try:
        assert wait_until(lambda: terminal.shows(r"^ +0 +mine")), terminal.said
        script = str(tmp_path / "script.py").encode()
        running = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if script in command_line(pid)]
        assert len(running) >= 4, "the command, its child and both ranks must be running"
        terminal.job.kill()
        assert terminal.job.wait(60) == -signal.SIGKILL
        assert wait_until(lambda: not any(map(is_alive, running)))
    finally:
        (tmp_path / "stop").touch()


def command_line(pid: int) -> bytes:
    """Return the words of a process, or b"" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.long
def test_a_terminal_that_is_closed_ends_the_job(tmp_path: Path) -> None:
    """Regression: the kernel notifies only the leader of the session, so the job continued without a terminal."""
    terminal = Terminal(leading(command(tmp_path, "--live", transport="torch")), tmp_path)
    try:
        assert wait_until(lambda: terminal.shows(r"^ +0 +mine")), terminal.said
        terminal.close()
        assert terminal.job.wait(60) == 128 + signal.SIGHUP
    finally:
        (tmp_path / "stop").touch()


@pytest.mark.long
def test_without_a_terminal_the_job_runs_without_the_table(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    words = command(tmp_path, "--live", transport="torch")
    ended = subprocess.run(
        words, cwd=tmp_path, env=mpi.base_environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "asyncdist run: --live: the output is not a terminal; the job runs without the table" in ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank} has seen the file after 0 steps" for rank in (0, 1)]


def test_an_axis_between_neighbouring_numbers_has_an_end() -> None:
    """Regression: adding the step did not change the tick, so the page froze."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    page = resources.files("asyncdist.report.live_page").joinpath("page.html").read_text(encoding="utf-8")
    (function,) = re.findall(r"^function ticks\(.*?^}$", page, re.MULTILINE | re.DOTALL)
    axes = [(0.0, 1.0), (-0.25, 0.9), (0.1, math.nextafter(0.1, 1.0)), (7e5, math.nextafter(7e5, 1e6)), (-1e308, 1e308)]
    shown = f"{function}; console.log(JSON.stringify({json.dumps(axes)}.map(([low, high]) => ticks(low, high, 4))))"
    ended = subprocess.run([node, "-e", shown], capture_output=True, text=True, timeout=20, check=True)
    whole, signed, *others = json.loads(ended.stdout)
    assert whole == pytest.approx([0, 0.5, 1.0]) and signed == pytest.approx([0, 0.5])
    assert all(len(each) <= 5 for each in others)
