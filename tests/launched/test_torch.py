"""Tests the torch transport beyond the conformance suite: deaths and ends of ranks, and frames of a dead peer."""

from __future__ import annotations

import functools
import gc
import logging
import re
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.endings import stopped_by
from support.matching import post
from support.torchrun import Result, run_ranks

from asyncdist.errors import RankLostError
from asyncdist.transports.matching import CallbackQueue, Matcher
from asyncdist.transports.torch_distributed.gloo_link import _ANNOUNCE, _ENTRY, _FRAME, _MESSAGE, _RING_COUNT, Link
from asyncdist.transports.torch_distributed.meeting.stores import reason
from asyncdist.transports.torch_distributed.transport import TorchTransport

MIB = 1 << 20
VICTIM = 2
SURVIVORS = (0, 1, 3)
KILLED = -9
#: An operation that takes hundredths of a second has failed if it takes this long: half of the shortest timeout.
LONG_S = 30.0
ENDS = "tests/scripts/torch_ends.py"


# ------------------------------------------------------------------------------------------------ a rank that is killed


@functools.cache
def loss() -> Result:
    return run_ranks(4, ENDS, "lost").check(0, 0, KILLED, 0)


@pytest.mark.parametrize("rank", SURVIVORS)
def test_what_involves_a_killed_rank_fails_and_names_it(rank: int) -> None:
    found = loss().reports[rank]
    kinds = ["receive", "large receive", "large send", *(["stream"] if rank in (0, 1) else [])]
    assert found["errors"] == {kind: ["RankLostError", VICTIM] for kind in kinds}
    assert found["text"].startswith("rank 2 is gone: its connection was closed (")
    assert "GLHF" not in found["text"] and ".cc" not in found["text"], (
        "gloo's advice to its own developers must not be shown"
    )
    assert found["later"] == ["2", "2"], "a send and a receive posted afterwards must still work"
    assert (found["lost"], VICTIM in found["gone"]) == ([VICTIM], True)


@pytest.mark.parametrize("rank", SURVIVORS)
def test_what_a_killed_rank_has_sent_before_is_received(rank: int) -> None:
    assert loss().reports[rank]["last_words"] == "last words"


@pytest.mark.parametrize("rank", SURVIVORS)
def test_the_others_go_on_talking(rank: int) -> None:
    assert loss().reports[rank]["arrived"] == 2 * 2 * MIB


@pytest.mark.parametrize("rank", SURVIVORS)
def test_a_loss_is_known_long_before_anything_times_out(rank: int) -> None:
    """Closed connections report a loss within hundredths of a second; gloo and the store would take a minute."""
    killed_at, ended_at = loss().reports[VICTIM]["at"], loss().reports[rank]["ended_at"]
    assert len(ended_at) == len(loss().reports[rank]["errors"])
    assert all(killed_at < at < killed_at + LONG_S for at in ended_at)


def test_the_others_end_cleanly() -> None:
    assert loss().stderr == "rank 2 is lost: its process or its host has ended; the others continue without it\n"


def test_an_average_that_loses_a_member_on_its_way_holds_nobody() -> None:
    result = run_ranks(4, ENDS, "lost_in_an_average").check(0, 0, KILLED, 0)
    assert [result.reports[rank] for rank in SURVIVORS] == [{"lost": [2], "in step": 7}] * 3


def test_a_loss_that_nobody_waits_for_is_noticed() -> None:
    result = run_ranks(4, ENDS, "lost_at_rest").check(0, 0, KILLED, 0)
    assert result.reports[VICTIM].keys() == {"at"}
    killed_at = result.reports[VICTIM]["at"]
    for rank in SURVIVORS:
        assert result.reports[rank]["lost"] == [VICTIM]
        assert killed_at < result.reports[rank]["at"] < killed_at + LONG_S


# -------------------------------------------------------------------------------------------------------------- the end


def test_an_exception_ends_the_job_everywhere() -> None:
    result = run_ranks(3, ENDS, "raises").check(1, 1, 1)
    assert result.stderr.count("ValueError: boom-7") == 3
    assert result.stderr.count("Traceback") == 1
    assert stopped_by(result.stderr, 1, "ValueError: boom-7") == [0, 2]


def test_consequences_of_a_failure_are_one_line_each() -> None:
    """Regression: the line was printed for one error, and the traceback of main's own error followed."""
    result = run_ranks(2, ENDS, "raises_in_words_of_its_own").check(1, 1)
    assert stopped_by(result.stderr, 1, "ValueError: boom-7") == [0]
    assert result.stderr.count("Traceback") == 1
    assert "no use without" not in result.stderr


def test_a_peer_that_cannot_listen_is_aborted() -> None:
    result = run_ranks(2, ENDS, "raises_beside_a_blocked_peer").check(1, 1)
    assert "ranks [0] did not stop within 1 s; aborting the job" in result.stderr
    assert re.search(r"rank 1 aborted the job: process \d+ ends\n", result.stderr), (
        "each process must report that it ends"
    )


def test_a_signal_gives_ranks_time_to_clean_up() -> None:
    """Regression: after grace_s, a rank that had stopped aborted the others, which were saving their checkpoints."""
    result = run_ranks(2, ENDS, "cleans_up_long_while_blocked").check(143, 143)
    assert result.reports[1] == {"has_saved": True}
    assert "ranks [1] did not stop within 1 s; the job will be aborted after 10 s" in result.stderr


def test_a_signal_after_another_ranks_stop_cancels_nothing() -> None:
    """Regression: the rank's own signal cancelled an await in ``finally`` that the other rank's stop had begun."""
    result = run_ranks(2, ENDS, "cleans_up_as_its_own_signal_comes").check(143, 143)
    assert result.reports[1] == {"has_saved": True}
    assert "rank 1 was terminated (SIGTERM); rank 1 was waiting for" in result.stderr, (
        "in a sleep, or still in the barrier"
    )


def test_an_exit_code_is_kept() -> None:
    result = run_ranks(3, ENDS, "exits").check(1, 3, 1)
    assert stopped_by(result.stderr, 1, "SystemExit: 3") == [0, 2] and result.stderr.count("\n") == 2


def test_messages_that_nobody_receives_do_not_hold_the_end() -> None:
    result = run_ranks(3, ENDS, "leaves_all_kinds_of_work").check()
    assert result.stderr.count("ended with 2 requests") == 3


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    """Regression: the sockets and threads of gloo remained until the next full garbage collection."""
    for found in run_ranks(4, ENDS, "closes").check().reports.values():
        assert found["alive"] == [] and max(found["took"]) < LONG_S
        assert found["lost"] == [], "the counters of a job are exported a last time after its end"
        _, *later = found["left"]
        assert len(later) == 3 and {each[0] for each in later} == {later[0][0]}, f"descriptors after worlds: {later}"
        # One of gloo's threads may still be ending. Each world had left several.
        assert max(each[1] for each in later) <= min(each[1] for each in later) + 1, f"threads after worlds: {later}"


@dataclass
class SlowLink:
    """A link whose threads take this long to end."""

    seconds: float
    error: RankLostError | None = None
    has_sent_goodbye: bool = True
    has_ended: bool = False

    def send_goodbye(self) -> None:
        """Do nothing, because no peer receives it."""

    def join(self, deadline: float) -> list[str]:
        return ["post-1"] if deadline < time.monotonic() + self.seconds else []


@pytest.mark.parametrize("is_failed", [False, True])
def test_threads_that_end_late_are_awaited_without_failing(is_failed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """32 ranks on two cores have three thousand threads. Threads of a lost rank, or after a failure, may never end."""
    transport = TorchTransport((), 0, 1)
    transport._links = cast(Any, {1: SlowLink(10.0)})
    with caplog.at_level(logging.WARNING, "asyncdist"):
        transport.close_failed() if is_failed else transport.close()
    assert ("threads that wait for gloo did not end: post-1" in caplog.text) == is_failed
    assert transport._links == {}
    transport = TorchTransport((), 0, 1)
    transport._links = cast(Any, {1: SlowLink(10.0, RankLostError("rank 1 is gone", rank=1), has_sent_goodbye=False)})
    transport.close()
    assert "threads that wait for gloo did not end: post-1" in caplog.text


def test_a_world_after_one_that_failed() -> None:
    reports = run_ranks(3, ENDS, "caught").check().reports
    assert [reports[rank]["kind"] for rank in range(3)] == ["RankLostError", "ValueError", "RankLostError"]
    assert all(found["alive"] == [] for found in reports.values())


# --------------------------------------------------------------------------------------------------------------- links


def test_what_gloo_says_is_cut_to_the_fact() -> None:
    text = "[/gloo/pair.cc:7] Read error [127.0.0.1]:51409: Connection reset by peer. This is typically caused by\nx"
    assert reason(RuntimeError(text)) == "Read error [127.0.0.1]:51409: Connection reset by peer"
    assert reason(RuntimeError("plain")) == "plain"


class DyingPeer:
    """Replaces gloo's group: the peer has sent some frames and died before any of them was received."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = list(frames)
        self._room_count = _RING_COUNT

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        del peer, tag
        if not self._room_count:
            raise RuntimeError("Connection closed by peer")
        self._room_count -= 1
        frame = self._frames.pop(0) if self._frames else None
        if frame is not None:
            tensors[0][: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)

        def wait(timeout: timedelta) -> None:
            del timeout
            if frame is None:
                raise RuntimeError("Connection closed by peer")

        return SimpleNamespace(wait=wait)

    def send(self, *_: object) -> Any:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("count", [0, 1, 4, 8, 9, _RING_COUNT])
def test_all_frames_of_a_dead_peer_are_taken_before_its_loss(count: int) -> None:
    """Some receives of the ring are posted again meanwhile, which gloo refuses; the other frames arrive."""
    matcher = Matcher(CallbackQueue())
    entries = [_ENTRY.pack(_MESSAGE, 7, 0, 1) + bytes([number]) for number in range(count)]
    control = DyingPeer([_FRAME.pack(0, _FRAME.size + len(entry)) + entry for entry in entries])
    lost: list[str] = []
    rung = threading.Event()
    matcher.callbacks.set_bell(rung.set)
    receives = [post(matcher, 1, 3, 7) for _ in range(count)]
    Link(3, 3, control, DyingPeer([]), matcher, lambda rank, error: lost.append(f"{rank}: {error}"))
    while not lost:
        assert rung.wait(LONG_S)
        rung.clear()
        matcher.callbacks.empty()
    assert [list(buffer) for receive, buffer in receives if receive.done] == [[number] for number in range(count)]
    assert [line.partition(": ")[0] for line in lost] == ["3"] and "rank=3" in lost[0]


def test_the_groups_of_a_replaced_process_are_freed_at_once() -> None:
    """Regression: gloo's ports, connections and threads remained until the next full garbage collection."""
    transport = TorchTransport((), 0, 1)
    groups = [DyingPeer([]), DyingPeer([])]
    link = Link(1, 1, groups[0], groups[1], transport._matcher, transport._on_lost)
    link._transfers_of(7)
    assert link.join(time.monotonic() + LONG_S) == []
    transport._callbacks.empty()
    transport._replaced = [(link, cast(Any, groups))]
    freed = weakref.ref(groups[0])
    gc.disable()
    try:
        del link, groups
        transport._connected = {1: (1, [DyingPeer([]), DyingPeer([])])}
        assert transport.accept(1, 1)
        assert freed() is None
    finally:
        gc.enable()


class ClosedPeer(DyingPeer):
    """Also replaces the call with which a group's connections are closed."""

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        raise RuntimeError("Connection closed by peer")


def test_the_groups_of_an_ended_world_are_freed_at_once() -> None:
    """Regression: requests in reference cycles kept gloo's sockets and threads until a full garbage collection."""
    announcement = _ENTRY.pack(_ANNOUNCE, 8, 1, MIB)
    groups = [ClosedPeer([_FRAME.pack(0, _FRAME.size + len(announcement)) + announcement]), ClosedPeer([])]
    freed = [weakref.ref(group) for group in groups]
    transport = TorchTransport(groups, 0, 2)
    del groups
    gc.disable()
    try:
        link = transport._links[1]
        kept = [link.receive_granted(bytearray(MIB), 7), link.send_granted(memoryview(b"1"), 7)]
        del link
        transport.close()
        assert [group() for group in freed] == [None, None]
    finally:
        gc.enable()
    for request in kept:
        with pytest.raises(RankLostError):
            request.test()
