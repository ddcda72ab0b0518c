"""Shows a replayed rank what comes next while it waits, outside of its safe points."""

from __future__ import annotations

from collections.abc import Callable

from asyncdist.messaging.engine import Engine
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.admission import Admission
from asyncdist.simulation.replay.agenda import Agenda
from asyncdist.simulation.replay.hold import PATIENCE_S, PAUSE_S
from asyncdist.simulation.replay.log import Sight
from asyncdist.simulation.replay.timers import Deadlines, Timers
from asyncdist.simulation.scheduler import Handle


class Lookout:
    """Looks, a little after something has happened, whether the place of what comes next has come.

    Args:
        agenda: what the rank sees next.
        admission: which messages it may take.
        timers, deadlines: its own.
        loop: runs it.
        show: lets it see something.
        catch_up: lets it see all whose place has come.
    """

    def __init__(
        self,
        agenda: Agenda,
        admission: Admission,
        timers: Timers,
        deadlines: Deadlines,
        loop: RankLoop,
        show: Callable[[Sight], None],
        catch_up: Callable[[], None],
    ) -> None:
        self._agenda = agenda
        self._admission = admission
        self._timers = timers
        self._deadlines = deadlines
        self._loop = loop
        self._show = show
        self._catch_up = catch_up
        self._has_main_ended = False
        self._timer: Handle | None = None
        self._look_at_s = 0.0
        self._put_off: Sight | None = None
        self._engine: Engine

    def open(self, engine: Engine) -> None:
        """Begin: main is about to."""
        self._engine = engine
        self.look_soon()

    def note_end(self) -> None:
        """Hold nothing back for long any more: main has ended."""
        self._has_main_ended = True
        self.look_soon()

    def look_soon(self, after_s: float = PAUSE_S) -> None:
        """Look in so many virtual seconds, or before."""
        at_s = self._loop.time() + after_s
        if not self._agenda.is_open or (self._timer is not None and self._look_at_s <= at_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._look_at_s = self._loop.call_later(after_s, self._look), at_s

    def _look(self) -> None:
        """Show what is next, unless user code has to come to a safe point first."""
        self._timer = None
        if self._agenda.is_done:
            if not self._agenda.is_cut_short:  # else it goes no further, as far as others can tell
                self._release()
            return
        if self._agenda.is_in_point:
            return
        self._catch_up()
        sight = self._agenda.next()
        if sight is None:
            if self._has_main_ended:
                self._show_all()
        elif self._agenda.is_possible(sight) and not self._admission.has_permitted:
            # Its place has not come, and the rank waits: some task has gone on in another order.
            if sight is not self._put_off:
                self._put_off = sight
                self.look_soon(PATIENCE_S)
            elif self._has_no_patience():
                self._show(sight)
                self.look_soon()
        elif self._has_main_ended and self._has_no_patience():
            self._show_all()

    def _has_no_patience(self) -> bool:
        """Whether nothing was seen for long; if something was, look again when that may be so."""
        ends_at_s = self._agenda.progressed_at_s + PATIENCE_S
        if self._loop.time() >= ends_at_s:
            return True
        self.look_soon(ends_at_s + PAUSE_S - self._loop.time())
        return False

    def _show_all(self) -> None:
        """Hold nothing back any more: ranks may come to their end in another order than then."""
        self._agenda.clear()
        self._admission.clear()
        self._release()

    def _release(self) -> None:
        self._timers.release()
        self._deadlines.release()
        self._engine.ring()
