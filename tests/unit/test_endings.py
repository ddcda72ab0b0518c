"""Tests which rank is blamed for a failed job, the text that the user reads, and the exit code of an MPI job."""

from __future__ import annotations

import signal

import pytest
from support.facts import names

from asyncdist.launch.supervision.endings import JobEnds, describe_end, exit_code

KILLED = "was killed by SIGKILL (the kernel kills processes when memory is short: see dmesg)"


def test_an_end_is_named_by_its_code_or_signal() -> None:
    assert [describe_end(code) for code in (7, -9)] == ["ended with exit code 7", KILLED]
    assert describe_end(-signal.SIGBUS) == "was killed by SIGBUS (often because shared memory is full: see df /dev/shm)"
    assert describe_end(-63) == f"was killed by signal {63}" and exit_code(-9) == 137 and exit_code(3) == 3


def test_first_informative_end_is_the_cause_and_is_told_at_once() -> None:
    ends = JobEnds(3, survival_option="--survive")
    assert names(ends.note(2, 7), f"rank 2 {describe_end(7)}")
    assert ends.note(0, 143) is None and ends.note(1, 5) is None
    assert ends.conclude(143) == (7, [])


def test_a_kill_names_the_option_with_which_the_others_go_on() -> None:
    said = f"rank 1 {KILLED}; stopping the others"
    assert JobEnds(3, survival_option="--survive").note(1, -9) == f"{said} (--survive lets them continue)"
    assert JobEnds(3).note(1, -9) == said
    assert JobEnds(1, survival_option="--survive").note(0, -9) == f"rank 0 {KILLED}"


def test_a_signal_that_was_passed_on_is_named_as_such() -> None:
    ends = JobEnds(2, survival_option="--survive", passed_on={signal.SIGUSR2})
    how = "was killed by SIGUSR2, which asyncdist run passed on: the script has no handler for it"
    assert names(ends.note(0, -signal.SIGUSR2), f"rank 0 {how}")


def test_ranks_that_fail_by_an_exception_are_named_together() -> None:
    """Regression: the first rank to end was blamed, although it had stopped because of another rank."""
    ends = JobEnds(3)
    assert [ends.note(rank, 1) for rank in (1, 0, 2)] == [None] * 3
    assert ends.conclude(1) == (1, [f"ranks 0-2 {describe_end(1)}"])


def test_an_exit_code_after_the_victims_is_the_cause() -> None:
    ends = JobEnds(2)
    assert ends.note(0, 1) is None
    assert ends.note(1, 3) == f"rank 1 {describe_end(3)}"
    assert ends.conclude(1) == (3, [])


@pytest.mark.parametrize("first", [2, 0])
def test_a_rank_that_lost_its_connection_is_not_the_cause(first: int) -> None:
    """Regression: between hosts MPI ended the job with 14, and the killed rank was not named."""
    ends = JobEnds(4, is_across_hosts=True)
    codes = {0: 14, 2: -9}
    said = [ends.note(rank, codes[rank]) for rank in (first, 2 - first)]
    assert sorted(filter(None, said)) == [f"rank 2 {KILLED}; stopping the others"]
    assert ends.conclude(14) == (137, [])


def test_the_code_of_a_lost_connection_is_the_users_on_one_host() -> None:
    assert JobEnds(2).note(0, 14) == "rank 0 ended with exit code 14; stopping the others"
    alone = JobEnds(2, is_across_hosts=True)
    assert alone.note(0, 14) is None
    assert alone.conclude(14) == (14, ["rank 0 ended with exit code 14"])


@pytest.mark.parametrize("code", [-signal.SIGTERM, 143])
def test_a_rank_that_was_terminated_is_no_cause_at_once(code: int) -> None:
    ends = JobEnds(2)
    assert ends.note(0, code) is None
    assert ends.conclude(143) == (143, [f"rank 0 {describe_end(code)}"])


def test_a_signal_to_the_launcher_decides_the_exit_code() -> None:
    ends = JobEnds(2, asked_to_end=signal.SIGINT)
    assert [ends.note(rank, code) for rank, code in ((0, 130), (1, -9))] == [None, None]
    assert ends.conclude(1) == (130, [])


def test_a_job_of_which_nothing_is_known_ends_as_its_mpirun() -> None:
    assert JobEnds(2).conclude(213) == (213, [])


@pytest.mark.parametrize("survives", [False, True])
def test_a_killed_mpirun_is_named(survives: bool) -> None:
    """Regression: the command ended with 137 and printed nothing."""
    assert JobEnds(2, survives=survives).conclude(-9) == (137, [f"mpirun {KILLED}"])


def test_a_surviving_job_whose_last_rank_was_killed_has_failed() -> None:
    """Regression: the exit code was 0 and nothing was printed."""
    ends = JobEnds(2, survives=True)
    assert [ends.note(rank, -9) for rank in (1, 0)] == [None, None]
    assert ends.conclude(0) == (137, [f"rank 0 {KILLED}", f"rank 1 {KILLED}", "no rank is left"])


def test_a_surviving_job_says_which_signal_was_passed_on() -> None:
    ends = JobEnds(1, survives=True, passed_on={signal.SIGUSR2})
    ends.note(0, -signal.SIGUSR2)
    passed_on = "killed by SIGUSR2, which asyncdist run passed on: the script has no handler for it"
    assert ends.conclude(0) == (140, [f"rank 0 was {passed_on}", "no rank is left"])


@pytest.mark.parametrize("codes", [{0: -9, 1: 0}, {1: 3, 0: 0}, {1: -9}, {1: 0, 0: -9}])
def test_surviving_job_succeeds_if_a_rank_is_not_lost(codes: dict[int, int]) -> None:
    """Regression: it failed if a lost rank was the last to end, after the others had trained to their end."""
    ends = JobEnds(2, survives=True)
    assert [ends.note(rank, code) for rank, code in codes.items()] == [None] * len(codes)
    assert ends.conclude(0) == (0, [])


@pytest.mark.parametrize("codes", [{0: 1, 1: 3}, {1: 3, 0: 1}, {0: -9, 1: 3, 2: 143}])
@pytest.mark.parametrize("mpirun_code", [1, 3])
def test_a_rank_that_fails_a_surviving_job_is_named(codes: dict[int, int], mpirun_code: int) -> None:
    """Regression: mpirun's code was taken, which is by chance that of a rank that the failed rank had stopped."""
    ends = JobEnds(3, survives=True)
    assert [ends.note(rank, code) for rank, code in codes.items()] == [None] * len(codes)
    assert ends.conclude(mpirun_code) == (3, [f"rank 1 {describe_end(3)}"])


def test_a_surviving_job_of_failed_ranks_ends_as_its_mpirun() -> None:
    ends = JobEnds(3, survives=True)
    assert [ends.note(rank, code) for rank, code in ((0, -9), (1, 1), (2, 143))] == [None] * 3
    assert ends.conclude(1) == (1, [])
