"""Tests whether an error is counted as a failure of the rank that raised it, or of another rank."""

from __future__ import annotations

import asyncio

import pytest

from asyncdist.errors import RankLostError, has_cause_here


def raised(first: BaseException, how: str) -> ValueError:
    """Return a ValueError that was raised while ``first`` was handled."""
    try:
        try:
            raise first
        except BaseException as error:
            if how == "from None":
                raise ValueError("own") from None
            if how == "from error":
                raise ValueError("own") from error
            raise ValueError("own")  # noqa: B904 - the context is tested
    except ValueError as error:
        return error


@pytest.mark.parametrize("first", [RankLostError("rank 1 is lost", rank=1), asyncio.CancelledError()])
@pytest.mark.parametrize(("how", "is_own"), [("", False), ("from error", False), ("from None", True)])
def test_a_suppressed_context_is_not_the_cause(first: BaseException, how: str, is_own: bool) -> None:
    """Regression: a rank's own error was counted as the loss of another rank, although it was raised from None."""
    assert has_cause_here(raised(first, how)) is is_own


def test_an_error_in_a_cycle_has_a_cause_here() -> None:
    error = ValueError("one")
    error.__context__ = KeyError("two")
    error.__context__.__context__ = error
    assert has_cause_here(error) and has_cause_here(ExceptionGroup("both", [raised(KeyError(), ""), error]))
