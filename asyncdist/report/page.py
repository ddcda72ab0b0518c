"""Renders the report of a job as one HTML page that loads nothing from the network."""

from __future__ import annotations

import html
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from asyncdist.recording.reader import Recording
from asyncdist.report.conclusions import conclusions
from asyncdist.report.figures import (
    ROUND_COUNT_MAX,
    average_sections,
    evenly,
    hyperparameter_sections,
    name_ranks,
    named_ranks,
    new_figure,
    scale,
    times,
)
from asyncdist.report.summary import Round, Summary, summarise
from asyncdist.wording import plural, ranks_in_words, size_in_words

#: Maximum number of ranks for which each rank has its own line. For more ranks, quantiles are drawn.
LINE_COUNT_MAX: Final = 64
#: Maximum number of replacements of weights to draw, evenly spaced.
MARK_COUNT_MAX: Final = 1500
#: Number of columns of the heat maps over time.
COLUMN_COUNT: Final = 200
#: Quantiles of the metric. The axis covers the values between the outer two.
_SCALE_QUANTILES: Final = (0.02, 0.25, 0.75, 0.98)
#: Maximum number of interquartile ranges by which the metric axis extends beyond the quartiles.
_SCALE_SPREADS: Final = 8.0
#: Factor by which the metric axis may become longer in order to show all values.
_SCALE_FACTOR: Final = 2.0
_QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)
#: Minimum range of a heat map's colours, as a fraction of the step time, because ranks always differ slightly.
_NOISE: Final = 0.05
#: Maximum number of losses, failovers and errors that are listed.
_NEWS_COUNT_MAX: Final = 200

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #1c1e21; }}
h1 {{ font-size: 1.6em; }} h2 {{ font-size: 1.2em; margin: 2em 0 0.2em; }} p {{ margin: 0.2em 0 0.6em; color: #555; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 0.15em 0.8em 0.15em 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }}
th {{ white-space: nowrap; }} .conclusions {{ padding-left: 1.2em; }} .conclusions li {{ margin: 0.3em 0; }}
.figure {{ width: 100%; overflow: hidden; }}
</style>
<script>{plotly}</script></head><body>
<h1>{title}</h1>
{body}
<script>{drawing}</script></body></html>
"""
#: Script that draws a figure when the reader scrolls near it, because drawing all figures at once takes seconds.
_DRAWING: Final = """
const figures = new Set(document.querySelectorAll(".figure"));
const draw = (place) => {
  if (!figures.delete(place)) return;
  const figure = JSON.parse(place.firstElementChild.textContent);
  Plotly.newPlot(place, figure.data, figure.layout, {displaylogo: false, responsive: true});
};
const drawAll = () => figures.forEach(draw);
if ("IntersectionObserver" in window) {
  const look = (entries) => entries.forEach((entry) => entry.isIntersecting && draw(entry.target));
  const observer = new IntersectionObserver(look, {rootMargin: "400px"});
  figures.forEach((place) => observer.observe(place));
  window.addEventListener("beforeprint", drawAll);
} else {
  drawAll();
}
"""


@np.errstate(over="ignore", invalid="ignore")  # plots use float32, in which a large metric is infinite
def render(recording: Recording) -> str:
    """Return the HTML page of a recording."""
    summary = summarise(recording)
    sections = []
    for title, note, figure in _sections(summary, recording.ranks[0].header.transport.startswith("sim")):
        sections.append(f"<h2>{html.escape(title)}</h2>\n<p>{html.escape(note)}</p>")
        if isinstance(figure, str):
            sections.append(figure)
        elif figure is not None:
            data = str(figure.to_json()).replace("<", "\\u003c")  # "<" might end the script or begin a comment
            drawn = f'<script type="application/json">{data}</script>'
            sections.append(f'<div class="figure" style="height: {figure.layout.height}px">{drawn}</div>')
    body = "\n".join([_conclusions(summary), _facts(recording, summary), *sections, _notable_events(summary)])
    return _PAGE.format(title=f"Job {html.escape(recording.job)}", plotly=get_plotlyjs(), body=body, drawing=_DRAWING)


def _conclusions(summary: Summary) -> str:
    lines = "\n".join(f"<li>{html.escape(line)}</li>" for line in conclusions(summary))
    return f'<ul class="conclusions">\n{lines}\n</ul>'


def _facts(recording: Recording, summary: Summary) -> str:
    header = recording.ranks[0].header
    steps = sum(rank.step_seconds.count for rank in summary.ranks)
    hosts = sorted({each.header.hostname for each in recording.ranks})
    facts = [
        ("script", " ".join([header.script, *header.arguments]) or "none"),
        ("began", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.began_at_s))),
        ("duration", f"{summary.duration_s:.3f} s"),
        ("ranks", f"{recording.size} on {', '.join(hosts[:8])}{' ...' if len(hosts) > 8 else ''}"),
        ("transport", header.transport),
        ("steps", f"{steps:,} on all ranks"),
        *_facts_of_rounds(summary),
        ("messages", f"{size_in_words(summary.nbytes.sum())}; data shared in a host's memory is not counted"),
    ]
    if recording.missing:
        facts.append(("no recording of", ranks_in_words(recording.missing)))
    facts += [("damaged", f"{each.path.name}: {each.damage}") for each in recording.ranks if each.damage]
    rows = "\n".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts)
    return f"<table>{rows}</table>"


def _facts_of_rounds(summary: Summary) -> Iterator[tuple[str, str]]:
    averages = summary.averages.rounds()
    of_averages = sum(each.applied_count for each in averages)
    if summary.rounds or not averages:
        yield "rounds", f"{len(summary.rounds):,}, with {plural(summary.replacement_count, 'replacement')}"
    if averages:
        yield "rounds of averaging", f"{len(averages):,}, with {of_averages:,} averages applied"


def _sections(summary: Summary, is_simulated: bool) -> Iterator[tuple[str, str, go.Figure | str | None]]:
    """Yield title, note and figure of each section. The figure may be an HTML table.

    The figure is None if there is no data, because plotly would draw invented axes.
    """
    yield from _of_populations(summary)
    if summary.rounds or not summary.averages.ranks:
        yield "Rounds", *_rounds(summary)
    yield from average_sections(summary)
    yield from hyperparameter_sections(summary)
    yield "Step times", *_step_times(summary, is_simulated)
    what = "Mean seconds between two steps. Look for a bright row, a slow rank, and for bright columns: at those times,"
    yield "Step times over time", *_over_time(summary, "interval_bins", f"{what} all ranks waited.")
    did = "contributed to a round" if summary.averages.ranks else "reached an iteration"
    what = f"Mean seconds by which a rank {did} after the first rank. Look for a row that gets brighter:"
    yield (
        "Stragglers",
        *_over_time(summary, "lag_bins", f"{what} that this rank falls further and further behind."),
    )
    yield "Bytes between ranks", *_bytes(summary)


def _of_populations(summary: Summary) -> Iterator[tuple[str, str, go.Figure | None]]:
    """Yield each population's figures of its metric and of its weights' origin. Populations never exchange weights."""
    if len(summary.populations) < 2:
        whose = [(0, "")]
    else:
        named = [each.name for each in summary.populations]
        whose = [
            (place, f" of {name}{f' #{named[:place].count(name) + 1}' if name in named[:place] else ''}")
            for place, name in enumerate(named)
        ]
    for place, name in whose:
        yield f"Metric{name}", *_metric(summary, place)
        if place not in summary.averages.populations:  # otherwise, all ranks begin with equal weights
            yield f"Ancestry of the weights{f',{name}' if name else ''}", *_lineage(summary, place)


def _metric(summary: Summary, place: int) -> tuple[str, go.Figure | None]:
    metrics = [metric for population in summary.populations[place : place + 1] for metric in population.metrics]
    if not any(metric.count for metric in metrics):
        return "No rank reported a metric.", None
    figure = new_figure(420, "seconds since the job began", "metric")
    series = [np.array(metric.rows(), dtype=float).reshape(-1, 2) for metric in metrics]
    if summary.size <= LINE_COUNT_MAX:
        for rank, rows in enumerate(series):
            figure.add_scattergl(
                x=times(rows[:, 0]), y=rows[:, 1].astype(np.float32), mode="lines", name=f"rank {rank}", line_width=1
            )
        note = (
            "One line for each rank. A circle is a replacement: the rank took the weights of other ranks. Look for a"
            " rank that stays away from the others although it is replaced. A circle at the bottom is a rank whose"
            " metric was not a finite number."
        )
    else:
        columns = np.linspace(0, summary.duration_s, COLUMN_COUNT)
        values = np.array([_latest_values(rows, columns) for rows in series])
        for name, row in zip(
            ("minimum", "lower quartile", "median", "upper quartile", "maximum"), _spread(values), strict=True
        ):
            figure.add_scatter(x=times(columns), y=row.astype(np.float32), mode="lines", name=name)
        note = (
            f"The minimum, quartiles and maximum of {summary.size} ranks. A circle is a replacement. Look for a"
            " minimum or maximum that leaves the quartiles: one or a few ranks differ from the others."
        )
    marks = evenly([each for each in summary.applied if each.population == place], MARK_COUNT_MAX)
    heights = np.array([_latest_values(series[each.rank], np.array([each.time_s]))[0] for each in marks])
    finite = np.concatenate([rows[:, 1] for rows in series])
    finite = finite[np.isfinite(finite)]
    heights[~np.isfinite(heights)] = finite.min() if len(finite) else 0.0
    texts = [f"rank {each.rank}, round {each.round}: {named_ranks(each.donors)}" for each in marks]
    figure.add_scattergl(
        x=times(np.array([each.time_s for each in marks])),
        y=heights.astype(np.float32),
        mode="markers",
        name="replaced",
        text=texts,
        marker={"size": 5, "color": "black", "symbol": "circle-open"},
    )
    note += _set_metric_range(figure, series, summary)
    thinned = any(metric.count > len(rows) for metric, rows in zip(metrics, series, strict=True))
    return note + (" Long series are thinned: every n-th value is drawn." if thinned else ""), figure


def _set_metric_range(figure: go.Figure, series: Sequence[Any], summary: Summary) -> str:
    """Limit the metric axis to exclude rare outliers. Return a sentence about this, or an empty string."""
    if math.isfinite(summary.first_step_s) and summary.first_step_s > 0.03 * summary.duration_s:
        figure.add_vrect(x0=0, x1=summary.first_step_s, fillcolor="#eee", line_width=0, layer="below")
        started = f" The grey part, {summary.first_step_s:.3g} s, is the time before the first step of any rank."
    else:
        started = ""
    columns = np.linspace(0, summary.duration_s, 4 * COLUMN_COUNT)
    values = np.concatenate([_latest_values(rows, columns) for rows in series])
    values = values[np.isfinite(values)]
    if not len(values):
        return started
    low, quarter, three_quarters, high = np.quantile(values, _SCALE_QUANTILES)
    spread = three_quarters - quarter
    low, high = max(low, quarter - _SCALE_SPREADS * spread), min(high, three_quarters + _SCALE_SPREADS * spread)
    everything = [rows[:, 1][np.isfinite(rows[:, 1])] for rows in series]
    least, most = min(row.min() for row in everything if len(row)), max(row.max() for row in everything if len(row))
    margin = 0.08 * (high - low)
    if not 0 < _SCALE_FACTOR * (high - low) < most - least:
        return started
    figure.update_yaxes(range=[max(low - margin, least - margin), min(high + margin, most + margin)])
    return (
        f"{started} The scale leaves out rare values; all values lie between {least:.3g} and {most:.3g}. A double click"
        " shows all."
    )


def _spread(values: Any) -> Any:
    with warnings.catch_warnings():
        # numpy warns about columns without values, which are before the first value of any rank.
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanquantile(values, (0.0, 0.25, 0.5, 0.75, 1.0), axis=0)


def _latest_values(rows: Any, times: Any) -> Any:
    """Return the latest value in ``rows`` at each of ``times``, or NaN before the first value."""
    if not len(rows):
        return np.full(len(times), np.nan)
    places = np.searchsorted(rows[:, 0], times, side="right") - 1
    return np.where(places >= 0, rows[np.maximum(places, 0), 1], np.nan)


def _lineage(summary: Summary, place: int) -> tuple[str, go.Figure | None]:
    if not any(each.population == place for each in summary.applied):
        return "No weights were replaced.", None
    shares = summary.populations[place].shares
    figure = new_figure(460, "rank at the start", "rank at the end")
    figure.add_heatmap(z=shares, zmin=0, zmax=float(shares.max()), colorscale="Viridis", colorbar=scale("share"))
    figure.update_yaxes(autorange="reversed")
    name_ranks(figure, summary.size, "xy")
    mean = shares.astype(np.float64).mean(axis=0)
    effective = 1 / float(np.square(mean).sum())
    note = (
        "Each row is a rank at the end, each column a rank at the start. The brighter a field, the larger the share of"
        " the row's last weights that descends from the column's first weights; training itself does not count."
        " Look for a column that is bright in all rows: all ranks descend from that rank. A bright diagonal"
        f" means that ranks exchanged few weights. This population descends from {effective:.1f} ranks (1 / the sum of"
        " squared shares)."
    )
    return note, figure


def _rounds(summary: Summary) -> tuple[str, go.Figure | None]:
    if not summary.rounds:
        return "No round was decided.", None
    figure = new_figure(420, "seconds since the job began", "milliseconds since the decision")
    shown: list[Round] = evenly(summary.rounds, ROUND_COUNT_MAX)
    texts = [
        f"round {each.number[-1]}: {named_ranks(each.donors)} gave to {named_ranks(each.replacers)}, {each.route}; "
        f"{each.reason}"
        for each in shown
    ]
    began = np.array([each.began_s for each in shown])
    for name, field in (("donors fixed", "frozen_s"), ("last replacer applied", "applied_s"), ("ended", "ended_s")):
        took = 1e3 * (np.array([getattr(each, field) for each in shown], dtype=float) - began)
        figure.add_scattergl(x=times(began), y=took.astype(np.float32), mode="markers", name=name, text=texts)
    note = (
        "Each round is a column of three points, at the time of its decision: when its donors were fixed, when the last"
        " replaced rank applied the average, and when the round ended."
        f" {len(shown)} of {len(summary.rounds)} rounds are shown. Look for points that rise: rounds wait for a rank"
        " that has become slower. Look for columns that lack a point: that part of the round did not happen."
    )
    return note, figure


def _step_times(summary: Summary, is_simulated: bool) -> tuple[str, go.Figure | None]:
    if not any(rank.intervals.count for rank in summary.ranks):
        return "No policy has made two steps.", None
    figure = new_figure(420, "rank", "milliseconds")
    ranks = np.arange(summary.size)
    for fraction in _QUANTILES:
        values = [1e3 * rank.intervals.quantile(fraction) for rank in summary.ranks]
        name = f"{fraction:.0%} of steps are below"
        figure.add_scatter(x=ranks, y=np.array(values, dtype=np.float32), mode="markers+lines", name=name)
    own = [1e6 * rank.step_seconds.quantile(0.5) for rank in summary.ranks]
    known = [value for value in own if not math.isnan(value)]
    told = f" policy.step itself took {np.median(known):.0f} us in the median." if known and not is_simulated else ""
    figure.update_yaxes(type="log")
    name_ranks(figure, summary.size, "x")
    note = (
        "Time from the end of one step to the end of the next. Look for a rank whose points lie above the others:"
        f" it is slow. Look for points that are far apart: the rank's steps vary much.{told}"
    )
    return note, figure


def _over_time(summary: Summary, bins: str, what: str) -> tuple[str, go.Figure | None]:
    figure, columns = new_figure(420, "seconds since the job began", "rank"), COLUMN_COUNT
    series = [getattr(rank, bins) for rank in summary.ranks]
    begin_s = min((each.first_s for each in series if each.first_s < summary.duration_s), default=0.0)
    values = np.array([each.means(begin_s, summary.duration_s, columns) for each in series])
    middles = begin_s + (np.arange(columns) + 0.5) * (summary.duration_s - begin_s) / columns
    for row in values:  # each value is shown until the next
        known = np.flatnonzero(np.isfinite(row))
        if len(known):
            filled = np.maximum.accumulate(np.where(np.isfinite(row), np.arange(columns), -1))
            held = (filled >= 0) & (np.arange(columns) <= known[-1])
            row[held] = row[filled[held]]
    if not np.isfinite(values).any():
        return "The recording has no steps to compare.", None
    highest = float(np.nanquantile(values, 0.99)) or float(np.nanmax(values)) or 1.0
    steps_s = [rank.intervals.quantile(0.5) for rank in summary.ranks if rank.intervals.count]
    highest = max(highest, _NOISE * min(steps_s, default=0.0))
    figure.add_heatmap(
        x=times(middles),
        z=values.astype(np.float32),
        zmin=0,
        zmax=highest,
        colorscale="Magma",
        colorbar=scale("seconds"),
    )
    figure.update_yaxes(autorange="reversed")  # rank 0 is on top, as in the other heat maps
    name_ranks(figure, summary.size, "y")
    return f"{what} There are {columns} columns; the brightest 1 % of the fields have the same colour.", figure


def _bytes(summary: Summary) -> tuple[str, go.Figure | None]:
    if not summary.nbytes.any():
        return "No messages were sent.", None
    figure = new_figure(460, "to rank", "from rank")
    with np.errstate(divide="ignore"):
        exponents = np.log2(summary.nbytes)
    exponents[~np.isfinite(exponents)] = np.nan
    least, most = np.nanmin(exponents), np.nanmax(exponents)
    apart = 0.05 * (most - least)  # distance at which two labels do not overlap
    # Axis labels are at 32 bytes, 1 KiB, 32 KiB, and so on.
    inner = (power for power in np.arange(math.ceil(least), most) if power % 5 == 0)
    powers = [least, *(power for power in inner if least + apart < power < most - apart), most]
    are_named = summary.size <= LINE_COUNT_MAX
    figure.add_heatmap(
        z=exponents.astype(np.float32),
        text=[[size_in_words(nbytes) for nbytes in row] for row in summary.nbytes] if are_named else None,
        hovertemplate="from %{y} to %{x}: %{text}<extra></extra>" if are_named else None,
        colorscale="Viridis",
        colorbar=scale("bytes", tickvals=powers, ticktext=[size_in_words(2.0**power) for power in powers]),
    )
    figure.update_yaxes(autorange="reversed")
    name_ranks(figure, summary.size, "xy")
    note = (
        "All messages, including those for coordination. Look for a bright row or column: that rank sends or receives"
        " much more than the others, as the coordinator of a large population does."
    )
    return note, figure


def _notable_events(summary: Summary) -> str:
    title = "<h2>Losses, failovers and errors</h2>"
    if not summary.news:
        return f"{title}\n<p>None.</p>"
    shown = summary.news[:_NEWS_COUNT_MAX]
    rows = "\n".join(
        f"<tr><td>{time_s:.3f} s</td><td>rank {rank}</td><td>{html.escape(text)}</td></tr>"
        for time_s, rank, text in shown
    )
    more = f"<p>and {len(summary.news) - len(shown)} more</p>" if len(summary.news) > len(shown) else ""
    return f"{title}\n<table><tr><th>time</th><th>reported by</th><th>event</th></tr>{rows}</table>{more}"
