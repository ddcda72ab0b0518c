"""Draws the chart of a run: each rank's loss over time, and the moments at which ranks applied an average."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from history import RankHistory, first_time
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's palette, which people with any colour vision can tell apart."""
STYLES = ("-", "--", "-.", ":")


def draw(path: Path, histories: Sequence[RankHistory], *, title: str) -> None:
    """Write the chart as a PNG.

    Args:
        path: File to write.
        histories: Histories of all ranks.
        title: Title above the chart.
    """
    zero = first_time(histories) or 0.0
    figure, axes = plt.subplots(figsize=(10, 5.2), dpi=150)
    for history in histories:
        colour = COLOURS[history.rank % len(COLOURS)]
        style = STYLES[history.rank // len(COLOURS) % len(STYLES)]
        times = [line["time"] - zero for line in history.progress]
        losses = [-line["metric"] for line in history.progress]
        count = len(history.replaced)
        label = f"rank {history.rank}, {count} replacement{'' if count == 1 else 's'}"
        if history.killed_at is not None:
            label += f", killed at {history.killed_at - zero:.1f} s"
            axes.axvline(history.killed_at - zero, linestyle=":", color=colour, linewidth=1.2)
            axes.plot(times[-1:], losses[-1:], "X", color=colour, markersize=11, markeredgecolor="black", zorder=4)
        axes.plot(times, losses, style, color=colour, linewidth=1.3, alpha=0.9, label=label)
        axes.plot(
            [line["time"] - zero for line in history.replaced],
            [-line["metric"] for line in history.replaced],
            linestyle="none", marker="v", markersize=7, color=colour, markeredgecolor="black", markeredgewidth=0.6,
            zorder=3,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("time since training began [s]")
    axes.set_ylabel("running mean of the trajectory-balance loss\n(log scale; the metric is minus this)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, which="both", color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    handles, labels = axes.get_legend_handles_labels()
    if any(history.replaced for history in histories):
        marker = Line2D([], [], linestyle="none", marker="v", markersize=7, color="white", markeredgecolor="black")
        handles.append(marker)
        labels.append("replaced by an average, then judged anew")
    axes.legend(handles, labels, loc="upper right", fontsize=9, framealpha=0.95)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
