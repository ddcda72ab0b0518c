"""Planted hangs: at its standstill a real job names the ranks, whom they wait for, the tag and the line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import hanging, mpi

from asyncdist.story import sockets
from asyncdist.story.recorded import tell_recording

SCRIPT = "tests/scripts/hangs.py"
WAITS = r"[\d.]+ s"
#: What each hang is told as: a pattern for one line of the story each; <NAME RANK> is a marked line of the script.
TOLD = {
    "never_sent": [
        rf"rank 0 waits {WAITS} for rank 1: a message on Note, tag 100, in never_sent <never_sent 0>",
        rf"rank 1 waits {WAITS}: Event.wait, in never_sent <never_sent 1>",
    ],
    "wrong_tag": [
        r"rank 1 has sent 1 on Note, tag 101, which rank 0 has not opened",
        rf"rank 0 waits {WAITS} for rank 1: a message on Note, tag 100, in wrong_tag <wrong_tag 0>",
        rf"rank 1 waits {WAITS} for rank 0: a message on Note, tag 101, in wrong_tag <wrong_tag 1>",
    ],
    "not_joined": [
        rf"ranks 0, 1 wait {WAITS} for rank 2, not there yet: barrier, (tag \d+, )?"
        r"the 3rd collective of 3 ranks, in not_joined <not_joined 0>",
        rf"rank 2 waits {WAITS} for rank 0: stream from rank 0, tag 8001, in not_joined <not_joined 2>",
    ],
    "no_receiver": [
        rf"rank 0 waits {WAITS} for rank 1: rank 1 to receive a stream, tag 8000, in no_receiver <no_receiver 0>",
        rf"ranks 1, 2 wait {WAITS} for rank 0, not there yet: barrier, .*, in no_receiver <no_receiver 1>",
    ],
    "cycle": [
        r"deadlock: rank 0 waits for rank 2, rank 2 waits for rank 1, rank 1 waits for rank 0",
        *[
            rf"rank {rank} waits {WAITS} for rank {peer}: stream from rank {peer}, tag 8001, in cycle <cycle 0>"
            for rank, peer in ((0, 2), (1, 0), (2, 1))
        ],
    ],
    "blocked_coordinator": [
        rf"rank 0 blocks for {WAITS} in load_data <blocked_coordinator 0>: its loop does not run",
        # Both have no round with it, or wait in vain for the end of one.
        rf"(ranks? (1|2|1, 2) (has|have) returned from main {WAITS} ago; rank"
        rf"|rank [12] waits {WAITS}: the end of its part in a round)",
    ],
    "blocking_call": [
        rf"rank 1 blocks for {WAITS} in blocking_call <blocking_call 1>: its loop does not run",
        rf"rank 0 waits {WAITS} for any of ranks 1, 2: a message on Note, tag 100, "
        r"in blocking_call <blocking_call 0>",
    ],
    "dead_rank": [
        rf"rank 2 is gone: its process \d+ has ended; the last that came from it came to rank [01] {WAITS} ago",
        rf"rank 0 waits {WAITS} for rank 1: a message on Note, tag 100, in dead_rank <dead_rank 0>",
        r"lost: rank 2",
    ],
    "full_channel": [
        rf"rank 1 waits {WAITS} for rank 0: Note: send to 0, tag 100, in full_channel <full_channel 1>",
        r"rank 0: channel Note, tag 100: 0 sent, 0 received, 4 not read: it is full, "
        r"and nothing more is taken on its tag",
        rf"ranks 0, 2 wait {WAITS} for rank 1, not there yet: barrier, .*, in full_channel <full_channel 0>",
    ],
    "waiting_buffer": [
        rf"ranks 1, 2 wait {WAITS} for rank 0: the replay buffer 'replay' on rank 0, tag 7003, "
        r"in waiting_buffer <waiting_buffer 1>",
        rf"rank 0 waits {WAITS} for any of ranks 1, 2: clients of the replay buffer 'replay', tag 7003, "
        r"in waiting_buffer <waiting_buffer 0>",
    ],
    "stopped": [
        r"rank 1 does not answer \(pid \d+\): it is stopped, by SIGSTOP or Ctrl-Z"
        rf"; the last that came from it came to rank [02] {WAITS} ago",
        rf"ranks 0, 2 wait {WAITS} for rank 1, not there yet: barrier, .*, in stopped <stopped 0>",
    ],
    "gathered": [
        rf"rank 0 waits {WAITS} for any of ranks 1, 2: asyncio.gather \[a message on Note, tag 100, "
        r"in take <gathered 2> \(2 tasks\)\], in gathered <gathered 0>",
        rf"ranks 1, 2 wait {WAITS} for rank 0, not there yet: barrier, .*, in gathered <gathered 1>",
    ],
    # In these two the ranks that wait remind the others each second, which is no movement.
    "not_agreed": [
        rf"rank 0 waits {WAITS} for rank 2: new group on ranks 0-2.*: the other ranks, in not_agreed <not_agreed 0>",
        rf"rank 1 waits {WAITS} for rank 0: new group on ranks 0-2.*, in not_agreed <not_agreed 0>",
        rf"rank 2 waits {WAITS} for ranks 0, 1, not there yet: barrier, .*, in not_agreed <not_agreed 2>",
    ],
    "not_started": [
        rf"rank 1 blocks for {WAITS} in load_data <blocked_coordinator 0>: its loop does not run",
        rf"rank 0 waits {WAITS} for rank 1: .*: the other ranks, in not_started <not_started 0>",
        rf"rank 2 waits {WAITS} for rank 0: .*, in not_started <not_started 0>",
    ],
    "computing": [
        r"rank 1 is in World.compute, whose thread is in load_data <blocked_coordinator 0>, which ends by itself, "
        r"in computing <computing 1>",
        rf"ranks 0, 2 wait {WAITS} for rank 1, not there yet: barrier, .*, in computing <computing 0>",
    ],
}


def place(mark: str) -> str:
    """A pattern for the place of a marked line."""
    return rf"\([^ ]*{re.escape(hanging.line_of(SCRIPT, mark))}"


def check(name: str, told: str) -> None:
    story = hanging.story_of(told)
    assert len(story.splitlines()) <= 24, story
    for pattern in TOLD[name]:
        pattern = re.sub(r"<(\w+ \d)>", lambda found: place(found[1]), pattern)
        assert re.search(rf"^ +{pattern}", story, re.MULTILINE), f"{pattern}\n{story}"


@pytest.mark.mpi
@pytest.mark.slow
def test_mpi() -> None:
    mpi.require_mpi()
    hangs = [name for name in TOLD if name != "dead_rank" or mpi.flavour() == "openmpi"]
    each_checked(hanging.tell_hangs("mpi", SCRIPT, hangs, {"dead_rank": ["--survive"]}, timeout_s=90))


@pytest.mark.slow
@pytest.mark.long
def test_torch() -> None:
    each_checked(hanging.tell_hangs("torch", SCRIPT, list(TOLD), {"dead_rank": ["--places", "3"]}, timeout_s=90))


@pytest.mark.slow
def test_a_story_is_in_the_recording_of_a_job_killed_afterwards(tmp_path: Path) -> None:
    """Regression: a recording said neither for whom a rank waited nor in which line.

    Here rank 0, which tells, is blocked.
    """
    name = "blocked_coordinator"
    options = {name: ["--record", str(tmp_path)]}
    told = hanging.tell_hangs(
        "torch", SCRIPT, [name], options, timeout_s=90, until=lambda: "  told " in tell_recording(str(tmp_path))
    )
    story = hanging.story_of(told[name]).splitlines()
    lines = tell_recording(str(tmp_path)).splitlines()
    [begin] = [place for place, line in enumerate(lines) if line.startswith("  told ")]
    assert lines[begin].partition(" before the end: ")[2] == story[0].removeprefix("asyncdist: ")
    assert lines[begin + 1 : begin + len(story)] == [f"  {line}" for line in story[1:]]


def each_checked(told: dict[str, str]) -> None:
    for name, text in told.items():
        check(name, text)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system tells no states of processes")
def test_stopped_processes_and_zombies_are_named() -> None:
    """The second counted as alive: a killed rank whose launcher was stopped was told as one in compiled code."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        place = sockets.Place(Path("socket"), 0, process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert (place.state, place.is_alive) == ("T", True)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not place.is_alive
    assert (place.state, place.is_alive) == ("", False)
