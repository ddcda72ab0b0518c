"""Describes which ranks are slow, for reports and for the live page."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from typing import Final

from asyncdist.wording import ranks_in_words, seconds_in_words

#: A rank is slow if its step time is more than this multiple of the median step time.
SLOW_FACTOR: Final = 1.25
#: Maximum number of spans of ranks that a sentence names.
_SPAN_COUNT_MAX: Final = 8


def slow_ranks_in_words(step_s: Mapping[int, float]) -> str | None:
    """Return a sentence that names the slow ranks, or None if there are none. ``step_s`` maps ranks to step times."""
    typical_s = statistics.median_low(step_s.values()) if step_s else 0.0
    slow = {rank: each_s / typical_s for rank, each_s in step_s.items() if each_s > SLOW_FACTOR * typical_s > 0}
    if not slow:
        return None
    least, most = min(slow.values()), max(slow.values())
    factor = f"{most:.1f}" if most - least < 0.05 else f"{least:.1f} to {most:.1f}"
    typical = seconds_in_words(typical_s)
    return f"{ranks_at_start(slow)} took {factor} times as long per step as the other ranks ({typical})."


def ranks_at_start(ranks: Collection[int]) -> str:
    """Return the names of ranks, capitalised for the start of a sentence."""
    named = ranks_in_words(ranks, span_count_max=_SPAN_COUNT_MAX)
    return named[0].upper() + named[1:]
