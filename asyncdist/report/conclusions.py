"""Generates the sentences at the beginning of a report from the job's summary."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from asyncdist.report.summary import Round, Summary
from asyncdist.wording import plural, ranks_in_words, seconds_in_words

#: A rank is slow if its median step time exceeds the median over all ranks by this factor.
SLOW_FACTOR: Final = 1.25
#: The startup time is mentioned if the first step ends later than this number of median step times after the job began.
_LATE_START_STEPS: Final = 3.0
#: Maximum number of ranks, or of pairs of ranks, that a sentence names.
_COUNT_MAX: Final = 8
_REASON_COUNT_MAX: Final = 3


def conclusions(summary: Summary) -> list[str]:
    """Return sentences about how ranks ended, steps, metrics, rounds, the ancestry of the weights, and messages."""
    return [
        *_ends(summary),
        *_steps(summary),
        *_metrics(summary),
        *_rounds(summary),
        *_lineage(summary),
        *_messages(summary),
    ]


def _ends(summary: Summary) -> Iterator[str]:
    returned = [rank for rank, error in summary.ends.items() if error == ""]
    if len(returned) == summary.size:
        yield "Every rank returned from main."
    failed: dict[str, list[int]] = {}
    for rank, error in summary.ends.items():
        if error:
            failed.setdefault(error.partition("\n")[0].rstrip(": "), []).append(rank)
    for error, ranks in list(failed.items())[:_REASON_COUNT_MAX]:
        yield f"{_at_start(ranks)} ended with {error}."
    open_ended = [rank for rank, error in summary.ends.items() if error is None]
    if open_ended:
        have = "has" if len(open_ended) == 1 else "have"
        yield f"{_at_start(open_ended)} {have} no end of main in the recording: killed, stopped, or still running."
    without = sorted(set(range(summary.size)) - summary.ends.keys())
    if without:
        yield f"{_at_start(without)} wrote no recording."


def _steps(summary: Summary) -> Iterator[str]:
    medians = {rank: each.intervals.middle() for rank, each in enumerate(summary.ranks) if each.intervals.count}
    if not medians:
        yield "No policy made two steps."
        return
    typical_s = statistics.median_low(medians.values())
    typical = seconds_in_words(typical_s)
    slow = {rank: median / typical_s for rank, median in medians.items() if median > SLOW_FACTOR * typical_s > 0}
    if slow:
        least, most = min(slow.values()), max(slow.values())
        factor = f"{most:.1f}" if most - least < 0.05 else f"{least:.1f} to {most:.1f}"
        yield f"{_at_start(sorted(slow))} took {factor} times as long per step as the others, {typical} each."
    elif len(medians) > 1:
        yield f"No rank was slow: the median step took {typical}{_slowest(medians, typical_s)}."
    else:
        yield f"The median step took {typical}."
    if summary.first_step_s > max(_LATE_START_STEPS * typical_s, 1.0) and math.isfinite(summary.first_step_s):
        yield (
            f"The first step ended {seconds_in_words(summary.first_step_s)} after the first rank began: before it, the "
            "ranks connect, the program prepares its data and its model, and the policy starts."
        )


def _slowest(medians: Mapping[int, float], typical_s: float) -> str:
    rank = max(medians, key=medians.__getitem__)
    factor = medians[rank] / typical_s if typical_s else 1.0
    return f", {factor:.2f} times as long on rank {rank}" if factor >= 1.02 else " on each rank"


def _metrics(summary: Summary) -> Iterator[str]:
    for population in summary.populations:
        last = {rank: metric.last for rank, metric in enumerate(population.metrics) if metric.last is not None}
        if not last:
            continue
        whose = f" of {population.name}" if len(summary.populations) > 1 and population.name else ""
        finite = {rank: value for rank, (_, value) in last.items() if math.isfinite(value)}
        lacking = sorted(set(last) - set(finite))
        if lacking:
            named = ranks_in_words(lacking, span_count_max=_COUNT_MAX)
            yield f"The last metric{whose} of {named} was not a finite number."
        if finite:
            low, high = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
            text = f"{finite[low]:.4g} (rank {low})"
            if high != low:
                text = f"between {text} and {finite[high]:.4g} (rank {high})"
            kind = "finite metric" if lacking else "metric"
            yield f"The last {kind}{'s' * (high != low)}{whose} {'were' if high != low else 'was'} {text}."


def _rounds(summary: Summary) -> Iterator[str]:
    if not summary.rounds:
        if summary.applied:
            yield f"{len(summary.applied):,} averages were taken; the policy has no rounds."
        return
    count = len(summary.rounds)
    whole = [each for each in summary.rounds if each.replacers and each.applied_count >= len(each.replacers)]
    idle = sum(not each.replacers for each in summary.rounds)
    rounds = plural(count, "round")
    text = f"{len(whole):,} of {rounds} {'was' if count == 1 else 'were'} applied by all ranks that they replaced"
    text += f", with {len(summary.applied):,} replacements in total"
    text += f"; {idle:,} replaced no rank" if idle else ""
    yield f"{text}."
    left = [each for each in summary.rounds if each.replacers and each.applied_count < len(each.replacers)]
    if left:
        yield f"Not applied by all: {_reasons(left)}."


def _reasons(rounds: Sequence[Round]) -> str:
    counts = Counter(each.reason or "no end in the recording" for each in rounds)
    told = [f"{count:,} ({reason})" for reason, count in counts.most_common(_REASON_COUNT_MAX)]
    more = len(counts) - len(told)
    return ", ".join(told) + (f" and {more} more reasons" if more else "")


def _lineage(summary: Summary) -> Iterator[str]:
    for place, population in enumerate(summary.populations):
        if not any(each.population == place for each in summary.applied):
            continue
        shares = population.shares.astype("float64").mean(axis=0)
        most = int(shares.argmax())
        whose = f" of {population.name}" if len(summary.populations) > 1 and population.name else ""
        yield (
            f"The last weights{whose} descend from {1 / float((shares**2).sum()):.1f} of {summary.size} ranks, most of"
            f" them from rank {most}, {shares[most]:.0%}."
        )


def _messages(summary: Summary) -> Iterator[str]:
    lost = {line: count for line, count in summary.lost_messages().items() if count}
    if not lost:
        yield f"{summary.message_count:,} messages were sent; no message of the program's channels was lost."
        return
    total = sum(lost.values())
    named = [
        f"{count:,} from rank {source} to rank {dest} on tag {tag}"
        for (source, dest, tag), count in sorted(lost.items(), key=lambda item: -item[1])[:_COUNT_MAX]
    ]
    yield f"{plural(total, 'message')} of the program's channels never arrived: {', '.join(named)}."


def _at_start(ranks: Sequence[int]) -> str:
    """Return the names of ranks, capitalised for the start of a sentence."""
    named = ranks_in_words(ranks, span_count_max=_COUNT_MAX)
    return named[0].upper() + named[1:]
