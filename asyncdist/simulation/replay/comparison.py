"""Compares what a replayed rank does with what it did, and says in words what differs."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncdist import tags
from asyncdist.errors import AsyncdistError, RankLostError
from asyncdist.recording.events import KINDS, Event, Field, whole
from asyncdist.simulation.replay.log import DECISIONS, FAILED, Fired, Left, Lost, Passed, RankLog, Sight, Taken

#: Fields of a decision that a replay need not repeat.
_NOT_REPEATED = frozenset({"seconds", "turn", "woken"})
_TAGS = {tags.METRIC: "metric", tags.CONTROL: "control", tags.REPLAY: "replay", tags.PARAM: "stream control"}


class DivergenceError(AsyncdistError):
    """A replay does something else than the recorded run: the text names rank and event."""


class Comparison:
    """Keeps what a rank did in the recorded run, and compares with it what it does now.

    Args:
        rank: the rank.
        log: what it did.
        found: differences are added to it.

    Attributes:
        iteration: the last one in which a policy's step ended; -1 before the first.
    """

    def __init__(self, rank: int, log: RankLog, found: list[DivergenceError]) -> None:
        self.iteration = -1
        self._rank = rank
        self._log = log
        self._found = found
        self._other_order = ""

    def note_other_order(self, nbytes: int) -> None:
        """Note that what follows may differ: numbers were added in another order than then."""
        self._other_order = (
            f"; MPI has added or multiplied {nbytes} bytes of floating numbers in an order of its own before, which is"
            " not repeated"
        )

    def on_event(self, time_s: float, kind: str, fields: tuple[Field, ...], has_stopped: bool) -> None:
        """Compare one event; ``has_stopped`` says whether main has ended. Raises DivergenceError."""
        if kind == "step":
            self.iteration = whole(fields[1])
        if kind not in DECISIONS or self._found:
            return
        event = Event(time_s, kind, fields)
        decisions = self._log.decisions[kind]
        if not decisions:
            if self._log.is_over and not has_stopped:  # what comes after main's end may differ: it decides nothing
                raise self.divergence(f"no more {kind} was recorded, and now there is [{event}]")
            return
        expected = decisions.popleft()
        if _essence(expected) != _essence(event):
            raise self.divergence(f"recorded was [{expected}], and now there is [{event}]")

    def on_end(self, error: BaseException | None) -> None:
        """Compare how main ended."""
        if isinstance(error, asyncio.CancelledError):
            return
        now, recorded = "" if error is None else type(error).__name__, self._log.error.partition(":")[0]
        came_late = recorded == RankLostError.__name__ and not now  # it failed elsewhere as this main returned
        if self._log.is_over and not self._found and now != recorded and not came_late:
            told = now if error is None else f"{now}: {error}".partition("\n")[0]
            self.divergence(f"its main ended with [{self._log.error}], and now with [{told[:300]}]")

    def where(self) -> str:
        """Return how far the rank has come, in words."""
        return f"after iteration {self.iteration}" if self.iteration >= 0 else "before its first step"

    def divergence(self, what: str) -> DivergenceError:
        """Return an error that says where the rank is, and add it to those that were found."""
        error = DivergenceError(f"rank {self._rank}, {self.where()}: {what}{self._other_order}", rank=self._rank)
        self._found.append(error)
        return error


def in_words(sight: Sight | None) -> str:
    """Say what came next in the recorded run, and that it does not come now; None stands for a safe point."""
    match sight:
        case Taken(keys=keys):
            ranks = sorted({rank for rank, _ in keys})
            names = ", ".join(dict.fromkeys(_name_of(tag) for _, tag in keys))
            whose = f"of rank {ranks[0]}" if len(ranks) == 1 else f"of ranks {', '.join(map(str, ranks))}"
            what = f"a message {whose} on" if len(keys) == 1 else f"{len(keys)} messages {whose} on"
            return f"in the recorded run {what} {names} came next; now none comes"
        case Passed(what=what):
            return f"in the recorded run the time for {str(what)!r} was over next; now nothing waits for that"
        case Fired(what=what):
            return f"in the recorded run the timer for {str(what)!r} was over next; now there is none"
        case Left(what=what):
            verb = "failed" if what == FAILED else "ended"
            return f"in the recorded run a collective {verb} next; now none does"
        case Lost(rank=rank):
            return f"in the recorded run the loss of rank {rank} came next; now it does not"
        case _:
            return "in the recorded run its next step came next; now it waits for something else"


def _name_of(tag: int) -> str:
    return f"the tag {_TAGS[tag]!r}" if tag in _TAGS else f"tag {tag}"


def _essence(event: Event) -> tuple[str, list[Any]]:
    """Return what a replay must repeat of an event: all but its place and how long it took. A NaN repeats a NaN."""
    named = zip(KINDS[event.kind], event.fields, strict=False)
    plain = ((name, list(field) if isinstance(field, (tuple, list)) else field) for name, field in named)
    return event.kind, [field if field == field else "nan" for name, field in plain if name not in _NOT_REPEATED]
