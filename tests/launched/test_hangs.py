"""Tests planted hangs: a job that stands still names the ranks, the ranks that they wait for, the tag and the line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import pytest
from support import hanging, mpi

from asyncdist.story import sockets
from asyncdist.story.last_events import describe_recording

SCRIPT = "tests/scripts/hangs.py"
#: The facts of each hang: a pattern for one line of the report each; <NAME RANK> is a marked line of the script.
TOLD = {
    "never_sent": [
        r"rank 0 .*\brank 1\b.*\bNote, tag 100\b.*<never_sent 0>",
        r"rank 1 .*\bEvent\.wait\b.*<never_sent 1>",
    ],
    "wrong_tag": [
        r"rank 1 .*\b1 on Note, tag 101\b.*\brank 0\b",
        r"rank 0 .*\brank 1\b.*\bNote, tag 100\b.*<wrong_tag 0>",
        r"rank 1 .*\brank 0\b.*\bNote, tag 101\b.*<wrong_tag 1>",
    ],
    "not_joined": [
        r"ranks 0, 1 .*\brank 2\b.*\bbarrier\b.*\b3rd .*\b3 ranks\b.*<not_joined 0>",
        r"rank 2 .*\brank 0\b.*\btag 8001\b.*<not_joined 2>",
    ],
    "no_receiver": [
        r"rank 0 .*\brank 1\b.*\btag 8000\b.*<no_receiver 0>",
        r"ranks 1, 2 .*\brank 0\b.*\bbarrier\b.*<no_receiver 1>",
    ],
    "cycle": [
        r"deadlock: rank 0 [^,]*\brank 2, rank 2 [^,]*\brank 1, rank 1 [^,]*\brank 0$",
        *[rf"rank {rank} .*\brank {peer}\b.*\btag 8001\b.*<cycle 0>" for rank, peer in ((0, 2), (1, 0), (2, 1))],
    ],
    "blocked_coordinator": [
        r"rank 0 .*<blocked_coordinator 0>",
        # Neither rank makes a round with it, or both wait in vain for the end of one.
        r"(ranks? (1|2|1, 2) .*\bmain\b|rank [12] .*\bround\b)",
    ],
    "blocking_call": [
        r"rank 1 .*<blocking_call 1>",
        r"rank 0 .*\branks 1, 2\b.*\bNote, tag 100\b.*<blocking_call 0>",
    ],
    "dead_rank": [
        r"rank 2 .*\bprocess \d+\b.*\brank [01] ",
        r"rank 0 .*\brank 1\b.*\bNote, tag 100\b.*<dead_rank 0>",
        r"lost: rank 2",
    ],
    "full_channel": [
        r"rank 1 .*\brank 0\b.*\bNote\b.*\btag 100\b.*<full_channel 1>",
        r"rank 0: .*\bNote, tag 100: 0 .*\b0 .*\b4 .*\bfull\b",
        r"ranks 0, 2 .*\brank 1\b.*\bbarrier\b.*<full_channel 0>",
    ],
    "waiting_buffer": [
        r"ranks 1, 2 .*\brank 0\b.*'replay'.*\btag 7003\b.*<waiting_buffer 1>",
        r"rank 0 .*\branks 1, 2\b.*'replay'.*\btag 7003\b.*<waiting_buffer 0>",
    ],
    "stopped": [
        r"rank 1 .*\(pid \d+\).*\bSIGSTOP\b.*\brank [02] ",
        r"ranks 0, 2 .*\brank 1\b.*\bbarrier\b.*<stopped 0>",
    ],
    "gathered": [
        r"rank 0 .*\branks 1, 2\b.*\basyncio\.gather\b.*\bNote, tag 100\b.*<gathered 2> \(2 tasks\).*<gathered 0>",
        r"ranks 1, 2 .*\brank 0\b.*\bbarrier\b.*<gathered 1>",
    ],
    # In these two hangs, waiting ranks remind the others each second, which does not count as progress.
    "not_agreed": [
        r"rank 0 .*\brank 2\b.*\branks 0-2\b.*<not_agreed 0>",
        r"rank 1 .*\brank 0\b.*\branks 0-2\b.*<not_agreed 0>",
        r"rank 2 .*\branks 0, 1\b.*\bbarrier\b.*<not_agreed 2>",
    ],
    "not_started": [
        r"rank 1 .*<blocked_coordinator 0>",
        r"rank 0 .*\brank 1\b.*<not_started 0>",
        r"rank 2 .*\brank 0\b.*<not_started 0>",
    ],
    "computing": [
        r"rank 1 .*\bWorld\.compute\b.*<blocked_coordinator 0>.*<computing 1>",
        r"ranks 0, 2 .*\brank 1\b.*\bbarrier\b.*<computing 0>",
    ],
}
#: A hang of each kind: waits for messages, in a circle, for a full channel, and for blocked, stopped and dead ranks.
FEW = frozenset({"wrong_tag", "cycle", "full_channel", "blocked_coordinator", "stopped", "dead_rank"})


def place(mark: str) -> str:
    """Return a pattern for the location of a marked line."""
    return rf"\([^ ]*{re.escape(hanging.line_of(SCRIPT, mark))}"


def check(name: str, told: str) -> None:
    story = hanging.story_of(told)
    assert len(story.splitlines()) <= 24, story
    for pattern in TOLD[name]:
        pattern = re.sub(r"<(\w+ \d)>", lambda found: place(found[1]), pattern)
        assert re.search(rf"^ +{pattern}", story, re.MULTILINE), f"{pattern}\n{story}"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, pytest.param(TOLD.keys() - FEW, marks=pytest.mark.long)], ids=["few", "others"])
def test_mpi(names: Set[str]) -> None:
    mpi.require_mpi()
    hangs = sorted(name for name in names if name != "dead_rank" or mpi.flavour() == "openmpi")
    each_checked(hanging.tell_hangs("mpi", SCRIPT, hangs, {"dead_rank": ["--survive"]}, timeout_s=90))


@pytest.mark.slow
@pytest.mark.long
def test_torch() -> None:
    each_checked(hanging.tell_hangs("torch", SCRIPT, list(TOLD), {"dead_rank": ["--places", "3"]}, timeout_s=90))


@pytest.mark.slow
def test_a_story_is_in_the_recording_of_a_job_killed_afterwards(tmp_path: Path) -> None:
    """Regression: a recording did not contain for which rank a rank waited, or at which line.

    Here rank 0, which prints reports, is blocked.
    """
    name = "blocked_coordinator"
    options = {name: ["--record", str(tmp_path)]}
    told = hanging.tell_hangs(
        "torch", SCRIPT, [name], options, timeout_s=90, until=lambda: "  reported " in describe_recording(str(tmp_path))
    )
    story = hanging.story_of(told[name]).splitlines()
    lines = describe_recording(str(tmp_path)).splitlines()
    [begin] = [place for place, line in enumerate(lines) if line.startswith("  reported ")]
    assert lines[begin].partition(" before the end: ")[2] == story[0].removeprefix("asyncdist: ")
    assert lines[begin + 1 : begin + len(story)] == [f"  {line}" for line in story[1:]]


def each_checked(told: dict[str, str]) -> None:
    for name, text in told.items():
        check(name, text)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system tells no states of processes")
def test_stopped_processes_and_zombies_are_named() -> None:
    """Regression: a zombie counted as alive: a killed rank was reported as being in compiled code."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        place = sockets.RankSocket(Path("socket"), 0, process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert (place.state, place.is_alive) == ("T", True)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not place.is_alive
    assert (place.state, place.is_alive) == ("", False)
