"""Shows the demo's progress on a terminal or in a log, and the table of results at the end."""

import math
import time
from collections.abc import Sequence
from typing import Any

from history import RankHistory, first_time
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

LOG_PERIOD_S = 5.0
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COUNT = 24


class Display:
    """Shows a live table on a terminal; otherwise prints a line every few seconds and one for each replacement.

    A context manager.

    Args:
        console: Console to write to.
        histories: Histories of the ranks that train.
        iterations: Training steps after which the first rank ends the training.
        buffers: Histories of the ranks that are replay buffers.
    """

    def __init__(
        self,
        console: Console,
        histories: Sequence[RankHistory],
        iterations: int,
        buffers: Sequence[RankHistory] = (),
    ) -> None:
        self._console = console
        self._histories = histories
        self._buffers = buffers
        self._iterations = iterations
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._logged_at = 0.0
        self._logged_counts = [0] * len(histories)
        self._logged_kills: set[int] = set()

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def update(self, verified_count: int | None) -> None:
        """Show the current state of the histories."""
        zero = first_time(self._histories)
        if self._live is not None:
            table = live_table(self._histories, self._iterations, zero, verified_count)
            self._live.update(Group(table, *map(buffer_line, self._buffers)))
        elif zero is not None:
            self._log(zero)

    def _log(self, zero: float) -> None:
        for index, history in enumerate(self._histories):
            for line in history.replaced[self._logged_counts[index] :]:
                where = f"rank {history.rank} at iteration {line['iteration']}"
                self._print(f"{line['time'] - zero:5.1f} s  {where}: {line['text']}")
            self._logged_counts[index] = len(history.replaced)
            if history.killed_at is not None and history.rank not in self._logged_kills:
                self._logged_kills.add(history.rank)
                self._print(f"{history.killed_at - zero:5.1f} s  rank {history.rank} is killed (SIGKILL)")
        now = time.time()
        living = [history for history in self._histories if history.killed_at is None]
        is_over = all(history.end is not None for history in living)  # but for processes that take their leave
        if now - self._logged_at >= LOG_PERIOD_S and not is_over:
            self._logged_at = now
            latest = [(history, history.latest) for history in living if history.progress]
            ranks = " | ".join(
                f"rank {history.rank}: {line['iteration']} at {history.rate:.1f} it/s, metric {line['metric']:.3f}"
                for history, line in latest
            )
            self._print(f"{now - zero:5.1f} s  {ranks or 'training has begun'}")
            for history in self._buffers:
                if history.held:
                    self._print(f"{now - zero:5.1f} s  {buffer_line(history)}")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def live_table(
    histories: Sequence[RankHistory], iterations: int, zero: float | None, verified_count: int | None
) -> Table:
    """Return the live table, with one row per rank."""
    if zero is None:
        title = "starting the ranks (torch and torchgfn take some seconds to import)"
    else:
        furthest = max(int(history.latest["iteration"]) for history in histories)
        title = f"{time.time() - zero:.0f} s, {100 * furthest // iterations} %"
        title += "" if verified_count is None else f", {verified_count} averages verified"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("rank", "iteration", "it/s", "metric", "replaced"):
        table.add_column(name, justify="right")
    table.add_column("metric over time", width=SPARK_COUNT, no_wrap=True)
    table.add_column("last replacement", ratio=1, no_wrap=True)
    for history in histories:
        last = history.replaced[-1] if history.replaced else None
        fresh = last is not None and time.time() - last["time"] < 2
        table.add_row(
            str(history.rank),
            str(history.latest["iteration"]),
            f"{history.rate:.1f}",
            f"{history.latest['metric']:.3f}",
            str(len(history.replaced)),
            spark_line([line["metric"] for line in history.progress]),
            Text("killed", style="bold red")
            if history.killed_at is not None
            else Text(last["text"] if last else "", style="bold reverse" if fresh else ""),
        )
    return table


def buffer_line(history: RankHistory) -> str:
    """Return a line that describes a replay buffer's current contents."""
    if not history.held:
        return f"rank {history.rank} is a replay buffer and holds nothing yet"
    held = history.held[-1]
    count = len(held["modes"])
    modes = f"{count} different mode{'' if count == 1 else 's'}"
    reward = f"mean reward {held['mean_reward']:.3f}"
    return f"rank {history.rank} is a replay buffer and holds {held['size']} states, {modes}, {reward}"


def spark_line(values: Sequence[float], width: int = SPARK_COUNT) -> str:
    """Return the values as a string of small bars, scaled from lowest to highest value; NaN is a gap."""
    if not values:
        return ""
    count = min(width, len(values))
    shown = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[int((value - low) * scale)] if math.isfinite(value) else " " for value in shown)


def result_table(result: dict[str, Any]) -> Table:
    """Return the table of results, with one row per rank."""
    ranks = f"{result['ranks']} rank{'' if result['ranks'] == 1 else 's'}"
    title = f"{ranks} over {result['transport']}, policy {result['policy']}"
    table = Table(title=title, title_justify="left")
    names = "rank|iterations|it/s|metric|replaced|modes|L1 distance|idle step, us|stall, s"
    for name in names.split("|"):
        table.add_column(name, justify="right")
    for place, rank in enumerate(result["rank_numbers"]):
        metric, idle_us = result["metric"][place], result["step_overhead_us_by_rank"][place]
        table.add_row(
            f"{rank} (best)" if rank == result["best_rank"] else str(rank),
            str(result["iterations"][place]),
            f"{result['iterations_per_s'][place]:.1f}",
            "-" if metric is None else f"{metric:.3f}",
            str(result["replacements"][place]),
            f"{result['modes_found_by_rank'][place]} of {result['modes_total']}",
            f"{result['l1_distance_by_rank'][place]:.3f}",
            "-" if idle_us is None else f"{idle_us:.1f}",
            f"{result['stall_s_by_rank'][place]:.3f}",
        )
    for one in result["killed"]:
        table.add_row(str(one["rank"]), str(one["iterations"]), "killed", *["-"] * 6)
    return table


def buffer_table(result: dict[str, Any]) -> Table:
    """Return the table of replay buffers, with one row per buffer; counts are numbers of states."""
    table = Table(title="replay buffers", title_justify="left")
    names = "rank|serves ranks|added|drawn|evicted|held|modes held|mean reward held"
    for name in names.split("|"):
        table.add_column(name, justify="right")
    for buffer in result["buffers"]:
        reward = buffer["mean_reward"]
        table.add_row(
            str(buffer["rank"]),
            ", ".join(map(str, buffer["clients"])),
            str(sum(buffer["added"].values())),
            str(sum(buffer["drawn"].values())),
            str(buffer["evicted_count"]),
            f"{buffer['size']} of {buffer['capacity']}",
            f"{len(buffer['modes'])} of {result['modes_total']}",
            "-" if reward is None else f"{reward:.3f}",
        )
    return table
