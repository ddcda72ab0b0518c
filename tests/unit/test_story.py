"""Tests the reports of waiting ranks: who waits for whom, the wording, and the sockets on which ranks are queried."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.facts import names

from asyncdist import environment
from asyncdist.recording import command_output
from asyncdist.recording.events import Event
from asyncdist.runtime.story import answering
from asyncdist.story import command, finding, sockets
from asyncdist.story.event_texts import describe_events
from asyncdist.story.facts import ChannelState, Collective, PolicyState, RankStory, Wait, from_bytes, to_bytes
from asyncdist.story.formatting import (
    awaited_ranks,
    cycle,
    describe_job,
    describe_rank,
    in_display_order,
    stuck_ranks,
    summarize,
)
from asyncdist.trust import private_folders


def story(rank: int, *waits: Wait, size: int = 3, state: str = "awaits") -> RankStory:
    return RankStory(rank, size, 100 + rank, "here", "0123abcd", "train.py", state, "", "", 60.0, waits)  # type: ignore[arg-type]


def waits_for(*peers: int, tag: int | None = 100) -> Wait:
    return Wait("main", "a message", "main (train.py:7)", 60.0, peers, tag)


def collective(number: int, ranks: tuple[int, ...] = (0, 1, 2)) -> Wait:
    return Wait("main", "barrier", "main (train.py:8)", 60.0, collective=Collective(7100, number, ranks))


def of(*stories: RankStory) -> dict[int, RankStory]:
    return {each.rank: each for each in stories}


def silent(rank: int, pid: int, *, is_alive: bool, state: str = "") -> Any:
    """Return a socket whose rank has not answered."""
    return SimpleNamespace(rank=rank, pid=pid, is_alive=is_alive, state=state)


def test_equal_statements_of_several_ranks_are_printed_once() -> None:
    """Regression: each rank's equal statement was printed on lines of its own."""
    channel = ChannelState("Note", 100, 0, 0, 0, False)
    worker = Wait("worker", "Event.wait")
    ranks = [
        replace(story(rank, collective(2), worker, worker), started={7100: 2}, channels=(channel,)) for rank in (1, 2)
    ]
    ranks[1] = replace(ranks[1], channels=(channel, replace(channel, tag=101, sent_count=3)))
    told = describe_job(of(replace(story(0), started={7100: 1}), *ranks)).splitlines()
    assert told[-4:] == [
        "    ranks 1, 2: its task worker waits 60 s: Event.wait",
        "    ranks 1, 2: its task worker waits 60 s: Event.wait",
        "    ranks 1, 2: channel Note, tag 100: 0 sent, 0 received, 0 not read",
        "    rank 2: channel Note, tag 101: 3 sent, 0 received, 0 not read",
    ]


class TestWhoWaitsForWhom:
    def test_ranks_in_a_cycle_and_ranks_awaiting_them_are_stuck(self) -> None:
        stories = of(story(0, waits_for(1)), story(1, waits_for(0)), story(2, waits_for(0)))
        stuck = stuck_ranks(stories)
        assert stuck == {0, 1, 2}
        assert cycle(stuck, stories) == (0, 1)

    @pytest.mark.parametrize(
        "other",
        [
            story(1, state="computes"),
            story(1, state="blocks"),
            story(1, Wait("main", "sleep", ends_by_itself=True)),
            story(1, Wait("main", "Event.wait")),  # an event without an owner: no rank can tell who sets it
            story(1),
        ],
    )
    def test_who_waits_for_a_rank_that_may_move_is_not_stuck(self, other: RankStory) -> None:
        assert not stuck_ranks(of(story(0, waits_for(1)), other))

    def test_one_of_several_senders_suffices_but_all_members_are_due(self) -> None:
        in_cycle = story(0, waits_for(1)), story(1, waits_for(0))
        assert stuck_ranks(of(*in_cycle, story(2, waits_for(0, 1, 3)))) == {0, 1}  # rank 3 does not tell
        all_three = replace(story(2, collective(1)), started={7100: 1})
        assert stuck_ranks(of(*in_cycle, all_three)) == {0, 1, 2}

    def test_a_task_that_may_move_makes_its_rank_movable(self) -> None:
        task = Wait("sender", "sleep", ends_by_itself=True)
        assert not stuck_ranks(of(story(0, waits_for(1), task), story(1, waits_for(0))))
        with_further_tasks = replace(story(0, waits_for(1)), has_further_tasks=True)
        assert not stuck_ranks(of(with_further_tasks, story(1, waits_for(0))))
        assert not stuck_ranks(of(story(0, replace(waits_for(1), has_deadline=True)), story(1, waits_for(0))))

    def test_a_lost_rank_brings_nothing(self) -> None:
        waits = waits_for(1, 2)
        stories = of(replace(story(0, waits), lost=(2,)), replace(story(1, waits_for(0, 2)), lost=(2,)))
        assert stuck_ranks(stories) == {0, 1}

    def test_members_outside_a_collective_are_shown_as_awaited(self) -> None:
        stories = of(replace(story(0), started={7100: 3}), replace(story(1), started={7100: 2}))
        assert awaited_ranks(collective(3), stories) == (1, 2)
        assert awaited_ranks(collective(2), stories) == (2,)

    def test_no_cycle_where_nobody_is_stuck(self) -> None:
        stories = of(story(0, waits_for(1)), story(1, state="blocks"))
        assert cycle(stuck_ranks(stories), stories) == ()

    def test_most_awaited_ranks_are_first_after_ranks_that_run(self) -> None:
        stories = of(story(0, waits_for(1)), story(1, waits_for(0)), story(2, waits_for(1)), story(3, state="blocks"))
        assert in_display_order(stories) == [3, 1, 0, 2]


class TestWords:
    def test_a_job(self) -> None:
        channel = ChannelState("Note", 101, 1, 0, 0, False)
        stories = of(
            replace(story(0, waits_for(1)), channels=(replace(channel, tag=100, sent_count=0),)),
            replace(story(1, waits_for(0, tag=101)), channels=(channel,), heard={0: 60.5}),
        )
        assert describe_job(stories, [silent(2, os.getpid(), is_alive=True)]).splitlines() == [
            "job 0123abcd: train.py, 3 ranks on here",
            f"  rank 2 does not answer (pid {os.getpid()}): it is stopped, or is in compiled code that holds the "
            "GIL; no channel message has arrived from it",
            "  deadlock: rank 0 waits for rank 1, rank 1 waits for rank 0",
            "  rank 1 has sent 1 on Note, tag 101, which rank 0 has not opened",
            "  rank 0 waits 60 s for rank 1: a message, tag 100, in main (train.py:7)",
            "    channel Note, tag 100: 0 sent, 0 received, 0 not read",
            "  rank 1 waits 60 s for rank 0: a message, tag 101, in main (train.py:7)",
            "    channel Note, tag 101: 1 sent, 0 received, 0 not read",
            "    last message from rank 0 60 s ago",
        ]

    def test_a_rank_that_is_gone_is_told_with_its_last_sign_of_life(self) -> None:
        heard = of(replace(story(0), heard={2: 70.0}), replace(story(1), heard={2: 61.0}))
        assert describe_job(heard, [silent(2, 99, is_alive=False)]).splitlines()[1] == (
            "  rank 2 is gone: its process 99 has ended; its last message reached rank 1 61 s ago"
        )

    def test_why_a_rank_does_not_answer(self) -> None:
        told = {state: describe_job(of(story(0)), [silent(2, 99, is_alive=True, state=state)]) for state in "TtDSR"}
        assert "it is stopped, by SIGSTOP or Ctrl-Z; no channel message" in told["T"]
        assert "it is stopped, by a debugger; no channel message" in told["t"]
        assert "it waits in the kernel, for a disk or a network drive; no channel message" in told["D"]
        kept = "rank 2 does not answer (pid 99): it is in compiled code that holds the GIL; no channel message"
        assert kept in told["S"] and kept in told["R"]

    def test_report_shows_blocked_returned_and_policy_states(self) -> None:
        policy = PolicyState("", 12, 0.5, 3, "reporting", 0)
        blocked = replace(story(0, state="blocks"), line="load (data.py:3)", inner_line="read (io.py:9)")
        blocked = replace(blocked, policies=(policy,))
        returned = [story(rank, Wait("main", "the end"), state="returned") for rank in (1, 2)]
        assert describe_job(of(blocked, *returned)).splitlines()[1:] == [
            "  rank 0 blocks for 60 s in load (data.py:3), there in read (io.py:9): its event loop does not run",
            "    policy: 12 steps, metric 0.5, reporting in round 3, it coordinates",
            "  ranks 1, 2 have returned from main; rank 0 has not",
        ]

    def test_of_one_rank(self) -> None:
        own = story(1, waits_for(0), Wait("helper", "sleep", "help (train.py:3)", ends_by_itself=True))
        first, second = describe_rank(own).splitlines()
        assert first.startswith("rank 1 (of 3, pid 101) ") and names(first, "60 s", "rank 0", "tag 100", "train.py:7")
        assert second == "  its task helper is in sleep, which ends without other ranks, in help (train.py:3)"

    def test_128_ranks_are_told_on_one_screen(self) -> None:
        channels = (ChannelState("Note", 100, 0, 0, 0, False),)
        ranks = [replace(story(rank, collective(9), size=128), started={7100: 9}) for rank in range(127)]
        every = tuple(range(128))
        ranks = [replace(each, waits=(collective(9, every),), channels=channels) for each in ranks]
        told = describe_job(of(*ranks, replace(story(127, waits_for(3), size=128), started={7100: 8}))).splitlines()
        _, deadlock, blocked, others = told
        assert names(deadlock, "rank 127", "rank 3")
        assert names(blocked, "rank 127", "rank 3", "tag 100", "main (train.py:7)")
        assert others == (
            "  ranks 0-126 wait 60 s for rank 127, not there yet: barrier, the 9th collective of 128 ranks, "
            "in main (train.py:8)"
        )
        different = of(*(story(rank, replace(waits_for(0), line=f"line {rank}"), size=128) for rank in range(128)))
        assert len(describe_job(different).splitlines()) < 40

    def test_several_that_run_are_told_as_several(self) -> None:
        running = Wait("main", "", "main (x.py:3)")
        assert "  ranks 0-2 run, in main (x.py:3)" in describe_job(of(*(story(rank, running) for rank in range(3))))

    def test_a_rank_that_may_join_is_not_lost(self) -> None:
        """Regression: a place that no process had taken was named as lost."""
        told = describe_job(of(replace(story(0), vacant=(2,)), replace(story(1), vacant=(2,))))
        assert "not joined yet: rank 2" in told and "lost" not in told and "other hosts" not in told

    def test_of_ranks_on_other_hosts_it_is_said_where_to_ask(self) -> None:
        assert "2 more ranks are on other hosts, or have ended: run asyncdist story 0123abcd" in describe_job(
            of(story(0))
        )
        assert "1 more rank is on another host, or has ended" in describe_job(of(story(0), story(1)))

    def test_a_lost_rank_whose_process_is_there_is_counted_once(self) -> None:
        """Regression: it was subtracted twice, so no line said that rank 2 is on another host."""
        told = describe_job(of(replace(story(0), lost=(1,))), [silent(1, 101, is_alive=True)])
        assert "1 more rank is on another host" in told

    def test_events(self) -> None:
        events = [
            Event(1.0, "policy", (0, "AverageAllPolicy", "", 5, 20, 3)),
            Event(2.0, "step", (0, 1, 0.1)),
            Event(3.0, "abandoned", (0, 7, 5, "rank 1 was lost")),
            Event(4.0, "lost", (1,)),
        ]
        assert describe_events(events, 5.0, 2) == (
            "round 7 was abandoned: rank 1 was lost 2.0 s ago",
            "lost rank 1 1.0 s ago",
        )

    def test_events_without_ranks(self) -> None:
        """Regression: such an event was described as "took the average of ranks , round 3"."""
        fields = (0, 3, 15, None, None, 0, 0.1, 100, -1, "", 0, 3, 0, (), (), 100, 100, 0.5, 0.5, 0.1)
        events = [Event(1.0, "applied", fields), Event(2.0, "decided", (0, 4, (), (), "direct"))]
        told = ("took an average, round 3 2.0 s ago", "decided round 4: no rank to be replaced 1.0 s ago")
        assert describe_events(events, 3.0, 2) == told


def test_report_shows_the_wait_of_a_rank_at_the_signal_if_known() -> None:
    events = (Event(1.0, "interrupted", ()), Event(2.0, "interrupted", ("barrier, in main (train.py:9)",)))
    assert describe_events(events, 5.0, 2) == (
        "was interrupted by a signal 4.0 s ago",
        "was interrupted by a signal (it waited for barrier, in main (train.py:9)) 3.0 s ago",
    )


def test_stories_travel() -> None:
    told = replace(story(1, waits_for(0), collective(3)), started={7100: 2}, heard={0: 1.5})
    assert from_bytes(to_bytes(told)) == told
    assert from_bytes(to_bytes(replace(told, program=os.fsdecode(b"caf\xe9.py")))) == replace(told, program="caf?.py")
    with pytest.raises(ValueError):
        from_bytes(b"{}")


@pytest.mark.parametrize("metric", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_that_is_no_finite_number_is_told(metric: float) -> None:
    policy = PolicyState("averaging", 7, metric, 0, "", None)
    read = from_bytes(to_bytes(replace(story(1), policies=(policy,))))
    assert f"  policy 'averaging': 7 steps, metric {metric}" in describe_rank(read).splitlines()


HOSTILE = "n\x1b[2J\x1b]0;owned\x07\nrank 7\u202e"


def test_names_of_others_reach_no_terminal_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a story printed terminal escape sequences from the names that a rank had sent."""
    wait = Wait(f"task {HOSTILE}", HOSTILE, HOSTILE, 60.0, (0,), 100)
    told = replace(
        story(1, Wait("main", HOSTILE), wait),
        **dict.fromkeys(("job", "program", "hostname", "line"), HOSTILE),
        policies=(PolicyState(HOSTILE, 3, 0.5, 1, HOSTILE),),
        channels=(ChannelState(HOSTILE, 100, 0, 0, 0, False),),
        unread=(HOSTILE,),
        events=(HOSTILE,),
    )
    command_output.refuse("story", HOSTILE)
    refusal = capsys.readouterr().err
    for text in (describe_rank(told), describe_job(of(told)), summarize(told, {}), refusal.rstrip("\n")):
        assert "n\\x1b[2J\\x1b]0;owned\\x07\\nrank 7\\u202e" in text
        assert all(line.isprintable() for line in text.split("\n"))
    assert describe_job(of(told)).count("\n") == describe_job(of(story(1, Wait("main", "x"), wait))).count("\n") + 4


class TestSockets:
    @pytest.fixture(autouse=True)
    def base(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(environment, "shared_directories", lambda: [str(tmp_path)])
        return tmp_path / f"asyncdist-{os.getuid()}"

    def test_answering_rank_is_reported_and_a_silent_one_is_not(self, base: Path) -> None:
        listeners = [sockets.listen("job", rank) for rank in range(3)]

        def answer(listener: socket.socket, data: bytes) -> None:
            listener.setblocking(True)
            question = b""
            while question != sockets.STORY:  # other connections only check that the socket is open
                client, _ = listener.accept()
                with client:
                    question = client.recv(16)
                    if question:
                        client.sendall(data)

        opened = [each for each in listeners if each is not None]
        threads = [
            threading.Thread(target=answer, args=(opened[0][0], to_bytes(story(0)))),
            threading.Thread(target=answer, args=(opened[1][0], b"no story")),
        ]
        for thread in threads:
            thread.start()
        assert [each.rank for each in sockets.jobs()["job"]] == [0, 1, 2]
        assert sockets.ask(sockets.rank_sockets(base / "job"), timeout_s=0.2) == of(story(0))
        for thread in threads:
            thread.join()
        for listener, path in opened:
            listener.close()
            sockets.withdraw(path)
        assert not base.exists()

    def test_what_a_killed_rank_has_left_is_cleared_away(self, base: Path) -> None:
        opened = sockets.listen("job", 0)
        assert opened is not None
        opened[0].close()  # the file stays, as after SIGKILL
        assert opened[1].exists()
        assert "job" not in sockets.jobs() and not base.exists()

    def test_a_rank_that_begins_keeps_its_socket_while_others_clear(
        self, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Begun(socket.socket):
            def listen(self, backlog: int = 64) -> None:
                assert "job" not in sockets.jobs(), "a rank that cannot be asked yet must not be listed"
                super().listen(backlog)

        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", Begun)
            opened = sockets.listen("job", 0)
        assert opened is not None
        assert [(place.rank, place.is_served) for place in sockets.jobs()["job"]] == [(0, True)]
        opened[0].close()
        sockets.withdraw(opened[1])
        assert not base.exists()

    def test_what_was_left_before_it_listened_is_cleared_away(self, base: Path) -> None:
        base.mkdir(mode=0o700)
        (base / "job").mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as begun:
            begun.bind(str(base / "job" / "0.1~"))
        os.utime(base / "job", (0, 0))
        sockets.clear(base)
        assert not base.exists()

    def test_a_folder_that_others_may_enter_is_left_alone_and_told(
        self, base: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        base.mkdir()
        base.chmod(0o777)
        base.joinpath("of somebody").touch()
        other = base.with_name(f"{base.name}-2")
        opened = sockets.listen("job", 0)
        assert opened is not None and opened[1] == other / "job" / f"0.{os.getpid()}"
        why = f"{base} must have mode 0700, got 0777: other users may enter it"
        assert [record.getMessage() for record in caplog.records] == [
            f"{why}; the socket for asyncdist story is not created there: it is in {other} instead"
        ]
        assert [each.path for each in sockets.jobs()["job"]] == [opened[1]]
        sockets.warn_of_refused_directories("story")
        assert capsys.readouterr().err == f"asyncdist story: {why}; this folder is skipped\n"
        opened[0].close()
        sockets.withdraw(opened[1])
        assert [each.name for each in base.iterdir()] == ["of somebody"] and not other.exists()

    def test_a_rank_does_not_follow_a_planted_link(self, base: Path, tmp_path: Path) -> None:
        """Regression: a rank deleted the files behind another user's symbolic link, and made its socket there."""
        home = tmp_path / "home"
        home.mkdir(mode=0o700)
        home.joinpath("notes.txt~").touch()
        home.joinpath("1.99999999").touch()
        os.utime(home, (0, 0))
        base.symlink_to(home)
        opened = sockets.listen("job", 0)
        assert opened is not None and opened[1].parents[1].name == f"{base.name}-2"
        base.unlink()
        base.mkdir(mode=0o700)
        base.joinpath("job").symlink_to(home)
        assert [each.path for each in sockets.jobs()["job"]] == [opened[1]]
        opened[0].close()
        sockets.withdraw(opened[1])
        assert sorted(each.name for each in home.iterdir()) == ["1.99999999", "notes.txt~"]

    def test_a_folder_of_another_user_is_not_believed(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        base.mkdir(mode=0o700)
        own = os.getuid()
        monkeypatch.setattr(private_folders.os, "getuid", lambda: own + 1)
        refused = pytest.raises(private_folders.NotPrivateError, match=rf"{base} belongs to (the )?user ")
        with refused, private_folders.opened(base):
            raise AssertionError("the folder must not be opened")

    def test_files_of_other_kinds_are_never_cleared_away(self, base: Path) -> None:
        base.mkdir(mode=0o700)
        folder = base / "job"
        folder.mkdir(mode=0o700)
        folder.joinpath("1.99999999").touch()
        folder.joinpath("notes~").touch()
        folder.joinpath("2.99999999").symlink_to(base)
        os.utime(folder, (0, 0))
        assert "job" not in sockets.jobs()
        assert len(list(folder.iterdir())) == 3

    def test_sockets_of_another_container_are_left_there(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Regression: a job that started in one container removed the sockets of a running job in a different one."""
        opened = sockets.listen("job", 0)
        assert opened is not None
        listener, path = opened
        other = path.with_name("0.99999999")  # its number there; it has none here
        path.rename(other)
        monkeypatch.setattr(sockets, "_credentials", lambda _: (0, os.getuid()))
        assert [each.path for each in sockets.jobs()["job"]] == [other]
        monkeypatch.undo()
        assert base.exists() and other.exists()
        listener.close()
        sockets.withdraw(other)

    def test_a_socket_whose_folder_was_removed_is_made_anew(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Regression: asyncdist story found no job after its user's logout, which removes the folder of the sockets."""
        opened = sockets.listen("job", 0)
        assert opened is not None
        teller = object.__new__(answering.WaitReporter)
        teller._world = cast("Any", SimpleNamespace(rank=0, services=SimpleNamespace(job="job")))
        teller._listener, teller._path = opened
        with selectors.DefaultSelector() as ready:
            ready.register(teller._listener, selectors.EVENT_READ)
            teller._renew_listener(ready)
            assert teller._listener is opened[0], "the listener must be kept while its socket exists"
            shutil.rmtree(base)
            teller._renew_listener(ready)
            assert [key.fileobj for key in ready.get_map().values()] == [teller._listener] != [opened[0]]
        assert [each.path for each in sockets.jobs()["job"]] == [teller._path]
        teller._listener.close()
        sockets.withdraw(teller._path)

    def test_without_free_descriptors_no_rank_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Regression: a lack of file descriptors ended ``asyncdist run --live``, and thereby the job."""

        def full(*_: object) -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(sockets.socket, "socket", full)
        assert sockets.exchange([sockets.RankSocket(Path("0.1"), 0, 1)], sockets.COUNTERS) == {}

    def test_process_of_another_user_is_not_asked_or_answered(
        self, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = sockets.listen("job", 0)
        assert opened is not None
        listener, path = opened
        place = sockets.RankSocket(path, 0, os.getpid())
        monkeypatch.setattr(sockets, "_CREDENTIALS", SimpleNamespace(size=12, unpack=lambda _: (1, os.getuid() + 1, 1)))
        assert sockets.exchange([place], sockets.STORY, 0.2) == {}
        client, _ = listener.accept()
        assert client.recv(16) == b"", "no question may be sent"
        client.close()
        with socket.socket(socket.AF_UNIX) as asks:
            asks.connect(str(path))
            asks.sendall(sockets.STORY)
            answering.WaitReporter._answer(object.__new__(answering.WaitReporter), listener)
            with contextlib.suppress(ConnectionResetError):
                assert asks.recv(16) == b""
        listener.close()
        sockets.withdraw(path)

    def test_a_path_that_is_too_long_for_a_socket_is_not_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(environment, "shared_directories", lambda: [str(long), "/tmp"])
        assert all(long not in each.parents for each in sockets.directories())


def test_jobs_that_run_here_are_told_apart_by_what_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    place = sockets.RankSocket(Path("socket"), 0, os.getpid())
    monkeypatch.setattr(finding, "jobs", lambda: {"0000abcd": [place], "0000ffff": [place, place]})
    with pytest.raises(LookupError) as caught:
        finding.find_job(None)
    words = Path("/proc/self/cmdline").read_text().split("\0")[1:]
    told = rf"{re.escape(' '.join(words).strip()[:60])}(\.\.\.)?, 1 ranks, pid {os.getpid()} first"
    assert re.fullmatch(
        rf"several jobs run here; name one: 0000abcd \({told}\); 0000ffff \({told.replace('1 r', '2 r')}\)",
        str(caught.value),
    )


def test_a_launcher_has_its_ranks_job_not_one_that_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: --live showed either job."""
    # Launcher 10 has started rank 20, which has started launcher 30, which has started rank 40.
    parents = {40: [40, 30, 20, 10], 20: [20, 10]}
    monkeypatch.setattr(finding, "_line_of", parents.__getitem__)
    outer, inner = ([sockets.RankSocket(Path("socket"), 0, pid)] for pid in (20, 40))
    for found in ({"a": inner, "b": outer}, {"b": outer, "a": inner}):
        assert [finding.job_of_process(pid, found) for pid in (10, 20, 30, 40)] == ["b", "b", "a", "a"]
    assert finding.job_of_process(40, {"b": outer}) is None


def test_a_word_that_is_neither_a_job_nor_a_folder_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(finding, "jobs", dict)
    assert command.run("nowhere") == 2
    told = capsys.readouterr().err
    assert (
        "no job 'nowhere' of this user runs on this host" in told and "'nowhere' is not a folder of recordings" in told
    )
    assert command.run(None) == 2
    assert "no job of this user" in (told := capsys.readouterr().err) and "folder" not in told


def test_ranks_that_compute_for_long_are_not_asked_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: while all ranks computed for longer than stall_s, all of them were asked every second."""
    teller = object.__new__(answering.WaitReporter)
    teller._stall_s, teller._look_again_at = 60.0, 0.0
    computing = {rank: replace(story(rank, state="computes"), still_s=100.0) for rank in range(2)}
    monkeypatch.setattr(teller, "_does_lower_rank_report", lambda: False)
    monkeypatch.setattr(teller, "_story", lambda: computing[0])
    monkeypatch.setattr(teller, "_ask_all", lambda own: (computing, []))
    began_at = time.monotonic()
    teller._report_if_none_progresses()
    assert 15.0 <= teller._look_again_at - began_at < 16.0


def test_a_word_of_thousands_of_digits_names_no_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the command ended with a traceback, because int() refuses more than 4,300 digits."""
    monkeypatch.setattr(finding, "jobs", dict)
    assert command.run("1" * 5000) == 2
    assert "no job '111" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "tells"), [((), True), ((3,), True), ((0,), False), ((1, 3), False)])
def test_lowest_of_several_signalled_ranks_reports_for_all(
    asked: tuple[int, ...], tells: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: ranks were asked in turn, a second for each blocked rank, so several ranks printed the report."""
    places = [sockets.RankSocket(Path(str(rank)), rank, 100 + rank) for rank in (0, 1, 3)]
    monkeypatch.setattr(answering, "_ASKED_TOGETHER_S", 0.0)
    questions = list[tuple[bytes, list[int]]]()

    def exchange(places: list[sockets.RankSocket], question: bytes) -> dict[int, bytes]:
        questions.append((question, [each.rank for each in places]))
        return {each.rank: sockets.YES if each.rank in asked else sockets.NO for each in places}

    monkeypatch.setattr(sockets, "exchange", exchange)
    monkeypatch.setattr(answering.sockets, "ask", lambda others: {each.rank: story(each.rank) for each in others})
    monkeypatch.setattr(answering.WaitReporter, "_other_sockets", lambda _: places)
    teller = object.__new__(answering.WaitReporter)
    teller._world, teller._path = SimpleNamespace(rank=2), Path("2")  # type: ignore[assignment]
    teller._print_all(story(2))
    said = capsys.readouterr().err
    assert questions == [(sockets.ASKED, [0, 1])]
    assert ("asyncdist: job 0123abcd: train.py, 3 ranks on here" in said) is tells is bool(said)
