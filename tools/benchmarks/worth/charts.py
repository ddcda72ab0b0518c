"""Draws the three charts of the benchmark ``value``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from harness import Results

from worth.methods import METHODS
from worth.settings import RANK_COUNT
from worth.tables import best_shares, median, times
from worth.tasks import TASKS

#: Colours that people with a colour vision deficiency can distinguish (Okabe and Ito).
BLUE: Final = "#0072B2"
ORANGE: Final = "#D55E00"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
BLACK: Final = "#000000"
GREY: Final = "#767676"
YELLOW: Final = "#B8860B"
PURPLE: Final = "#AA3377"
INDIGO: Final = "#332288"
#: Colour, marker and style of each line of the chart of times. Dashed lines are methods that wait for the slow rank.
#: Dotted lines are methods without this rank.
LINES: Final = {
    "one rank alone": (BLACK, "o", ":"),
    "LocalSGD, three ranks": (GREY, "s", ":"),
    "gradients, every step": (ORANGE, "^", "--"),
    "LocalSGD": (YELLOW, "D", "--"),
    "DiLoCo": (PURPLE, "v", "--"),
    "DiLoCo, quorum 3": (SKY, "<", "-"),
    "async DiLoCo": (BLUE, ">", "-"),
    "async DiLoCo, grace": (INDIGO, "P", "-"),
    "selective, mean": (GREEN, "X", "-"),
}
#: Labels of lines whose names do not say enough.
LABELS: Final = {"LocalSGD, three ranks": "LocalSGD without the slow rank"}


def draw(results: Results, path: Path) -> None:
    """Write the chart of times to the path, and the others into the same folder, in the path's format."""
    import matplotlib  # an optional package, needed only here

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for suffix, chart in (("", _draw_times), ("_bytes", _draw_bytes), ("_failures", _draw_failures)):
        figure = chart(results, plt)
        figure.savefig(path.with_stem(path.stem + suffix))
        plt.close(figure)


def colour_of(method: str) -> str:
    """Return a method's colour, which shows whether its ranks wait, do not wait, or train alone."""
    if METHODS[method].ranks < RANK_COUNT or method == "none":
        return BLACK
    if METHODS[method].waits:
        return ORANGE
    if METHODS[method].deploys != "anchor":
        return GREEN
    return BLUE


# -- the time to a fixed quality --------------------------------------------------------------------------------------


def _draw_times(results: Results, plt: Any) -> Any:
    """Draw the time to a fixed quality against the slowdown of one rank."""
    found = times(results)
    figure, axes = plt.subplots(figsize=(9, 5.2), dpi=150)
    slowdowns = sorted({slowdown for by_slowdown in found.values() for slowdown in by_slowdown})
    ends: dict[str, float] = {}
    lost: dict[str, tuple[float, float]] = {}  # the last point of methods that do not reach the quality later
    for method, by_slowdown in found.items():
        points = [(slowdown, each) for slowdown, each in sorted(by_slowdown.items()) if each is not None]
        colour, marker, style = LINES.get(method, (BLACK, ".", "-"))
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=style, markersize=6)
        if points and len(points) == len(by_slowdown):
            ends[method] = points[-1][1]
        elif points:
            lost[method] = points[-1]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(slowdowns, [f"{slowdown:g}x" for slowdown in slowdowns])
    axes.minorticks_off()
    ticks = [
        t for t in (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000) if t <= 1.5 * max(ends.values(), default=100.0)
    ]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlim(0.9, 100 * 4.5)
    _label(axes, ends, 112.0)
    for line, (method, (slowdown, _)) in enumerate(lost.items()):
        said = f"{method} reaches it up to {slowdown:g}x only"
        axes.text(0.02, 0.03 + 0.05 * line, said, transform=axes.transAxes, color=LINES[method][0], fontsize=9)
    missing = [method for method in found if method not in ends and method not in lost]
    if missing:
        axes.text(
            1, 1, f"not reached: {', '.join(missing)}", transform=axes.transAxes, ha="right", va="top", fontsize=9
        )
    axes.set_xlabel("slowdown of one of four ranks")
    target = TASKS["gaussians"].target
    axes.set_title(f"virtual seconds until the test loss is {target:g} (median of five seeds)", loc="left", fontsize=11)
    _tidy(axes, "both")
    note = "dashed: ranks wait for the slow one; dotted: without the slow rank"
    axes.text(0.02, 0.97, note, transform=axes.transAxes, color="#333333", fontsize=9, va="top")
    figure.tight_layout()
    return figure


def _label(axes: Any, ends: Mapping[str, float], at: float) -> None:
    """Write each line's name next to its end, moved so that names do not overlap."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    gap = (high - low) / 25
    placed: list[float] = []
    for method, end in sorted(ends.items(), key=lambda item: item[1]):
        height = max(math.log(end), placed[-1] + gap if placed else -math.inf)
        placed.append(height)
        axes.text(at, math.exp(height), LABELS.get(method, method), color=LINES[method][0], fontsize=9, va="center")


# -- the quality against the bytes ------------------------------------------------------------------------------------


def _draw_bytes(results: Results, plt: Any) -> Any:
    """Draw the quality at the end against the bytes that a rank sends."""
    panels = [name for name in ("gaussians, equal", "gaussians, links") if name in results]
    named: list[tuple[Any, dict[str, tuple[float, float]]]] = []
    titles = {"gaussians, equal": "fast links", "gaussians, links": "50 Mbit/s, as if for 30 million parameters"}
    figure, all_axes = plt.subplots(1, len(panels), figsize=(6.2 * len(panels), 5.4), dpi=150, squeeze=False)
    for axes, name in zip(all_axes[0], panels, strict=True):
        points: dict[str, tuple[float, float]] = {}
        for method, found in results[name].items():
            values = found["loss"]
            sent, quality = median(found, "models_sent"), median(found, "loss")
            if sent < 0.01:
                axes.axhline(quality, color=GREY, linewidth=0.8, linestyle=":")
                axes.text(
                    0.99,
                    quality,
                    method,
                    transform=axes.get_yaxis_transform(),
                    color=GREY,
                    fontsize=8,
                    ha="right",
                    va="bottom",
                )
                continue
            points[method] = sent, quality
            axes.plot([sent, sent], [min(values), max(values)], color=colour_of(method), linewidth=0.8, alpha=0.5)
            axes.plot(sent, quality, "o", color=colour_of(method), markersize=5)
        axes.set_xscale("log")
        axes.minorticks_off()
        low, high = min(x for x, _ in points.values()), max(x for x, _ in points.values())
        axes.set_xlim(0.7 * low, high * (high / low) ** 0.3)
        ticks = [tick for tick in (1, 2, 3, 4, 5, 6, 10, 20, 50, 100, 200) if low / 1.2 <= tick <= 1.2 * high]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_title(titles[name], loc="left", fontsize=11)
        axes.set_xlabel("models sent by a rank (bytes sent / bytes of the model)")
        _tidy(axes, "both")
        axes.set_ylim(0.9 * min(y for _, y in points.values()), min(1.45, 1.1 * max(y for _, y in points.values())))
        named.append((axes, points))
    all_axes[0][0].set_ylabel("test loss at the end (median and range of five seeds)")
    figure.tight_layout()
    for axes, points in named:  # after the layout, which moves the points
        _name_points(axes, points)
    return figure


#: Positions of a name next to its point: distance in points, and the side on which the name is.
_PLACES: Final = (
    ((6, 0), "left"),
    ((-6, 0), "right"),
    *(
        ((sign * right, up), "left" if sign > 0 else "right")
        for up in (9, -9, 18, -18, 28, -28)
        for right in (5, 16)
        for sign in (1, -1)
    ),
)


def _name_points(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Write each point's name where it covers no other name or point. A line leads from a distant name to its point."""
    axes.figure.canvas.draw()
    inside = axes.get_window_extent()
    taken: list[Any] = []
    dots = {method: axes.transData.transform(point) for method, point in points.items()}
    for method, point in sorted(points.items(), key=lambda item: item[1][1]):
        best: tuple[float, Any] | None = None
        for place, (shift, side) in enumerate(_PLACES):
            text = axes.annotate(
                method, point, xytext=shift, textcoords="offset points", ha=side, va="center",
                fontsize=7.5, color=colour_of(method),
            )  # fmt: skip
            box = text.get_window_extent()
            cost = 3.0 * sum(box.overlaps(other) for other in taken) + 0.01 * place
            cost += 3.0 * sum(box.padded(6).contains(*dot) for other, dot in dots.items() if other != method)
            cost += 5.0 * (box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1)
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = cost, text
            else:
                text.remove()
        assert best is not None
        box = best[1].get_window_extent()
        taken.append(box)
        x, y = dots[method]
        if not box.y0 < y < box.y1:
            end = axes.transData.inverted().transform((min(max(x, box.x0), box.x1), box.y0 if y < box.y0 else box.y1))
            axes.plot(*zip(point, end, strict=True), color=colour_of(method), linewidth=0.6)


# -- the share of good runs under failures ----------------------------------------------------------------------------


def _draw_failures(results: Results, plt: Any) -> Any:
    """Draw the share of the seeds under failures that end within 5 % of the seed's best method."""
    shares = best_shares(results)
    names = sorted(shares, key=lambda name: (shares[name][0], -shares[name][1]))
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.34 * len(names)), dpi=150)
    for height, method in enumerate(names):
        share, quality, count = shares[method]
        axes.barh(height, share, color=colour_of(method), height=0.62)
        label = f"{round(share * count)} of {count}; median loss {quality:.2f}"
        axes.text(share + 0.01, height, label, va="center", fontsize=8.5, color="#333333")
    axes.set_yticks(range(len(names)), names, fontsize=9)
    for label in axes.get_yticklabels():
        label.set_color(colour_of(label.get_text()))
    axes.set_xlim(0, 1.32)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_title("runs under failures that end within 5 % of the best method", loc="left", fontsize=11)
    _tidy(axes, "x")
    figure.tight_layout()
    return figure


def _tidy(axes: Any, grid: str) -> None:
    axes.grid(True, axis=grid, color="#dddddd", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
