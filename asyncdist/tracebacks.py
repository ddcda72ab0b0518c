"""What a user is shown of an exception: their own frames, and the cure where the cause is known.

One form for every way to start, so that a mistake reads alike under mpirun and in a simulation.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Final

from asyncdist import launch

#: Modules between what starts a rank, scenario or script and its first line.
_MACHINERY: Final = (
    "asyncdist.runtime",
    "asyncdist.simulation.explore",
    "asyncdist.simulation.script",
    "importlib._bootstrap",
    "runpy",
)
#: The function that calls a rank's main.
_HOST: Final = ("asyncdist.runtime", "host_rank")


def format_error(error: BaseException) -> str:
    """The traceback without the machinery around, the exception, and what its text does not say."""
    launch.explain_import(error)
    return "".join(traceback.format_exception(type(error), error, user_traceback(error)))


def user_traceback(error: BaseException) -> TracebackType | None:
    """From a rank's main on, or from the scenario or script; where they had no part in it, what the runtime raised."""
    trace = error.__traceback__
    found = raised = None
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__")
        if (module, trace.tb_frame.f_code.co_name) == _HOST:
            found = trace.tb_next
        elif found is None and module not in _MACHINERY:
            found = trace
        raised = trace if module == _HOST[0] else None
        trace = trace.tb_next
    return found or raised
