"""Tests how guardians on a remote host report to the launcher, through the FIFO of that host's agent."""

from __future__ import annotations

import os
import secrets

import pytest

from asyncdist.launch import guardians
from asyncdist.launch.supervision.guardian_reports import GuardianReports


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    text = secrets.token_hex(8)
    monkeypatch.setenv(guardians.REPORTS_VARIABLE, f"{os.getpid()} 2 {text}")  # the number is that of another process
    monkeypatch.setenv("RANK", "3")
    return text


def test_reports_are_told_in_order_and_nothing_is_left(token: str) -> None:
    told: list[str] = []
    agent = GuardianReports(token, told.append)
    guardian = guardians._Reports()
    assert guardians.REPORTS_VARIABLE not in os.environ
    guardian.write("guarded", os.getpid())
    guardian.write("ended", -9)
    guardian.close()
    agent.send_signal(3, 0)  # its guardian has ended
    agent.close()
    assert told == [f"3 guarded {os.getpid()}", "3 ended -9"]
    assert not os.path.exists(os.path.dirname(guardians.reports_path(token)))


def test_without_an_agent_the_end_is_a_marked_line(token: str, capfd: pytest.CaptureFixture[str]) -> None:
    os.environ[guardians.REPORTS_VARIABLE] = f"1000000000 2 {token}"
    guardian = guardians._Reports()
    guardian.write("guarded", os.getpid())
    guardian.write("ended", -9)
    assert capfd.readouterr().err == guardians.report_mark(token).decode() + "3 ended -9\n"
