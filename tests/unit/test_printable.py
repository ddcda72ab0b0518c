"""Strings of other processes and files, as they are printed on a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, strategies as st

from asyncdist.trust.printable import printable


@pytest.mark.parametrize(
    "text, shown",
    [
        ("main (train.py:12)", "main (train.py:12)"),
        ("Größe ✓ 漢字 🙂", "Größe ✓ 漢字 🙂"),
        ("\x1b]0;title\x07\x1b[31mred", r"\x1b]0;title\x07\x1b[31mred"),
        ("C1: \x9b2J", r"C1: \x9b2J"),
        ("two\nlines\rover", r"two\nlines\rover"),
        ("reversed \u202etxt", r"reversed \u202etxt"),
        ("a lone \udc80", r"a lone \udc80"),
        ("paragraph\u2029", r"paragraph\u2029"),
        ("", ""),
    ],
)
def test_characters_that_are_not_drawn_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_kept_characters_stay() -> None:
    assert printable("one\ntwo\x1b", keep="\n") == "one\ntwo\\x1b"


@given(st.text(st.characters()))
def test_nothing_printed_can_steer_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(each) for each in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert printable(shown) == shown
