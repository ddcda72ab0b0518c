"""Tests ``asyncdist sim --record``: it records the run of a failing seed, and no other run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import asyncdist as ad
from asyncdist import cli
from asyncdist.recording.events import Event
from asyncdist.recording.reader import read_recording
from asyncdist.simulation import Fault, Kill, Restart
from asyncdist.story.last_events import describe_recording

SCRIPT = """
import sys
from dataclasses import dataclass
import asyncdist as ad

@dataclass(frozen=True, slots=True)
class Put:
    version: int

async def main(world, way):
    channel = world.channel(Put, tag=100)
    for _ in range(20):
        await world.safe_point()
    await channel.send(Put(1), dest=(world.rank + 1) % world.size)
    await channel.receive()
    if way == "stuck" and world.rank == 1:
        await channel.receive()
    if way == "raise" and world.rank == 1:
        raise ValueError("boom-7")

if __name__ == "__main__":
    ad.run(main, *sys.argv[1:])
"""

Sim = Callable[..., tuple[object, str, str]]


@pytest.fixture
def sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sim:
    """Return a function that runs ``asyncdist sim script.py`` in this process, and returns the exit code and output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*words: object) -> tuple[object, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main(["sim", "script.py", "--ranks", "3", *map(str, words)])
        return caught.value.code, *capsys.readouterr()

    return run


def see(out: str) -> list[str]:
    """Return the arguments of the command for the report."""
    found = re.findall(r"^see it: (.*)$", out, re.MULTILINE)
    assert len(found) == 1
    words = shlex.split(str(found[0]))
    return words[words.index("report") :]


def events_of(folder: Path, rank: int, job: str | None = None) -> list[Event]:
    return [event for each in read_recording(folder, job).ranks if each.rank == rank for event in each.events()]


def ends_of(folder: Path, job: str | None = None) -> list[list[str]]:
    ranks = [events_of(folder, rank, job) for rank in range(3)]
    return [[event.get("error") for event in events if event.kind == "over"] for events in ranks]


def test_a_failing_run_is_recorded_and_names_the_report_command(sim: Sim, tmp_path: Path) -> None:
    code, out, err = sim("--record", "runs", "raise")
    assert code == 1
    assert "ValueError: boom-7" in err
    assert see(out) == ["report", str(tmp_path / "runs")]
    lost = "RankLostError: rank 1 failed: ValueError: boom-7 [rank=1]"
    # main may have returned before it is notified of the other rank's end
    ends = [errors[-1] for errors in ends_of(tmp_path / "runs")]
    assert ends == [lost, "ValueError: boom-7", lost]
    assert not any(each.damage for each in read_recording(tmp_path / "runs").ranks)
    with pytest.raises(SystemExit) as caught:
        cli.main([*see(out), "-o", "page.html"])
    assert caught.value.code == 0
    assert "boom-7" in (tmp_path / "page.html").read_text()


def test_of_a_deadlock_what_each_rank_waited_for_is_recorded(sim: Sim, tmp_path: Path) -> None:
    code, out, _ = sim("stuck", "--record", "x")  # after the script's name, the option belongs to the script
    assert (code, "see it" in out) == (1, False)
    code, out, _ = sim("--record", "runs", "stuck")
    assert code == 1
    assert see(out) == ["report", str(tmp_path / "runs")]
    assert [error for each in ends_of(tmp_path / "runs") for error in each] == ["", ""]
    last = events_of(tmp_path / "runs", 1)[-1]
    assert last.kind == "waited"
    assert re.search(r"\bPut, tag 100, in main \(.*script\.py:17\)$", str(last.wait))
    assert last.get("seconds") > 0.0
    story = describe_recording(str(tmp_path / "runs"))
    assert "ranks 0, 2 " in story and "rank 1: " in story


def test_an_exploration_records_the_seed_that_fails(sim: Sim, tmp_path: Path) -> None:
    assert sim("--record", "runs", "--explore", 3, "--processes", 1, "well")[0] == 0
    assert not (tmp_path / "runs").exists()
    sim("--record", "runs", "well")
    code, out, err = sim("--record", "runs", "--seed", 4, "--explore", 3, "--processes", 1, "raise")
    assert code == 1
    assert re.search("seed 4 .*ValueError: boom-7", err)
    *words, option, job = see(out)
    assert words == ["report", str(tmp_path / "runs")]
    assert option == "--job"
    assert ends_of(tmp_path / "runs", job)[1] == ["ValueError: boom-7"]
    sim("--record", "other", "--seed", 4, "raise")
    assert read_recording(tmp_path / "other").job == job


def test_an_unwritable_recording_is_not_a_failure_of_the_run(
    sim: Sim, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    code, out, _ = sim("--record", "file", "well")
    assert (code, "see it" in out) == (0, False)
    assert f"'{tmp_path}/file'" in caplog.text


async def long(world: ad.World) -> None:
    for _ in range(20):
        await world.safe_point()


def record(folder: Path, *faults: Fault) -> None:
    ad.simulate(long, ranks=3, seed=5, faults=faults, record=folder)


def test_what_is_cleared_away_of_a_killed_rank_is_not_recorded(tmp_path: Path) -> None:
    record(tmp_path, Kill(rank=2, at_s=0.001))
    assert ends_of(tmp_path) == [[""], [""], []]
    assert max(event.time_s for event in events_of(tmp_path, 2)) < 0.002


def test_a_recording_replaces_an_earlier_one_of_its_seed(tmp_path: Path) -> None:
    record(tmp_path, Kill(rank=2, at_s=0.001), Restart(rank=2, at_s=0.002))
    assert len(read_recording(tmp_path).ranks) == 4
    record(tmp_path, Kill(rank=2, at_s=0.001))
    assert [each.rank for each in read_recording(tmp_path).ranks] == [0, 1, 2]
    ad.simulate(long, ranks=3, seed=6, record=tmp_path)
    assert len(list(tmp_path.iterdir())) == 6
