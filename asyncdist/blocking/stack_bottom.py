"""Calls a function at the bottom of a separate stack (a greenlet), where C++ backtraces must end.

For each of its errors, torch takes a backtrace of the C++ stack, even if the program catches the error. The memory
beyond the bottom of a greenlet's stack belongs to other stacks. A backtrace that continues there reads arbitrary
addresses, and can end the process by SIGSEGV.

The function that ends backtraces is C code in the module's ``.pxd`` file, used if the module is compiled
(:mod:`asyncdist.compiled`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_IS_COMPILED: Final = not __file__.endswith(".py")


def call_at_bottom(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``fn(*args, **kwargs)``. C++ backtraces taken during the call end at this function if it is compiled."""
    if not _IS_COMPILED:
        return fn(*args, **kwargs)
    return call_without_caller(fn, args, kwargs)  # type: ignore[name-defined]  # noqa: F821 -- in the .pxd file
