"""Tests how guardians on a remote host report to the launcher, through the FIFO of that host's agent."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from asyncdist.launch import guardians
from asyncdist.launch.hosts.host_agent import GuardianReports


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    text = secrets.token_hex(8)
    # the process number belongs to another process
    monkeypatch.setenv(guardians.REPORTS_VARIABLE, f"{os.getpid()} 2 {text}")
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
    agent.send_signal(3, 0)  # the guardian has ended
    agent.close()
    assert told == [f"3 guarded {os.getpid()}", "3 ended -9"]
    assert not os.path.exists(os.path.dirname(guardians.reports_path(token)))


def test_folders_of_killed_agents_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a killed agent's folder stayed in /tmp."""
    monkeypatch.setattr(guardians, "REPORTS_FOLDER", f"{tmp_path}/reports-")
    left, new, open_to_all = (tmp_path / f"reports-{name}" for name in ("left", "new", "open"))
    for folder in (left, new, open_to_all):
        folder.mkdir(mode=0o700)
        os.mkfifo(folder / "fifo")
    open_to_all.chmod(0o755)
    other = GuardianReports("in use", lambda _: None)
    used = Path(guardians.reports_path("in use")).parent
    for folder in (left, open_to_all, used):
        os.utime(folder, (0, 0))
    GuardianReports("token", lambda _: None).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["reports-new", "reports-open", used.name])
    other.close()


def test_without_an_agent_the_end_is_a_marked_line(token: str, capfd: pytest.CaptureFixture[str]) -> None:
    os.environ[guardians.REPORTS_VARIABLE] = f"1000000000 2 {token}"
    guardian = guardians._Reports()
    guardian.write("guarded", os.getpid())
    guardian.write("ended", -9)
    assert capfd.readouterr().err == guardians.report_mark(token).decode() + "3 ended -9\n"
