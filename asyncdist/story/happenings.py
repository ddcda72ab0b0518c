"""Describes the events that show a rank's progress, without frequent events (steps, metrics and messages)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from asyncdist.recording.events import Event
from asyncdist.wording import ranks_in_words, seconds_in_words

#: Beginning of a recorded report that was made before the job was aborted.
ABORT: Final = "the job is aborted"


_WORDS: Final[Mapping[str, Callable[[Event], str]]] = {
    "policy": lambda event: f"entered {event.get('class_name')}",
    "applied": lambda event: f"took the average of {ranks_in_words(event.get('donors'))}, round {event.get('round')}",
    "contributed": lambda event: f"contributed to round {event.get('round')}",
    "joined": lambda event: f"began with the state of rank {event.get('donor')}, at step {event.get('iteration')}",
    "abandoned": lambda event: f"round {event.get('round')} was abandoned: {event.get('reason')}",
    "decided": lambda event: (
        f"decided round {event.get('round')}: {ranks_in_words(event.get('replacers') or ())} to be replaced"
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


def events_in_words(events: Sequence[Event], now: float, count_max: int) -> tuple[str, ...]:
    """Return descriptions of the latest events, with their ages, oldest first. ``now`` is on the events' clock."""
    told = [event for event in events if event.kind in _WORDS][-count_max:]
    return tuple(f"{_WORDS[event.kind](event)} {seconds_in_words(max(0.0, now - event.time_s))} ago" for event in told)
