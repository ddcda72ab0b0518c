"""Tests the contents of a replay buffer and its sampling, against numpy and by counting."""

from __future__ import annotations

import re
import tracemalloc
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support.odd_tensors import ODD, same

from protocols.replay_buffer.store import ReplayStore, RowLayout

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def rows_of(values: list[int]) -> Any:
    return np.asarray(values, np.int64).reshape(-1, 1).view(np.uint8)


def values_of(rows: Any) -> list[int]:
    return [int(value) for value in np.ascontiguousarray(rows).view(np.int64).reshape(-1)]


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (1, 2, 2), (4, 0), (0, 5), (2, 1)])
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    batch = torch.randint(0, 2, shape).to(dtype)
    layout = RowLayout.of(batch)
    rows = layout.pack(batch)
    assert rows.shape == (shape[0], layout.nbytes)
    back = layout.unpack(rows)
    assert isinstance(back, torch.Tensor)
    assert back.dtype == dtype
    assert torch.equal(back, batch)
    assert back.numel() == 0 or back.data_ptr() != batch.data_ptr()


def test_dicts_and_tuples_keep_their_form_names_and_order() -> None:
    state, reward = torch.arange(6.0).view(3, 2).t().contiguous().t(), torch.tensor([1, 2, 3], dtype=torch.int16)
    named = {"state": state, "reward": reward}
    layout = RowLayout.of(named)
    assert layout.nbytes == 10
    back = layout.unpack(layout.pack(named)[1:])
    assert isinstance(back, dict)
    assert list(back) == ["state", "reward"]
    assert torch.equal(back["state"], state[1:])
    assert torch.equal(back["reward"], reward[1:])
    pair = RowLayout.of((state, reward))
    back = pair.unpack(pair.pack((state, reward)))
    assert isinstance(back, tuple)
    assert torch.equal(back[1], reward)


def test_dicts_with_equal_keys_in_another_order_are_alike() -> None:
    first = {"state": torch.arange(6.0).view(3, 2), "reward": torch.tensor([1, 2, 3], dtype=torch.int16)}
    other = {"reward": first["reward"], "state": first["state"]}
    one, two = RowLayout.of(first), RowLayout.of(other)
    assert one.difference(two) is None
    assert one.fits(other)
    assert one.pack(other).tobytes() == one.pack(first).tobytes() == two.pack(first).tobytes()
    back = two.unpack(one.pack(first))
    assert isinstance(back, dict)
    assert list(back) == ["reward", "state"]
    assert torch.equal(back["state"], first["state"])


@pytest.mark.parametrize("name", ODD)
def test_a_batch_of_an_odd_layout_is_stored(name: str) -> None:
    batch = ODD[name]
    layout = RowLayout.of(batch)
    back = layout.unpack(layout.pack(batch))
    assert isinstance(back, torch.Tensor)
    assert same(back, batch)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.ones(2, 3), "a batch is a tensor here and a dict there"),
        ({"a": torch.ones(2, 3)}, "'b' is missing"),
        ({"a": torch.ones(2, 4), "b": torch.ones(2)}, r"a: float32 \(4,\) here and a: float32 \(3,\) there"),
        ({"a": torch.ones(2, 3).double(), "b": torch.ones(2)}, "a: float64"),
        ({"a": torch.ones(2, 3), "b": torch.ones(2), "c": torch.ones(2)}, "'c' is unknown there"),
    ],
)
def test_the_first_difference_is_named(other: Any, words: str) -> None:
    layout = RowLayout.of({"a": torch.ones(5, 3), "b": torch.ones(5)})
    difference = layout.difference(RowLayout.of(other))
    assert difference is not None
    assert re.search(words, difference), difference
    assert not layout.fits(other)


def test_a_batch_that_fits_is_known_at_once() -> None:
    layout = RowLayout.of({"a": torch.ones(5, 3), "b": torch.ones(5)})
    assert layout.fits({"a": torch.ones(7, 3), "b": torch.ones(7)})
    assert not layout.fits({"a": torch.ones(7, 3), "b": torch.ones(6)})
    assert not layout.fits({"a": torch.ones(7, 3), "b": None})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ("text", "batch must be a tensor, a tuple of tensors, or a dict that maps names to tensors, got a str"),
        (3, "got a int"),
        ({}, "batch must have at least one tensor, got no tensor"),
        ((), "at least one tensor"),
        (torch.tensor(1.0), "batch must have a leading dimension with one row for each item, got a tensor without"),
        ({"x": torch.ones(2), "y": torch.ones(3)}, r"got x \(2,\), y \(3,\)"),
        ({"x": [1, 2]}, r"batch\['x'\] must be a dense tensor, got a list"),
        ({1: torch.ones(1)}, "the keys of batch must be strings, got 1"),
        ((torch.ones(2).to_sparse(),), r"batch\['0'\] must be a dense tensor, got a sparse tensor \(sparse_coo\)"),
        (torch.ones(2, device="meta"), "batch .*meta"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        RowLayout.of(batch)


# -- the store --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 7), st.sampled_from([None, 0.7]))
def test_it_holds_the_last_ones_and_gives_nothing_else(sizes: list[int], capacity: int, alpha: float | None) -> None:
    store = ReplayStore(capacity, alpha=alpha, seed=1)
    model: deque[int] = deque(maxlen=capacity)
    count = 0
    for size in sizes:
        values = list(range(count, count + size))
        count += size
        model.extend(values)
        store.add(rows_of(values))
        assert store.size == len(model)
        assert store.evicted_count == count - len(model)
        if model:
            drawn = store.sample(64)
            assert set(values_of(drawn.rows)) <= set(model)
            assert values_of(drawn.rows) == drawn.ids.tolist(), (
                "ids must number the items in the order of their arrival"
            )
            assert (drawn.weights == 1).all()


def test_uniform_draws_are_uniform_and_repeat_with_the_seed() -> None:
    def draws(seed: int) -> list[int]:
        store = ReplayStore(10, alpha=None, seed=seed)
        store.add(rows_of(list(range(10))))
        return values_of(store.sample(20_000).rows)

    assert draws(1) == draws(1) != draws(2)
    counts = np.bincount(draws(1))
    assert len(counts) == 10
    assert (abs(counts - 2000) < 5 * 2000**0.5).all(), counts


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 2000])
def test_prioritised_draws_follow_the_priorities(count: int) -> None:
    store = ReplayStore(count, alpha=0.5, seed=3)
    priorities = np.arange(count, dtype=np.float64) % 5
    store.add(rows_of(list(range(count))), priorities)
    drawn = store.sample(60_000, beta=0.7)
    chances = np.sqrt(priorities)
    chances /= chances.sum()
    assert not (priorities[drawn.ids] == 0).any(), "an item with priority 0 must never be drawn"
    for level in range(1, 5):
        expected = 60_000 * chances[priorities == level].sum()
        assert abs((priorities[drawn.ids] == level).sum() - expected) < 6 * expected**0.5
    # Schaul et al., section 3.4: (N * P)^-beta, over the largest
    weights = (count * chances[drawn.ids]) ** -0.7 / (count * chances[chances > 0].min()) ** -0.7
    assert np.allclose(drawn.weights, weights, rtol=1e-12)
    assert drawn.weights.max() <= 1.0


def test_new_items_have_the_largest_priority_and_updates_count() -> None:
    store = ReplayStore(4, alpha=1.0, seed=0)
    store.add(rows_of([0, 1]), np.array([8.0, 0.0]))
    store.add(rows_of([2]))
    drawn = values_of(store.sample(4000).rows)
    assert 1 not in drawn
    assert abs(drawn.count(2) - 2000) < 200
    assert store.update(np.array([0, 1, 2, 3, 77]), np.array([0.0, 1.0, 0.0, 9.0, 9.0])) == 2, (
        "two of the ids do not exist, and must not be counted"
    )
    assert set(values_of(store.sample(100).rows)) == {1}
    store.add(rows_of([3, 4, 5]), np.array([0.0, 0.0, 3.0]))
    assert store.update(np.array([0, 1]), np.array([5.0, 5.0])) == 2, (
        "two of the items were removed, and must not be counted"
    )
    assert set(values_of(store.sample(100).rows)) == {5}


def test_nothing_can_be_drawn_where_nothing_has_a_chance() -> None:
    store = ReplayStore(4, alpha=1.0, seed=0)
    store.add(rows_of([0, 1]), np.zeros(2))
    with pytest.raises(ValueError, match="at least one priority must be > 0, got only zeros"):
        store.sample(1)


def test_alpha_zero_is_uniform() -> None:
    store = ReplayStore(3, alpha=0.0, seed=0)
    store.add(rows_of([0, 1, 2]), np.array([1.0, 100.0, 0.5]))
    counts = np.bincount(values_of(store.sample(30_000).rows))
    assert (abs(counts - 10_000) < 600).all()


def test_number_between_two_blocks_draws_no_zero_priority_item() -> None:
    """0.1 + 0.2 - 0.2 > 0.1, so the second block seemed to begin after the number, at an item with priority zero."""
    store = ReplayStore(1024, alpha=1.0, seed=0)
    priorities = np.zeros(1024)
    priorities[[0, 513]] = 0.1, 0.2
    store.add(rows_of(list(range(1024))), priorities)
    assert store._priorities is not None
    total = 0.1 + 0.2
    edge = 0.1 / total
    near = np.array([edge, np.nextafter(edge, 0), np.nextafter(edge, 1)])
    assert 0.1 in near * total
    assert set(store._priorities.draw(near).tolist()) <= {0, 513}


def test_priorities_without_a_sum_are_refused_and_not_stored() -> None:
    store = ReplayStore(4, alpha=2.0, seed=0)
    store.add(rows_of([0, 1]), np.array([1e150, 1.0]))
    for wrong in (1e160, 1.3e154):
        with pytest.raises(
            ValueError,
            match=rf"sum of 4 priorities raised to alpha=2\.0 is finite, got {re.escape(repr(wrong))}",
        ):
            store.add(rows_of([2]), np.array([wrong]))
        with pytest.raises(ValueError, match="sum"):
            store.update(np.array([1]), np.array([wrong]))
    assert store.size == 2
    assert set(values_of(store.sample(100).rows)) == {0}


def test_a_large_prioritised_draw_needs_little_memory() -> None:
    """Regression: each drawn item needed 12 KB for a moment, so that a draw of 65,536 items took 800 MB."""
    store = ReplayStore(100_000, alpha=0.6, seed=3)
    store.add(np.zeros((100_000, 1), np.uint8), np.linspace(0.0, 1.0, 100_000))
    tracemalloc.start()
    try:
        store.sample(65_536)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 20_000_000
