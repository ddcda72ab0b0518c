"""Shows the ranks of a job on this host in a live table, for ``asyncdist top`` and ``asyncdist run --live``.

Ranks are queried over sockets, and answer from a separate thread even while they compute.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from asyncdist import validation
from asyncdist.live.columns import Readings, Row, screen
from asyncdist.live.counters import RankCounters, from_bytes
from asyncdist.story import sockets
from asyncdist.story.finding import chosen_job
from asyncdist.story.formatting import summarize
from asyncdist.story.sockets import RankSocket

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Seconds between two requests to the ranks.
PERIOD_S: Final = 1.0
#: Seconds without a step after which a rank is asked what it is doing.
_STILL_S: Final = 3.0
NEEDS_RICH: Final = validation.missing_library("the table", "rich", "live")


def has_rich() -> bool:
    """Return whether rich, which draws the table, is installed."""
    return importlib.util.find_spec("rich") is not None


def allow_all_text() -> None:
    """Replace characters that the terminal's encoding lacks instead of raising, because a job may print any text."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class JobView:
    """Asks the ranks of a job for their counters, and displays them as a table.

    Attributes:
        rows: Rows of the table, with the ranks' latest answers.
    """

    def __init__(self) -> None:
        self._readings = Readings()
        self.rows: list[Row] = []
        # Number of steps of each rank, and the time of its last step.
        self._moved: dict[int, tuple[int, float]] = {}
        self._answered_at_s: dict[int, float] = {}

    def ask(self, rank_sockets: Sequence[RankSocket]) -> None:
        """Ask all ranks concurrently for their counters, and ask ranks that take no steps what they are doing."""
        answers = sockets.exchange(rank_sockets, sockets.COUNTERS)
        self._answered_at_s |= dict.fromkeys(answers, time.monotonic())
        for data in answers.values():
            with contextlib.suppress(ValueError):  # the rank ended while it answered
                self._readings.add(from_bytes(data))
        still = [peer for peer in rank_sockets if peer.rank in answers and self._is_still(peer.rank)]
        stories = sockets.ask(still) if still else {}
        notes = {rank: summarize(story, stories) for rank, story in stories.items()}
        for peer in rank_sockets:
            if peer.rank not in answers:
                notes[peer.rank] = "does not answer" if peer.is_alive else "has ended"
        ranks = sorted({peer.rank for peer in rank_sockets})
        rows = [self._readings.row(rank, notes.get(rank, "")) for rank in ranks]
        self.rows = [row if row.rank in answers else replace(row, before=None, is_silent=True) for row in rows]

    def _is_still(self, rank: int) -> bool:
        counters, now = self._readings.row(rank).now, time.monotonic()
        step = 0 if counters is None else counters.step
        if self._moved.get(rank, (-1, 0.0))[0] != step:
            self._moved[rank] = step, now
        return now - self._moved[rank][1] >= _STILL_S

    def rows_at_end(self, left: Sequence[RankCounters] = ()) -> tuple[list[Row], dict[int, float]]:
        """Return an ended job's rows and, for ranks without final counters, their last answers' ages in seconds."""
        now = time.monotonic()
        for counters in left:
            known = self._readings.row(counters.rank).now
            if known is None or known.incarnation <= counters.incarnation:
                self._readings.add(counters)
                self._answered_at_s.pop(counters.rank, None)
        ranks = {row.rank for row in (*self.rows, *self._readings.rows())}
        rows = [self._readings.row(rank) for rank in sorted(ranks)]
        return rows, {rank: now - at_s for rank, at_s in self._answered_at_s.items()}

    def drawn(self, console: Console) -> Table:
        """Return the table of the ranks' latest answers, sized for the terminal."""
        return _screen(self.rows, console)

    def drawn_at_end(self, console: Console, left: Sequence[RankCounters] = ()) -> Table:
        """Return the table of an ended job: the ranks' final counters, or their last answers and the answers' ages."""
        rows, ages_s = self.rows_at_end(left)
        return _screen(rows, console, ages_s)


def _screen(rows: Sequence[Row], console: Console, before_end_s: Mapping[int, float] | None = None) -> Table:
    height = console.height if console.is_terminal else None
    return screen(rows, console.width, height, before_end_s=before_end_s or {})


def run(name: str | None) -> int:
    """Show the table until the job ends or Ctrl-C is pressed, and return the exit code.

    If the output is not a terminal, or cannot be redrawn (``TERM=dumb``), the table is printed once, after one second
    for measuring rates. ``name`` is the name of the job, or the pid of one of its processes or of their parent. None
    selects the only job.
    """
    if not has_rich():
        print(f"asyncdist top: {NEEDS_RICH}", file=sys.stderr)
        return 2
    job = chosen_job("top", name)
    if job is None:
        return 2
    from rich.console import Console
    from rich.live import Live

    allow_all_text()
    console, view = Console(), JobView()
    if not console.is_terminal or console.is_dumb_terminal:
        view.ask(sockets.jobs().get(job, ()))
        time.sleep(PERIOD_S)
        view.ask(sockets.jobs().get(job, ()))
        console.print(view.drawn(console))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while rank_sockets := sockets.jobs().get(job, ()):
                view.ask(rank_sockets)
                live.update(view.drawn(console), refresh=True)
                time.sleep(PERIOD_S)
        console.print(view.drawn_at_end(console))
        console.print(f"job {job} has ended")
    return 0
