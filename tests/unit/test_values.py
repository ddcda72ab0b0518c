"""Tests the encoding of values: each is decoded to an equal value, and malformed bytes do no harm."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.values_of_all_types import LARGE, UNSUPPORTED, VALUES, same

from asyncdist.errors import RemoteProtocolError
from asyncdist.tensors import serialization

HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
ANYTHING = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4) | st.sets(HASHABLE),
    max_leaves=12,
)


@pytest.mark.parametrize("value", [*VALUES, *LARGE], ids=lambda value: type(value).__name__)
def test_every_type_comes_back(value: Any) -> None:
    found = serialization.decode(serialization.encode(value))
    assert same(found, value)
    assert found is not value or not isinstance(value, (list, dict, set, bytearray, torch.Tensor))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(ANYTHING)
def test_any_value_comes_back(value: Any) -> None:
    assert same(serialization.decode(serialization.encode(value)), value)


@pytest.mark.parametrize(("value", "words"), UNSUPPORTED)
def test_other_types_are_refused_by_name_and_place(value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        serialization.encode(value)
    assert words in str(caught.value)
    assert caught.type is ValueError or "None, bool, int" in str(caught.value)


def test_what_arrives_is_the_receiver_s_own() -> None:
    tensor, array = serialization.decode(serialization.encode((torch.ones(3), np.ones(3))))
    tensor += 1
    array += 1
    assert tensor.tolist() == array.tolist() == [2.0] * 3


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | ANYTHING.map(lambda tree: msgspec.msgpack.encode(repr(tree))))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        serialization.decode(data)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {1: 2, 3: 4},
        {99: []},
        {"list": []},
        {0: [1]},
        {1: 5},
        {3: 1 << 50},
        {4: 1},
        {5: [1, 2, 3]},  # a dict with one key too many
        {6: [[]]},  # a set of lists
        {8: ["float32", [1 << 40], b""]},
        {8: ["float32", [-1], b""]},
        {8: ["float99", [1], b"abcd"]},
        {8: ["qint8", [1], b"a"]},
        {8: ["float32", [1.0], b"abcd"]},
        {8: ["float32", [1 << 62, 1 << 62, 0], b""]},
        {9: ["<i4", [2], b"abcd"]},
        {9: ["i4,(", [1], b""]},
        {9: ["O", [1], b"abcdefgh"]},
        {10: ["<i4", b""]},
    ],
)
def test_a_tree_that_is_no_value(tree: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="not an encoded value"):
        serialization.decode(msgspec.msgpack.encode(tree))


def test_values_that_are_nested_too_deep_are_refused() -> None:
    """Regression: tuples in a list, or a list that contained itself, passed the limit and raised RecursionError."""
    tuples: Any = 1
    for _ in range(300):
        tuples = (tuples,)
    lists: list[Any] = []
    lists.append(((lists,),))
    for value in (tuples, [tuples], lists, [lists]):
        with pytest.raises(ValueError, match="nested at most 100 levels"):
            serialization.encode(value)
