"""Tests that the demo kills ranks at the right time, and shows the results of the others. There is no training."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

HYPERGRID = Path(__file__).resolve().parents[2] / "tools" / "hypergrid"
sys.path.insert(0, str(HYPERGRID))
import demo  # noqa: E402
import display  # noqa: E402
from diary import Recorder  # noqa: E402
from history import RankHistory, first_time, summarise  # noqa: E402

sys.path.remove(str(HYPERGRID))


def test_a_rank_is_killed_in_time_and_the_others_have_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        record = Recorder(tmp_path, rank)
        record.start(transport="mpi", ranks=3, mode_count=16, parameter_count=21382)
        record._last = -1.0  # a quarter of a second has passed
        record.step(41, -1.0 - rank, 1e-5, None)
        record.end(iteration=41, metric=-1.0 - rank, modes={rank}, l1_distance=0.5, statistics=None)
    histories = [RankHistory(rank, tmp_path) for rank in range(3)]
    for history in histories:
        history.poll()
    zero = first_time(histories)
    assert zero is not None
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(demo.os, "kill", lambda pid, number: killed.append((pid, number)))
    histories[0].end = histories[1].end = None
    monkeypatch.setattr(demo.time, "time", lambda: zero + 5.0)
    killer = demo.Killer(histories, [(0, 5.0), (1, 6.0), (2, 4.0)])
    killer.poll()
    killer.poll()
    assert [number for _, number in killed] == [signal.SIGKILL], (
        "only rank 2 must be killed, because the time to kill rank 1 never arrives"
    )
    assert (histories[0].killed_at, histories[1].killed_at) == (zero + 5.0, None)
    histories[1].poll()
    histories[1].end = histories[2].end
    result = summarise(histories, policy="selective", seed=0, verified_count=None)
    assert result["rank_numbers"] == [1, 2] and result["ranks"] == 2
    assert result["killed"] == [{"rank": 0, "at_s": 5.0, "iterations": 41}]
    console = Console(width=200, file=io.StringIO())
    console.print(display.result_table(result))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "killed" in text and "2 ranks over mpi" in text
    line = demo.closing_line(result, verify=False)
    assert line.startswith("Killed: rank 0 at 5.0 s; the other 2 trained to the end.")
    assert demo.chart_title(result).startswith("3 ranks train")
