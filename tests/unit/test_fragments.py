"""Tests how entries are divided into fragments: each exactly once, by layers, by sizes and by names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.facts import naming
from torch import nn

from asyncdist.protocols.diloco.fragments import FragmentPattern, fragments_of
from asyncdist.tensors.flat_state import Entry, FlatState
from asyncdist.tensors.optimizers.weights import STATE_PREFIX

LAWS = settings(deadline=None, derandomize=True, max_examples=200)


class Transformer(nn.Module):
    """Has tied weights, layers of two widths, and a buffer of integers."""

    def __init__(self, layer_count: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4 + 2 * i), nn.BatchNorm1d(4)) for i in range(layer_count))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight


def entry(*names: str, count: int = 1, dtype: torch.dtype = torch.float32) -> Entry:
    return Entry(names, (count,), dtype, averaged=True, offset=0)


def names_of(entries: Sequence[Entry], count: int, pattern: FragmentPattern) -> list[list[str]]:
    """Return the first name of each entry of each fragment."""
    return [[entries[index].names[0] for index in found] for found in fragments_of(entries, count, pattern)]


def sizes_of(entries: Sequence[Entry], fragments: Sequence[Sequence[int]]) -> list[int]:
    return [sum(entries[index].shape[0] * entries[index].dtype.itemsize for index in found) for found in fragments]


# -- laws -------------------------------------------------------------------------------------------------------------

ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["embed", "h.0.a", "h.1.a", "h.2.b", "h.10.a", "h.10.b", "layers.2.c", "head", "3"]),
        st.sampled_from(["weight", "bias", "x.y"]),
        st.integers(0, 9),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    ),
    min_size=1,
    unique_by=lambda drawn: drawn[:2],
)


@LAWS
@given(ENTRIES, st.integers(1, 9), st.sampled_from(["strided", "balanced"]))
def test_each_entry_is_in_one_fragment_and_none_is_empty(drawn: Any, count: int, pattern: Any) -> None:
    entries = [entry(f"{module}.{name}", count=size, dtype=dtype) for module, name, size, dtype in drawn]
    try:
        fragments = fragments_of(entries, count, pattern)
    except ValueError:
        layers = {part for each in entries for part in each.names[0].split(".") if part.isdigit()}
        assert count > (len(entries) if pattern == "balanced" else len(layers))
        return
    assert len(fragments) == count
    assert all(fragments)
    assert sorted(index for found in fragments for index in found) == list(range(len(entries)))
    assert all(list(found) == sorted(found) for found in fragments)
    assert fragments_of(entries, count, pattern) == fragments


@LAWS
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_balanced_fragments_differ_by_at_most_one_entry(sizes: list[int], count: int) -> None:
    count = min(count, len(sizes))
    entries = [entry(f"p{index}", count=size) for index, size in enumerate(sizes)]
    found = sizes_of(entries, fragments_of(entries, count, "balanced"))
    assert max(found) - min(found) <= 4 * max(sizes)


def test_balanced_fragments_are_as_small_as_graham_proved() -> None:
    """All divisions of a few entries are tried: the largest fragment is at most 4/3 - 1/(3 * count) of the optimum."""
    for seed in range(40):
        numbers = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 30, (7,), generator=numbers).tolist()
        entries = [entry(f"p{index}", count=size) for index, size in enumerate(sizes)]
        halves = [sum(some) for number in range(8) for some in combinations(sizes, number)]
        optimum = 4 * min(max(half, sum(sizes) - half) for half in halves)
        assert max(sizes_of(entries, fragments_of(entries, 2, "balanced"))) <= optimum * (4 / 3 - 1 / 6)


# -- patterns ---------------------------------------------------------------------------------------------------------


def test_strided_layers_take_turns_and_the_rest_is_first() -> None:
    entries = FlatState(Transformer()).entries
    fragments = names_of(entries, 3, "strided")
    layers = [sorted({name.split(".")[1] for name in found if name.startswith("h.")}) for found in fragments]
    assert layers == [["0", "3"], ["1", "4"], ["2"]]
    assert [name for name in fragments[0] if not name.startswith("h.")] == ["embed.weight", "norm.weight", "norm.bias"]
    assert sum(map(len, fragments)) == len(entries)


@pytest.mark.parametrize(
    ("names", "count", "expected"),
    [
        (["0.weight", "2.weight", "4.weight"], 3, [["0.weight"], ["2.weight"], ["4.weight"]]),  # nn.Sequential
        (["h.9.w", "h.10.w", "h.100.w"], 2, [["h.9.w", "h.100.w"], ["h.10.w"]]),  # by number, not as text
        (["encoder.layers.1.w", "decoder.layers.1.w"], 1, [["encoder.layers.1.w", "decoder.layers.1.w"]]),
        (["blocks.0.1.w", "blocks.1.0.w"], 2, [["blocks.0.1.w"], ["blocks.1.0.w"]]),  # the first number
        (["conv2d.w", "fc1.w"], 1, [["conv2d.w", "fc1.w"]]),  # digits inside a name are not a layer
    ],
)
def test_strided_layers_are_the_first_numbers(names: list[str], count: int, expected: list[list[str]]) -> None:
    assert names_of([entry(name) for name in names], count, "strided") == expected


def test_balanced_fragments_have_the_documented_order() -> None:
    entries = [entry("b", count=4), entry("a", count=4), entry("c", count=3), entry("d", count=9), entry("e", count=1)]
    assert names_of(entries, 2, "balanced") == [["d", "e"], ["b", "a", "c"]]
    wide = [entry("a", count=3), entry("b", count=2, dtype=torch.float64), entry("c", count=1)]
    assert names_of(wide, 2, "balanced") == [["b"], ["a", "c"]], "fragments must be balanced by bytes"
    empty = [entry(name, count=0) for name in "cab"]
    assert fragments_of(empty, 3, "balanced") == ((1,), (2,), (0,)), (
        "empty tensors must be ordered by name, and each fragment must get one"
    )


def test_tied_weights_are_one_entry_of_one_fragment() -> None:
    entries = FlatState(Transformer()).entries
    tied = next(index for index, each in enumerate(entries) if len(each.names) == 2)
    assert entries[tied].names == ("embed.weight", "head.weight")
    patterns: list[FragmentPattern] = ["strided", "balanced"]
    for pattern in patterns:
        fragments = fragments_of(entries, 2, pattern)
        assert [tied in found for found in fragments].count(True) == 1


def test_lists_name_modules_parameters_and_buffers() -> None:
    entries = [entry(name) for name in ("h.1.w", "h.10.w", "h.1.norm.w", "embed.weight", "scale")]
    fragments = names_of(entries, 2, [["h.1", "scale"], ("h.10", "embed.weight")])
    assert fragments == [["h.1.w", "h.1.norm.w", "scale"], ["h.10.w", "embed.weight"]]
    tied = [entry("embed.weight", "head.weight"), entry("h.0.w")]
    assert fragments_of(tied, 2, [["h"], ["embed", "head"]]) == ((1,), (0,))
    assert fragments_of(tied, 2, [["h"], ["head"]]) == ((1,), (0,)), "one of a tied tensor's names must be enough"


def test_averaged_optimizer_states_follow_their_parameters() -> None:
    entries = [entry(name) for name in ("0.w", "1.w", f"{STATE_PREFIX}0.w", f"{STATE_PREFIX}1.w")]
    patterns: list[FragmentPattern] = ["strided", [["0"], ["1"]]]
    for pattern in patterns:
        assert fragments_of(entries, 2, pattern) == ((0, 2), (1, 3))


def test_a_pattern_names_the_modules_of_a_compiled_model() -> None:
    """Regression: the lists had to name the wrapper of torch.compile, if the whole model was compiled."""
    entries = [entry(name) for name in ("_orig_mod.0.w", "_orig_mod.1._orig_mod.w", f"{STATE_PREFIX}_orig_mod.0.w")]
    assert fragments_of(entries, 2, [["0"], ["1.w"]]) == ((0, 2), (1,))
    assert fragments_of(entries, 2, [["_orig_mod.0"], ["_orig_mod.1"]]) == ((0, 2), (1,))


# -- errors -----------------------------------------------------------------------------------------------------------

MODEL = (entry("embed.weight", "head.weight"), entry("h.0.w"), entry("h.0.b"), entry("h.1.w"))


@pytest.mark.parametrize(
    ("count", "pattern", "facts"),
    [
        (5, "balanced", ("fragments", "4", "5")),
        (5, "strided", ("fragments", "4", "5")),
        (3, "strided", ("fragments", "2", "3", "balanced")),
        (2, [["embed", "h"]], ("fragment_pattern", "2", "1")),
        (2, [["embed"], ["h.0"]], ("fragment_pattern", "h.1.w")),
        (2, [["embed", "h.0"], ["h"]], ("fragment_pattern", "h.0.w", "0", "1")),
        (2, [["embed", "h.1"], ["head", "h.0"]], ("embed.weight", "head.weight", "0", "1")),
        (3, [["embed"], ["h"], ["haed"]], ("fragment_pattern", "2", "haed")),
        (3, [["embed"], ["h"], []], ("fragment_pattern", "2")),
    ],
)
def test_wrong_fragments_are_refused(count: Any, pattern: Any, facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*facts)):
        fragments_of(MODEL, count, pattern)


def test_a_model_without_layers_has_one_strided_fragment() -> None:
    entries = [entry("a"), entry("b")]
    assert fragments_of(entries, 1, "strided") == ((0, 1),)
    with pytest.raises(ValueError, match=naming("fragments", "0", "2", "balanced")):
        fragments_of(entries, 2, "strided")
