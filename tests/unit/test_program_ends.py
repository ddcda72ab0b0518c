"""Tests which exception ends a program that hosts a rank without a main function."""

from __future__ import annotations

import sys

import pytest

from asyncdist.runtime.failing.process_ends import ProgramEnd


def test_an_exception_of_a_cell_does_not_end_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a rank of a notebook failed at its end if any earlier cell had raised an exception."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.delattr(sys, "ps1", raising=False)
    end = ProgramEnd()
    monkeypatch.setattr(sys, "last_value", ValueError("in a cell"), raising=False)
    assert isinstance(end.error(), ValueError)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert end.error() is None
