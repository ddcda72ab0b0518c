"""Draws the averaging rounds of a job, for its report."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

import numpy as np
import plotly.graph_objects as go

from asyncdist.report.averages import Average
from asyncdist.report.figures.drawing import (
    RANK_COUNT_MAX,
    ROUND_COUNT_MAX,
    evenly,
    named_ranks,
    new_figure,
    times,
)
from asyncdist.report.summary import Summary
from asyncdist.wording import seconds_in_words, size_in_words


def average_sections(summary: Summary) -> Iterator[tuple[str, str, go.Figure | str | None]]:
    """Yield title, note and figure of each report section on averages, if a policy averages contributions."""
    if not summary.averages.ranks:
        return
    for place in sorted(summary.averages.populations):
        rounds = summary.averages.rounds(place)
        name = summary.populations[place].name if place < len(summary.populations) else ""
        whose = f" of {name}" if name and len(summary.populations) > 1 else ""
        if rounds:
            yield f"Rounds of averaging{whose}", *_rounds(rounds)
            yield f"Mean changes{whose}", *_changes(rounds)
    yield "Contributions and waits", *_table(summary)


def _rounds(rounds: Sequence[Average]) -> tuple[str, go.Figure]:
    shown = [each for each in evenly(rounds, ROUND_COUNT_MAX) if each.contribution_count]
    figure = new_figure(420, "seconds since the job began", "milliseconds since the first contribution")
    texts = [_text_of(each) for each in shown]
    first = np.array([each.first_s for each in shown])
    for name, field in (("last contribution", "last_s"), ("last rank applied", "applied_s")):
        took = 1e3 * (np.array([getattr(each, field) for each in shown], dtype=float) - first)
        figure.add_scattergl(x=times(first), y=took.astype(np.float32), mode="markers", name=name, text=texts)
    waited = 1e3 * np.array([each.waited_s if each.applied_count else math.nan for each in shown])
    figure.add_scattergl(x=times(first), y=waited.astype(np.float32), mode="markers", name="longest wait", text=texts)
    note = (
        "Each round is a column of points, at the time of its first contribution: when the last rank contributed, when"
        " the last rank applied the average, and the longest wait of a rank. A text shows the fragment, the ranks"
        f" and the last rank. {len(shown)} of {len(rounds)} rounds are shown. Look for high points of the last"
        " contribution: the other ranks waited for that rank. Look for waits without them: the exchange took the time."
    )
    return note, figure


def _text_of(each: Average) -> str:
    text = f"round {each.key.round}, fragment {each.fragment}: average of {named_ranks(each.donors)}"
    if each.gains:
        text += f" (gains {', '.join(f'{gain:.3g}' for gain in each.gains)})"
    if each.left_out:
        text += f", without {named_ranks(each.left_out)}"
    return f"{text}; last contribution from rank {each.last_rank}"


def _changes(rounds: Sequence[Average]) -> tuple[str, go.Figure | None]:
    told = [each for each in rounds if each.outer_norm is not None or each.cosine is not None]
    if not told:
        return "Weights were averaged, without an outer optimizer.", None
    shown = evenly(told, ROUND_COUNT_MAX)
    figure = new_figure(420, "seconds since the job began", "norm of the mean change")
    fragments = sorted({each.fragment for each in shown})
    for fragment in fragments:
        its = [each for each in shown if each.fragment == fragment]
        x, of = times([each.applied_s for each in its]), f", fragment {fragment}" if len(fragments) > 1 else ""
        for name, field, axis in (("norm", "outer_norm", "y"), ("cosine", "cosine", "y2")):
            with np.errstate(over="ignore"):  # values beyond float32 are not drawn
                y = np.array([_or_nan(getattr(each, field)) for each in its]).astype(np.float32)
            if np.isfinite(y).any():
                dash = "dot" if axis == "y2" else "solid"
                figure.add_scatter(x=x, y=y, mode="lines+markers", name=f"{name}{of}", yaxis=axis, line_dash=dash)
    figure.update_layout(
        yaxis2={"title": "mean cosine", "overlaying": "y", "side": "right", "range": [-1.05, 1.05], "dtick": 0.5}
    )
    figure.update_layout(margin_r=60)
    note = (
        "The norm of the mean change D, the outer optimizer's gradient, and the mean cosine between the changes of two"
        " ranks. Look for a norm that grows from round to round: the outer learning rate or momentum is too large. A"
        " cosine near 1 means that the ranks learn the same, near 0 that they learn different things, which is normal"
        " after many steps; a negative one, that they work against each other."
    )
    return note, figure


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _table(summary: Summary) -> tuple[str, str]:
    ranks = sorted(summary.averages.ranks)
    more = len(ranks) - RANK_COUNT_MAX
    if more > 0:
        by_wait = sorted(ranks, key=lambda rank: summary.averages.ranks[rank].waited_s)
        ranks = sorted((*by_wait[: RANK_COUNT_MAX // 2], *by_wait[-RANK_COUNT_MAX // 2 :]))
    heads = (
        "rank",
        "contributed",
        "left out",
        "last of all",
        "applied",
        "waited",
        "longest wait",
        "sent",
        "as float32",
    )
    rows = [f"<tr>{''.join(f'<th>{html.escape(head)}</th>' for head in heads)}</tr>"]
    for rank in ranks:
        own = summary.averages.ranks[rank]
        cells = (
            *(f"{rank}", f"{own.contribution_count:,}", f"{own.left_out_count:,}", f"{own.last_count:,}"),
            *(f"{own.applied_count:,}", f"{seconds_in_words(own.waited_s)}", f"{seconds_in_words(own.waited_max_s)}"),
            *(size_in_words(own.wire_nbytes), size_in_words(own.unencoded_nbytes)),
        )
        rows.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
    note = (
        "For each rank: the rounds to which it contributed, the rounds that left its contribution out, and the rounds "
        "in which it was the last. Then the averages that it applied, and the time for which it waited for them. "
        "Finally the size of its contributions, encoded and as float32. Look for a rank that is often the last and "
        "waits little: the other ranks wait for it."
    )
    if more > 0:
        note += f" {RANK_COUNT_MAX} ranks with the longest and the shortest waits are shown; {more} are not."
    return note, f"<table>{''.join(rows)}</table>"
