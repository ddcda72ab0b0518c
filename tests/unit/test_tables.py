"""Tests the tables of statistics that policies print."""

from __future__ import annotations

import pytest

from asyncdist.wording import aligned, ordinal, plural, ranks_in_words, seconds_in_words, size_in_words
from protocols.journal import Journal, format_table


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 19, "2.5 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_have_a_unit_in_which_they_can_be_read(nbytes: int, text: str) -> None:
    assert size_in_words(nbytes) == text


def test_runs_of_ranks_are_spans() -> None:
    assert [ranks_in_words(ranks) for ranks in ([3], [9, 0, 1, 5, 6, 7])] == ["rank 3", "ranks 0, 1, 5-7, 9"]
    assert ranks_in_words({0, 2, 4, 5, 6}, span_count_max=1) == "ranks 0 and 4 more"
    assert ranks_in_words(range(5), span_count_max=1) == "ranks 0-4"


def test_durations_have_a_unit_that_fits() -> None:
    seconds = (0.0, 2e-6, 0.0125, 1.25, 61.2, 700)
    assert [seconds_in_words(each) for each in seconds] == ["0.0 s", "2 us", "12.5 ms", "1.2 s", "61 s", "12 min"]
    rounded = (0.9994, 0.9997, 0.0009997, 9.97, 599.7)  # Regression: the second was "1e+03 ms"
    assert [seconds_in_words(each) for each in rounded] == ["999 ms", "1.0 s", "1 ms", "10 s", "10 min"]


def test_nouns_and_ordinals_follow_their_number() -> None:
    assert [plural(count, "rank") for count in (0, 1, 2000)] == ["0 ranks", "1 rank", "2,000 ranks"]
    assert [ordinal(number) for number in (1, 2, 3, 11, 22, 113)] == ["1st", "2nd", "3rd", "11th", "22nd", "113th"]


def test_columns_are_aligned_left_or_right() -> None:
    assert aligned([("a", 1, "x"), ("bb", 22, "")], right=[1]) == "a    1  x\nbb  22"


def test_a_table_has_two_columns_below_its_title() -> None:
    assert format_table("mine", [("a", 1), ("long", "2 B")]) == "mine\na     1\nlong  2 B"
    assert format_table("", []) == ""


def test_a_description_has_the_role_of_the_round_under_way() -> None:
    journal = Journal("mine", "AveragingPolicy")
    assert journal.describe(4) == "AveragingPolicy 'mine', not started, iteration 4"
    journal.note_role(3, "giving")
    assert journal.describe(5) == "AveragingPolicy 'mine', not started, iteration 5, giving in round 3"
    journal.note_role(3, "idle")
    assert journal.describe(6) == "AveragingPolicy 'mine', not started, iteration 6"
