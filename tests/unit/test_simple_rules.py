"""Tests the defaults of a simple policy's rule, and its random numbers, which are equal on all machines."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from asyncdist.protocols.simple.rule import Rule, drawn

MASK: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15


def split_mix(state: int) -> int:
    """Return SplitMix64's output for a state, in integers without limits (Vigna's splitmix64.c)."""
    value = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@pytest.mark.parametrize(("seed", "number"), [(0, 1), (7, 3), (2**40, 10**9)])
def test_drawn_numbers_are_those_of_splitmix(seed: int, number: int) -> None:
    first = split_mix((seed * GOLDEN + number) & MASK)
    right = [split_mix((first + GOLDEN * (place + 1)) & MASK) for place in range(5)]
    assert drawn(seed, number, 5).tolist() == [each & ((1 << 63) - 1) for each in right]


def test_the_published_numbers_of_splitmix_are_found() -> None:
    """The first outputs for the state 0, from the reference implementation."""
    assert [split_mix(GOLDEN * place & MASK) for place in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_a_rule_averages_everything_unless_it_says_otherwise() -> None:
    rule, own, mean = Rule(average_every=3), torch.zeros(2), torch.ones(2)
    assert rule.chosen(1, 5) is None and rule.merge([own, mean], [1.0, 1.0]) is None
    assert rule.apply(own, mean, 1) is mean
