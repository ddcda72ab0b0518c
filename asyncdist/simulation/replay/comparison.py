"""Compares a replayed rank's decisions (events that must repeat exactly) with its record, and describes differences."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from asyncdist import tags
from asyncdist.errors import AsyncdistError, RankLostError
from asyncdist.recording.events import KINDS, Event, Field, whole
from asyncdist.simulation.replay.log import (
    DECISIONS,
    FAILED,
    CollectiveEnd,
    DeadlineExpired,
    RankLog,
    RankLost,
    ReceivedMessages,
    RecordedInput,
    TimerFired,
)

#: Fields of a recorded decision that may differ in a replay.
_NOT_REPEATED = frozenset({"seconds", "waited_s", "turn", "woken"})
#: Kinds of events that a policy records when ``main`` leaves it.
_FINAL = frozenset({"weights", "closed"})
_TAGS = {tags.METRIC: "metric", tags.CONTROL: "control", tags.REPLAY: "replay", tags.PARAM: "stream control"}


class DivergenceError(AsyncdistError):
    """Raised if a replay differs from the recorded run. The message names the rank and the event."""


class Comparison:
    """Compares a replayed rank's decisions with its record, and removes each compared decision from the record.

    Attributes:
        iteration: Last iteration in which a policy's step ended; -1 before the first such step.
        deferred: Difference in the weights of a policy that ``main`` has left because of an exception, or None.
    """

    def __init__(self, rank: int, log: RankLog, found: list[DivergenceError]) -> None:
        self.iteration = -1
        self._rank = rank
        self._log = log
        self._found = found
        self.deferred: DivergenceError | None = None
        self._other_order = ""

    def note_other_order(self, nbytes: int) -> None:
        """Record that later numbers may differ, because MPI reduced ``nbytes`` bytes in an unrepeatable order."""
        self._other_order = (
            f"; before that, MPI reduced {nbytes} bytes of floating-point numbers in an order that a replay cannot"
            " repeat"
        )

    def on_event(self, time_s: float, kind: str, fields: tuple[Field, ...], has_stopped: bool) -> None:
        """Compare one event with the record, and raise DivergenceError if the event differs.

        If a policy's weights differ because an exception makes ``main`` leave the policy, later events are not
        compared. The end of ``main`` then reports the exception. If ``main`` catches it, :attr:`deferred` is reported.
        """
        if kind == "step":
            self.iteration = whole(fields[1])
        if kind not in DECISIONS or self._found or self.deferred is not None:
            return
        event = Event(time_s, kind, fields)
        decisions = self._log.decisions[kind]
        expected = decisions.popleft() if decisions else None
        if expected is None:
            if not self._log.is_over or has_stopped:  # after the end of ``main``, events may differ
                return
            found = f"the recording has no further {kind}, but the replay has [{event}]"
        elif _essence(expected) != _essence(event):
            found = f"the recording has [{expected}], but the replay has [{event}]"
        else:
            return
        if kind not in _FINAL or not isinstance(sys.exception(), Exception):
            raise self.divergence(found)
        self.deferred = self._difference(found)

    def on_end(self, error: BaseException | None) -> None:
        """Compare the end of ``main`` with the recorded end. ``error`` is the cause of a reported difference."""
        if isinstance(error, asyncio.CancelledError):
            return
        now, recorded = "" if error is None else type(error).__name__, self._log.error.partition(":")[0]
        # The job failed on another rank while ``main`` was returning.
        failed_late = recorded == RankLostError.__name__ and not now
        if self._log.is_over and not self._found and now != recorded and not failed_late:
            told = now if error is None else f"{now}: {error}".partition("\n")[0]
            found = self.divergence(
                f"main ended with [{self._log.error}] in the recording, but with [{told[:300]}] now"
            )
            found.__cause__ = error

    def where(self) -> str:
        """Describe the rank's progress, for example as "after iteration 3"."""
        return f"after iteration {self.iteration}" if self.iteration >= 0 else "before its first step"

    def divergence(self, what: str) -> DivergenceError:
        """Return an error with the rank and its iteration, and append it to the list of differences."""
        error = self._difference(what)
        self._found.append(error)
        return error

    def _difference(self, what: str) -> DivergenceError:
        return DivergenceError(f"rank {self._rank}, {self.where()}: {what}{self._other_order}", rank=self._rank)


def describe_missing(pending: RecordedInput | None) -> str:
    """Describe a recorded input, or a safe point if ``pending`` is None, that does not occur in the replay."""
    match pending:
        case ReceivedMessages(keys=keys):
            ranks = sorted({rank for rank, _ in keys})
            names = ", ".join(dict.fromkeys(_name_of(tag) for _, tag in keys))
            whose = f"of rank {ranks[0]}" if len(ranks) == 1 else f"of ranks {', '.join(map(str, ranks))}"
            what = f"a message {whose} on" if len(keys) == 1 else f"{len(keys)} messages {whose} on"
            return f"the recording expects {what} {names} next, but none arrives"
        case DeadlineExpired(what=what):
            return f"the recording expects the timeout of {str(what)!r} next, but nothing is waiting for it"
        case TimerFired(what=what):
            return f"the recording expects the timer of {str(what)!r} to fire next, but this timer does not exist"
        case CollectiveEnd(what=what):
            verb = "failed" if what == FAILED else "ended"
            return f"in the recording, a collective {verb} next, but in the replay no collective does"
        case RankLost(rank=rank):
            return f"the recording expects the loss of rank {rank} next, but the rank is not lost"
        case _:
            return "the recording expects the next step of the rank, but it is waiting for something else"


def _name_of(tag: int) -> str:
    return f"the tag {_TAGS[tag]!r}" if tag in _TAGS else f"tag {tag}"


def _essence(event: Event) -> tuple[str, list[Any]]:
    """Return an event's kind and the fields that a replay must repeat, with NaN replaced by a comparable string."""
    named = zip(KINDS[event.kind], event.fields, strict=False)
    plain = ((name, list(field) if isinstance(field, (tuple, list)) else field) for name, field in named)
    return event.kind, [field if field == field else "nan" for name, field in plain if name not in _NOT_REPEATED]
