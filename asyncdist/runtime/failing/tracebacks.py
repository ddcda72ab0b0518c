"""Formats an exception for the user: the user's own frames, and a remedy if one is known."""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from types import TracebackType
from typing import Final

from asyncdist import rank_program

#: Modules whose frames precede the user's first frame in a traceback of a rank, scenario or script.
_MACHINERY: Final = (
    "asyncdist.runtime.run",
    "asyncdist.runtime.hosting",
    "asyncdist.simulation.exploration.explore",
    "asyncdist.simulation.run_script",
    "asyncdist.launch.rank_process",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
    "runpy",
)
#: Modules whose frames precede the exception group of spawned tasks in a traceback.
_OF_A_GROUP: Final = (*_MACHINERY, "asyncio.taskgroups", "contextlib")
#: Functions that call a rank's ``main`` or the user's blocking code.
_HOSTS: Final = (("asyncdist.runtime.hosting", "host_rank"), ("asyncdist.blocking.callers", "_serve"))
#: asyncdist functions whose frames may lie between the function that hosts a rank and the user's code.
_WRAPPERS: Final = (("asyncdist.launch.rank_process", "_with_groups"), ("asyncdist.blocking.world", "open_world"))
#: Function that checks ``main`` before it is called. Its errors quote the user's line, so they need no traceback.
_REFUSAL: Final = ("asyncdist.validation", "main_function")


def format_error(error: BaseException) -> str:
    """Return the user's part of the traceback, the exception, and a remedy if one is known."""
    rank_program.explain_import(error)
    rank_program.explain_input(error)
    return format_from(error, user_traceback(error))


def format_from(error: BaseException, trace: TracebackType | None) -> str:
    """Format the exception with the given part of its traceback, and Python's suggestion for a misspelt name."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    if sys.version_info < (3, 12):
        shown = _as_the_interpreter_shows(error, trace)
        if _SUGGESTION in shown:
            return shown
    return text


if sys.version_info < (3, 12):
    #: In Python 3.11, the interpreter's own report makes suggestions, but the module traceback does not.
    _SUGGESTION: Final = "Did you mean"

    def _as_the_interpreter_shows(error: BaseException, trace: TracebackType | None) -> str:
        whole = error.__traceback__
        try:
            with contextlib.redirect_stderr(io.StringIO()) as shown:
                sys.__excepthook__(type(error), error.with_traceback(trace), trace)
        finally:
            error.__traceback__ = whole
        return shown.getvalue()


def user_traceback(error: BaseException) -> TracebackType | None:
    """Return the part of the traceback in the user's code. Return None for the exception group of spawned tasks."""
    trace = error.__traceback__
    found = raised = None
    is_in_user_code = not isinstance(error, BaseExceptionGroup)
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__")
        function = module, trace.tb_frame.f_code.co_name
        if found is trace and function == _REFUSAL:
            return None
        if function in _HOSTS or (found is trace and (function in _WRAPPERS or module in _MACHINERY)):
            found = trace.tb_next
        elif found is None and module not in _MACHINERY:
            found = trace
        raised = trace if module == _HOSTS[0][0] else None
        is_in_user_code = is_in_user_code or module not in _OF_A_GROUP
        trace = trace.tb_next
    return found or raised if is_in_user_code else None
