"""What policies print of their statistics."""

from __future__ import annotations

import pytest

from protocols.journal import Journal, format_table, size_text


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
    assert size_text(nbytes) == text


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
