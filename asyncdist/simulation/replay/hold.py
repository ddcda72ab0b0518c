"""Stops a replayed rank until a message is there that it had by then in the recorded run."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Final

from asyncdist.messaging.engine import Engine
from asyncdist.simulation.processes.event_loop import RankLoop
from asyncdist.simulation.replay.agenda import Agenda

#: Virtual seconds between two looks for what a rank may see next. Whatever others do for it takes no time at all.
PAUSE_S: Final = 1e-5
#: The longest pause between two such looks.
PAUSE_MAX_S: Final = 0.1
#: Virtual seconds for which a rank waits for what it saw next before it is taken to have gone another way.
PATIENCE_S: Final = 300.0


class Hold:
    """Lets nothing run on a rank after the step under way, if a message that comes next is not there yet.

    The rank that sends it needs nothing more of this one for that, since it had nothing more then.

    Args:
        agenda: what the rank sees next.
        loop: runs it.
        may_begin: returns whether it may be held in this step.
        on_end: called when the message is there, before anything else runs.

    Attributes:
        is_on: whether the rank is held.
    """

    def __init__(
        self, agenda: Agenda, loop: RankLoop, may_begin: Callable[[], bool], on_end: Callable[[], None]
    ) -> None:
        self.is_on = False
        self._agenda = agenda
        self._loop = loop
        self._may_begin = may_begin
        self._on_end = on_end
        self._until_s = self._ends_at_s = 0.0
        self._engine: Engine
        self._context: contextvars.Context

    def open(self, engine: Engine) -> None:
        """Begin: main is about to, in this context."""
        self._engine = engine
        self._context = contextvars.copy_context()

    def begin_if_late(self, ending_count: int = 0) -> None:
        """Hold the rank if it has to be; ``ending_count`` is that of :meth:`Agenda.is_due`."""
        if self.is_on or not self._agenda.is_open or not self._may_begin():
            return
        sight = self._agenda.next()
        if sight is None or not self._agenda.must_be_there(sight, ending_count) or self._agenda.is_possible(sight):
            return
        if self._agenda.exit_after(sight) is not None:
            return  # a collective ends first, for which others may need this rank
        self.is_on = True
        self._until_s = self._loop.time() + PATIENCE_S
        self._go_on(PAUSE_S)
        self._loop.attend(self._end, ())  # before anything else, when it is not busy any more

    def _go_on(self, pause_s: float) -> None:
        sight = self._agenda.next()
        if sight is None or self._agenda.is_possible(sight) or self._loop.time() > self._until_s:
            return
        self._loop.stall(pause_s)
        self._ends_at_s = max(self._ends_at_s, self._loop.time()) + pause_s
        next_pause_s = min(1.5 * pause_s, PAUSE_MAX_S)
        self._loop._scheduler.at(self._ends_at_s - pause_s / 8, self._go_on, (next_pause_s,))

    def _end(self) -> None:
        self.is_on = False
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            self._context.run(self._on_end)
        except Exception as error:
            self._engine.fail(error)
        finally:
            asyncio._set_running_loop(before)
