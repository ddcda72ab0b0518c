"""Tests ``asyncdist run --transport torch --restarts N``: real kills, and ranks that join a running world."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from scripts.restarts import ROUNDS_AFTER
from support import mpi, torchrun, warm
from torch.distributed import HashStore

from asyncdist import cli
from asyncdist.errors import TransportError
from asyncdist.functional.checkpoints import checkpoint_files, manifests
from asyncdist.launch.supervision.endings import describe_end
from asyncdist.launchers.variables import TorchRendezvous
from asyncdist.transports.torch_distributed.meeting import newcomers

#: Generous limits: they fail only tests that hang, not tests that are slow.
TIMEOUT_S = 300.0
SOON_S = 60.0


def command(ranks: int, restarts: int, script: str | Path, *arguments: str) -> list[str]:
    """``asyncdist run`` with restarts, whose ranks start warm."""
    options = ["--transport", "torch", "-n", str(ranks), "--restarts", str(restarts)]
    program = warm.command(script, arguments, mpi.base_environment(), {})
    return [sys.executable, "-m", "asyncdist", "run", *options, *program]


def test_ranks_killed_at_any_time_take_part_again(tmp_path: Path) -> None:
    """The ranks are killed as ``tests/scripts/restarts.py`` describes."""
    job = command(4, 2, "tests/scripts/restarts.py", str(tmp_path / "started"))
    result = torchrun.run_jobs([(job, {})], TIMEOUT_S).check()
    assert result.stderr.count(describe_end(-signal.SIGKILL)) == 5
    assert result.stderr.count("(1 of 2)") == 4
    assert result.stderr.count("(2 of 2)") == 1
    assert "asyncdist: rank 1 was restarted, and other ranks have ended, so nothing is left to do" in result.stderr
    assert result.reports[1]["incarnation"] == 0, "rank 1 must be in the world from the beginning"
    assert result.reports[1]["coordinator"] == result.reports[0]["coordinator"] == 1
    last = max(max(found["gave"] + found["took"]) for found in result.reports.values())
    for rank in (0, 2, 3):
        newcomer = result.reports[rank]
        assert newcomer["incarnation"] == 1
        assert newcomer["took"] or newcomer["gave"], "the newcomer must take part in rounds"
        assert last > newcomer["first_round"] + ROUNDS_AFTER - 3, "rounds must continue after the newcomer has joined"
    assert all(result.reports[rank]["admitted_at"] > 0 for rank in (0, 2)), (
        "restarted ranks must continue with a member's iteration"
    )


def test_a_rank_killed_in_a_save_is_in_later_checkpoints(tmp_path: Path) -> None:
    """Regression: the others raised RankLostError, and restarted ranks were never saved."""
    result = torchrun.run_jobs([(command(3, 1, "tests/scripts/restarted_saves.py", str(tmp_path)), {})], TIMEOUT_S)
    reports = result.check().reports
    assert {rank: found[0] for rank, found in reports.items()} == {0: 0, 1: 1, 2: 0}
    assert "may be incomplete, and is then ignored, because rank 1 was lost during the save" in result.stderr
    folder, manifest = manifests.find_newest(tmp_path / "saved")
    assert [entry["rank"] for entry in manifest["files"]] == [0, 1, 2]
    saved = [checkpoint_files.read_rank(folder, entry)["model"]["weight"].item() for entry in manifest["files"]]
    assert saved == [reports[rank][2] for rank in range(3)]


@pytest.mark.long
def test_restarts_of_a_living_rank_or_another_job_are_refused() -> None:
    """A restart with another version is refused, too. No refusal disturbs the job."""
    result = torchrun.run_jobs([(command(3, 1, "tests/scripts/refused_newcomers.py"), {})], TIMEOUT_S).check()
    found, lives, job, version = result.reports[2]
    assert re.search(r"already has a rank 2 .*: process \d+ of this host runs as that rank", found)
    assert "rank 2 must not be restarted, because its previous process is still alive" in lives
    assert re.search("job must be equal .* rank 2, but it is 'asyncdist-.* there and 'another' here", job)
    assert re.search(r"version must be equal .* there and 'asyncdist 0.0.0, frames \d+' here", version)
    assert [result.reports[rank] for rank in (0, 1)] == [3.0, 3.0], "the remaining ranks must finish their collective"


def test_a_rank_killed_too_often_is_left_out_with_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, time\n"
        "starts = pathlib.Path(__file__).parent\n"
        "if os.environ['RANK'] == '1':\n"
        "    (starts / os.environ['ASYNCDIST_INCARNATION']).touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not (starts / '2').exists():\n"
        "    time.sleep(0.02)\n"
    )
    result = torchrun.run_jobs([(command(2, 2, script), {})], TIMEOUT_S).check(128 + signal.SIGKILL)
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "0", "1", "2"}
    said = [
        line
        for line in result.stderr.splitlines()
        if line.startswith(f"asyncdist run: rank 1 {describe_end(-signal.SIGKILL)}")
    ]
    assert [line.rpartition("; ")[2].partition(": ")[0] for line in said] == [
        "restarting it (1 of 2)",
        "restarting it (2 of 2)",
        "it is not restarted (2 of 2)",
    ]


def test_ranks_ended_by_a_signal_to_the_job_are_not_restarted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\n"
        "(pathlib.Path(__file__).parent / (os.environ['RANK'] + '.' + os.environ['ASYNCDIST_INCARNATION'])).touch()\n"
        "time.sleep(1000)\n"
    )
    launcher = subprocess.Popen(command(2, 3, script), stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    while len(list(tmp_path.glob("?.0"))) < 2:
        assert launcher.poll() is None
    os.kill(launcher.pid, signal.SIGTERM)
    _, said = launcher.communicate(timeout=TIMEOUT_S)
    assert (launcher.returncode, said) == (128 + signal.SIGTERM, "")
    assert len(list(tmp_path.glob("?.?"))) == 2


class StillWaitingError(Exception):
    """Raised by the clock of :func:`wait_for_welcome`."""


def wait_for_welcome(
    monkeypatch: pytest.MonkeyPatch, store: HashStore, place: TorchRendezvous, exited: Collection[tuple[int, int]] = ()
) -> list[int] | None:
    """Call ``request_welcome``. Raise StillWaitingError if it waits for ten virtual minutes."""
    clock = Clock()
    monkeypatch.setattr(newcomers, "time", clock)
    return newcomers.request_welcome(store, place, lambda *process: process in exited)


class Clock:
    """Replaces the module ``time``. Its time passes only in ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 600:
            raise StillWaitingError


def test_newcomers_after_the_last_rank_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four ranks were killed and are restarted; meanwhile the fourth rank has ended its world."""
    store = HashStore()
    for entry in ("newcomer/1", "0 1 a"), ("newcomer/2", "2 1 b"), ("newcomer/3", "2 2 c"), ("welcome/2.1", ""):
        store.set(*entry)
    place = TorchRendezvous(1, 4, "127.0.0.1", 29500, True, incarnation=1)
    with pytest.raises(StillWaitingError):
        wait_for_welcome(monkeypatch, store, place)
    store.set("closed/3.0", "")
    place = TorchRendezvous(1, 4, "127.0.0.1", 29500, True, incarnation=2)
    assert not wait_for_welcome(monkeypatch, store, place)
    store.set("welcome/2.2", "")
    with pytest.raises(TransportError, match=r"ASYNCDIST_INCARNATION must be larger than 2, .*, got 2"):
        wait_for_welcome(monkeypatch, store, place)


def test_newcomers_begin_the_next_world_when_the_last_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    store, exited = HashStore(), {(0, 0), (2, 0)}

    def come(incarnation: int) -> list[int] | None:
        place = TorchRendezvous(1, 3, "127.0.0.1", 29500, True, incarnation=incarnation)
        return wait_for_welcome(monkeypatch, store, place, exited)

    assert come(1) is None
    store.set("newcomer/2", "2 1 b")
    assert come(2) is None, "the newcomer of rank 2 must wait for a welcome, too"
    store.set("welcome/2.1", "")
    with pytest.raises(StillWaitingError):
        come(3)
    exited.add((2, 1))
    assert come(4) is None


def test_a_newcomer_waits_while_the_loops_of_the_others_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a restarted rank failed if no other rank's loop had run for 60 s, such as in a long evaluation."""
    place = TorchRendezvous(1, 4, "127.0.0.1", 29500, True, incarnation=1)
    with pytest.raises(StillWaitingError):
        wait_for_welcome(monkeypatch, HashStore(), place, {(1, 0), (2, 0)})
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 was restarted, but no living rank (ranks 0, 3) has reacted for 30 s; it waits until one does. A rank "
        "cannot react while its event loop is blocked, for example by a long evaluation"
    ]


def test_a_newcomer_does_not_wait_for_left_and_dead_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("closed/0.0", "")
    place = TorchRendezvous(1, 3, "127.0.0.1", 29500, True, incarnation=1)
    assert wait_for_welcome(monkeypatch, store, place, {(2, 0)}) is None


ALL_KILLED = """
import os, asyncdist as ad

async def main(world):
    await ad.barrier()
    if os.environ["ASYNCDIST_INCARNATION"] == "0":
        os.kill(os.getpid(), 9)
    print(world.rank, world.incarnation, world.size, flush=True)

ad.run(main)
"""


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.long)])
def test_the_next_world_begins_after_all_ranks_were_killed(tmp_path: Path, ranks: int) -> None:
    """Regression: after a silent minute the job failed, although restarts were left."""
    script = tmp_path / "script.py"
    script.write_text(ALL_KILLED)
    result = torchrun.run_jobs([(command(ranks, 3, script), {})], TIMEOUT_S).check()
    assert sorted(result.stdout.splitlines()) == [f"{rank} 0 {ranks}" for rank in range(ranks)]
    assert result.stderr.count("(1 of 3)") == ranks and result.seconds < SOON_S


ONE_IS_GONE = """
import os, pathlib, time, asyncdist as ad

started, incarnation = pathlib.Path(__file__).parent / "1.1", os.environ["ASYNCDIST_INCARNATION"]

async def main(world):
    if world.rank == 1:
        if incarnation == "1":
            started.touch()
        os.kill(os.getpid(), 9)
    while not started.exists():
        await world.sleep(0.02)
    os.kill(os.getpid(), 9)

ad.run(main)
"""


def test_no_world_begins_without_a_rank_that_is_not_restarted(tmp_path: Path) -> None:
    """Rank 1 is killed twice, and then the other two are killed once."""
    script = tmp_path / "script.py"
    script.write_text(ONE_IS_GONE)
    result = torchrun.run_jobs([(command(3, 1, script), {})], TIMEOUT_S).check(128 + signal.SIGKILL)
    said = "TransportError: rank 1 was killed and will not be restarted; a new world cannot begin without it"
    assert said in result.stderr and result.stderr.count("restarting it (1 of 1)") == 3, result.output()
    assert result.seconds < SOON_S


@pytest.mark.parametrize(
    "options, says",
    [
        (["--transport", "mpi"], "--restarts needs --transport torch, got --transport mpi"),
        ([], "--restarts needs --transport torch"),
        (["--survive"], "--survive needs --transport mpi and --restarts needs --transport torch"),
        (["--transport", "torch", "--survive"], "--survive needs --transport mpi"),
    ],
)
def test_restarts_are_refused_where_nobody_can_join(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASYNCDIST_TRANSPORT", raising=False)
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "-n", "2", "--restarts", "1", *options, str(script)])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"asyncdist run: {says}") and said.count("\n") == 1
