"""Describes a rank's recorded events as text, except frequent ones (steps, metrics and messages)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from asyncdist.recording.events import Event
from asyncdist.wording import ranks_in_words, seconds_in_words

#: First words of a report that a rank records immediately before its job is aborted.
ABORT: Final = "the job is aborted"


def _named(before: str, ranks: Collection[int] | None, otherwise: str) -> str:
    return f"{before}{ranks_in_words(ranks)}" if ranks else otherwise


_TEXTS: Final[Mapping[str, Callable[[Event], str]]] = {
    "policy": lambda event: f"entered {event.get('class_name')}",
    "applied": lambda event: (
        f"took {_named('the average of ', event.get('donors'), 'an average')}, round {event.get('round')}"
    ),
    "contributed": lambda event: f"contributed to round {event.get('round')}",
    "joined": lambda event: f"began with the state of rank {event.get('donor')}, at step {event.get('iteration')}",
    "abandoned": lambda event: f"round {event.get('round')} was abandoned: {event.get('reason')}",
    "decided": lambda event: (
        f"decided round {event.get('round')}: {_named('', event.get('replacers'), 'no rank')} to be replaced"
    ),
    "ended": lambda event: f"round {event.get('round')} ended",
    "coordinator": lambda event: f"rank {event.get('rank')} coordinates from then on",
    "closed": lambda event: f"left its policy after {event.get('iteration')} steps",
    "lost": lambda event: f"lost rank {event.get('rank')}",
    "interrupted": lambda event: (
        f"was interrupted by a signal{f' (it waited for {waited})' if (waited := event.get('waited_for')) else ''}"
    ),
    "returned": lambda event: f"rank {event.get('rank')} joined",
}


def describe_events(events: Sequence[Event], now: float, count_max: int) -> tuple[str, ...]:
    """Describe the last ``count_max`` events and their ages, oldest first. ``now`` is a time on the events' clock."""
    known = [event for event in events if event.kind in _TEXTS][-count_max:]
    return tuple(f"{_TEXTS[event.kind](event)} {seconds_in_words(max(0.0, now - event.time_s))} ago" for event in known)
