"""Tests that a printed traceback equals Python's own, from the user's first frame on."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from asyncdist.runtime.failing.tracebacks import format_error


def caught(work: Any) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def misspelt() -> None:
    number = 1
    print(nmber, number)  # type: ignore[name-defined]  # noqa: F821


def of_an_object() -> None:
    "text".splitt()  # type: ignore[attr-defined]


def in_a_group() -> None:
    raise ExceptionGroup("of tasks", [ValueError("other"), caught(misspelt)])  # type: ignore[list-item]


def as_a_cause() -> None:
    raise ValueError("behind it") from caught(misspelt)


def plain() -> None:
    raise ValueError("plain")


@pytest.mark.parametrize(
    ("work", "suggestion"),
    [
        (misspelt, "'number'"),
        (of_an_object, "'split'"),
        (in_a_group, "'number'"),
        (as_a_cause, "'number'"),
        (plain, ""),
    ],
)
def test_nothing_is_lost_and_the_exception_stays_unchanged(
    work: Any, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = caught(work)
    trace = error.__traceback__
    text = format_error(error)
    assert error.__traceback__ is trace
    assert capsys.readouterr().err == ""
    sys.__excepthook__(type(error), error, trace)
    assert text == capsys.readouterr().err
    assert f"Did you mean: {suggestion}" in text if suggestion else "Did you mean" not in text
