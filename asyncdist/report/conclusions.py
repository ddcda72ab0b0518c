"""Generates the sentences at the beginning of a report from the job's summary."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from asyncdist.report.slow_ranks import ranks_at_start, slow_ranks_in_words
from asyncdist.report.summary import Round, Summary
from asyncdist.wording import has_or_have, plural, ranks_in_words, seconds_in_words, size_in_words

#: A first step that ends later than this number of median step times is mentioned.
_LATE_START_STEPS: Final = 3.0
#: Maximum number of ranks, or of pairs of ranks, that a sentence names.
_COUNT_MAX: Final = 8
_REASON_COUNT_MAX: Final = 3


def conclusions(summary: Summary) -> list[str]:
    """Return sentences on how ranks ended, steps, metrics, rounds, the origin of the weights, and messages."""
    return [
        *_ends(summary),
        *_steps(summary),
        *_metrics(summary),
        *_rounds(summary),
        *_averages(summary),
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
        yield f"{ranks_at_start(ranks)} ended with {error}."
    others = [rank for ranks in list(failed.values())[_REASON_COUNT_MAX:] for rank in ranks]
    if others:
        yield f"{ranks_at_start(others)} ended with other errors."
    open_ended = [rank for rank, error in summary.ends.items() if error is None]
    if open_ended:
        have = has_or_have(open_ended)
        yield f"{ranks_at_start(open_ended)} {have} no end of main in the recording: killed, stopped, or still running."
    without = sorted(set(range(summary.size)) - summary.ends.keys())
    if without:
        yield f"{ranks_at_start(without)} wrote no recording."


def _steps(summary: Summary) -> Iterator[str]:
    medians = {rank: each.intervals.middle() for rank, each in enumerate(summary.ranks) if each.intervals.count}
    if not medians:
        yield "No policy made two steps."
        return
    typical_s = statistics.median_low(medians.values())
    typical = seconds_in_words(typical_s)
    slow = slow_ranks_in_words(medians)
    if slow is not None:
        yield slow
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
        if summary.applied and not summary.averages.ranks:
            yield f"{len(summary.applied):,} averages were taken; the policy has no rounds."
        return
    count = len(summary.rounds)
    whole = [each for each in summary.rounds if each.replacers and each.applied_count >= len(each.replacers)]
    idle = sum(not each.replacers for each in summary.rounds)
    rounds = plural(count, "round")
    text = f"{len(whole):,} of {rounds} {'was' if count == 1 else 'were'} applied by all ranks that they replaced"
    text += f", with {plural(summary.replacement_count, 'replacement')} in total"
    text += f"; {idle:,} replaced no rank" if idle else ""
    yield f"{text}."
    left = [each for each in summary.rounds if each.replacers and each.applied_count < len(each.replacers)]
    if left:
        yield f"Not applied by all: {_reasons(left)}."


def _averages(summary: Summary) -> Iterator[str]:
    rounds, ranks = summary.averages.rounds(), summary.averages.ranks
    if not rounds:
        return
    fragment_count = len({each.fragment for each in rounds})
    of = f" of {fragment_count} fragments" if fragment_count > 1 else ""
    applied_count = sum(each.applied_count for each in rounds)
    text = f"{plural(len(rounds), 'round')}{of} {'was' if len(rounds) == 1 else 'were'} averaged"
    yield f"{text}, and {plural(applied_count, 'average')} applied."
    left_out = {rank: each.left_out_count for rank, each in sorted(ranks.items()) if each.left_out_count}
    if left_out:
        yield f"Contributions that were not averaged: {_by_rank(left_out)}."
    joint = [each for each in rounds if each.contribution_count > 1]
    if joint:
        last = max(ranks, key=lambda rank: ranks[rank].last_count)
        longest = max(joint, key=lambda each: each.late_s)
        median_s = statistics.median(each.late_s for each in joint)
        yield (
            f"The last contribution to a round came {seconds_in_words(median_s)} after the first in the median, at "
            f"most {seconds_in_words(longest.late_s)} (round {longest.key.round}, rank {longest.last_rank})."
            f" Rank {last} was the last in {ranks[last].last_count:,} of {plural(len(joint), 'round')}."
        )
    yield from _waits(summary)
    yield from _contributions(summary)


def _waits(summary: Summary) -> Iterator[str]:
    waited = {rank: each.waited_s for rank, each in summary.averages.ranks.items() if each.applied_count}
    if not waited or not summary.duration_s:
        return
    share = sum(waited.values()) / len(waited) / summary.duration_s
    least, most = min(waited, key=waited.__getitem__), max(waited, key=waited.__getitem__)
    text = f"Ranks waited for averages for {share:.1%} of the time"
    if least != most:
        shortest, longest = seconds_in_words(waited[least]), seconds_in_words(waited[most])
        text += f": rank {most} the longest, {longest}, and rank {least} the shortest, {shortest}"
    yield f"{text}."
    ages = max(each.staleness_steps for each in summary.averages.rounds())
    versions = max(each.staleness_versions for each in summary.averages.rounds())
    if ages:
        old = f", and up to {plural(versions, 'version')} old" if versions else ""
        yield f"Averages were applied up to {plural(ages, 'step')} after the contribution was captured{old}."


def _contributions(summary: Summary) -> Iterator[str]:
    ranks = summary.averages.ranks.values()
    wire, whole = sum(each.wire_nbytes for each in ranks), sum(each.unencoded_nbytes for each in ranks)
    if wire and wire != whole:
        share = f", {wire / whole:.1%} of {size_in_words(whole)}" if whole else ""
        yield f"The contributions had {size_in_words(wire)} when encoded{share}."
    elif wire:
        yield f"The contributions had {size_in_words(wire)}, and were not encoded."
    told = [each for each in summary.averages.rounds() if each.outer_norm is not None]
    if len(told) > 1:
        first, last = told[0], told[-1]
        text = f"The norm of the mean change went from {first.outer_norm:.3g} to {last.outer_norm:.3g}"
        angles = [each.cosine for each in told if each.cosine is not None]
        if angles:
            text += f", and the mean cosine between the changes of two ranks from {angles[0]:.2f} to {angles[-1]:.2f}"
        yield f"{text}."


def _by_rank(counts: Mapping[int, int]) -> str:
    told = [f"{count:,} of rank {rank}" for rank, count in sorted(counts.items(), key=lambda item: -item[1])]
    more = len(told) - _COUNT_MAX
    return ", ".join(told[:_COUNT_MAX]) + (f" and those of {plural(more, 'more rank')}" if more > 0 else "")


def _reasons(rounds: Sequence[Round]) -> str:
    counts = Counter(each.reason or "no end in the recording" for each in rounds)
    told = [f"{count:,} ({reason})" for reason, count in counts.most_common(_REASON_COUNT_MAX)]
    more = len(counts) - len(told)
    return ", ".join(told) + (f" and {plural(more, 'more reason')}" if more else "")


def _lineage(summary: Summary) -> Iterator[str]:
    for place, population in enumerate(summary.populations):
        is_averaged = place in summary.averages.populations  # all ranks of the population begin with the same weights
        if is_averaged or not any(each.population == place for each in summary.applied):
            continue
        shares = population.shares.astype("float64").mean(axis=0)
        most = int(shares.argmax())
        whose = f" of {population.name}" if len(summary.populations) > 1 and population.name else ""
        yield (
            f"The last weights{whose} descend from {1 / float((shares**2).sum()):.1f} of {summary.size} ranks, most of"
            f" them from rank {most}, {shares[most]:.0%}."
        )


def _messages(summary: Summary) -> Iterator[str]:
    lost = summary.messages.lost(summary.ends)
    if not lost:
        yield f"{summary.message_count:,} messages were sent; no message of the program's channels was lost."
        return
    total = sum(count for count, _ in lost)
    named = [
        f"{count:,} from rank {source} to rank {dest} on tag {tag}" for count, (source, dest, tag) in lost[:_COUNT_MAX]
    ]
    yield f"{plural(total, 'message')} of the program's channels never arrived: {', '.join(named)}."
