"""Tests the wording of errors for wrong values; tests of single functions compare only the option and the value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncdist import validation


@pytest.mark.parametrize(
    ("check", "kind", "words"),
    [
        (lambda: validation.count("n", 0), ValueError, "n must be an integer >= 1, got 0"),
        (lambda: validation.count("n", 2.0), ValueError, "n must be an integer >= 1, got 2.0"),
        (lambda: validation.count("n", True), ValueError, "n must be an integer >= 1, got True"),
        (lambda: validation.count("n", -1, least=0), ValueError, "n must be an integer >= 0, got -1"),
        (
            lambda: validation.count("n", 0, besides=" or None"),
            ValueError,
            "n must be an integer >= 1 or None, got 0",
        ),
        (
            lambda: validation.count("n", 1 << 128),
            ValueError,
            "n must be an integer >= 1 of at most 128 bits, got 340282366920938463463374607431768211456",
        ),
        (
            lambda: validation.count("n", 1 << 20_000),
            ValueError,
            "n must be an integer >= 1 of at most 128 bits, got an integer of 20001 bits",
        ),
        (lambda: validation.whole("n", 1.5), TypeError, "n must be an integer, got 1.5"),
        (lambda: validation.ranks("r", "01"), TypeError, "r must be a sequence of distinct ranks, got '01'"),
        (lambda: validation.ranks("r", [1, 1]), ValueError, "r must be a sequence of distinct ranks, got [1, 1]"),
        (lambda: validation.ranks("r", [-1]), ValueError, "r[0] must be an integer >= 0, got -1"),
        (lambda: validation.fraction("f", 1.5), ValueError, "f must be a number from 0 to 1, got 1.5"),
        (lambda: validation.fraction("f", math.nan), ValueError, "f must be a number from 0 to 1, got nan"),
        (lambda: validation.seconds("s", 0), ValueError, "s must be > 0 seconds and finite, got 0"),
        (
            lambda: validation.seconds("s", math.inf),
            ValueError,
            "s must be > 0 seconds and finite, got inf",
        ),
        (
            lambda: validation.seconds("s", "1", finite=False),
            ValueError,
            "s must be > 0 seconds, got '1'",
        ),
        (
            lambda: validation.refuse("name", "x" * 300, "a short string"),
            ValueError,
            f"name must be a short string, got '{'x' * 199}...",
        ),
    ],
)
def test_error_names_option_value_and_what_is_allowed(
    check: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as caught:
        check()
    assert str(caught.value) == words


def test_numbers_of_other_types_are_returned_as_pythons_own() -> None:
    found = [
        validation.count("n", np.int64(3)),
        validation.whole("n", np.int8(-3)),
        *validation.ranks("r", [np.int32(2)]),
    ]
    assert found == [3, -3, 2] and {type(value) for value in found} == {int}
    assert type(validation.fraction("f", np.float32(0.5))) is float
    assert validation.seconds("s", math.inf, finite=False) == math.inf


def test_missing_library_names_the_extra_that_installs_it() -> None:
    assert (
        validation.missing_library("live=True", "rich", "live") == "live=True needs rich: pip install 'asyncdist[live]'"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [("avg_every", "did you mean average_every?"), ("zzz", "the names are average_every, world")],
)
def test_misspelt_name_gets_the_nearest_or_all_allowed_names(name: str, words: str) -> None:
    assert validation.meant(name, ["world", "average_every"]) == words
