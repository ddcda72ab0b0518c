"""Tells of mistakes in the use of a policy, with the user's own line."""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import NoReturn


class NoPlainContext:
    """Is no context of ``with``: says what is written instead."""

    def __enter__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"with {kind}(...) lacks a word: write async with {kind}(...) as policy in a coroutine, and elsewhere "
            f"with asyncdist.blocking.policy({kind}(...)) as policy"
        )

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None: ...


def line_of_caller() -> tuple[str, int]:
    """Return file and line of the code that has called a method of a policy."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def warn_of_no_step(first_call: tuple[str, int]) -> None:
    """Warn that calls were made, of which this is the first, and that none was awaited."""
    text = "no step of this policy was ever awaited, so nothing was averaged: write await policy.step(...)"
    warnings.warn_explicit(text, RuntimeWarning, *first_call)
