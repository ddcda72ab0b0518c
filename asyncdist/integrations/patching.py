"""Replaces methods of libraries with functions that get the original methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def replaces(owner: Any, name: str) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator of a function that replaces the method ``name`` of a class or of an object.

    The function gets the original method, and then the arguments of the call.
    """

    def decorate(function: FunctionT) -> FunctionT:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            return function(original, *args, **options)

        setattr(owner, name, call)
        return function

    return decorate
