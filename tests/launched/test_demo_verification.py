"""Tests that the demo checks each average by separate arithmetic. There is no training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from asyncdist.tensors.means import WeightedMean
from protocols import AverageApplied, SnapshotTaken

HYPERGRID = Path(__file__).resolve().parents[2] / "tools" / "hypergrid"
sys.path.insert(0, str(HYPERGRID))
import verify  # noqa: E402

sys.path.remove(str(HYPERGRID))


def floats(*values: float, dtype: str = "float32") -> verify.Array:
    """Return a 1-D array."""
    return np.array(values, dtype=dtype)


def test_the_average_is_that_of_hand_arithmetic() -> None:
    assert verify.average([floats(1, 2), floats(3, 4), floats(5, 9)], [1.0, 1.0, 1.0]).tolist() == [3.0, 5.0]
    assert verify.average([floats(1, 2), floats(3, 4)], [0.25, 0.75]).tolist() == [2.5, 3.5]
    assert verify.average([floats(-0.0)], [1.0]).tobytes() == floats(-0.0).tobytes()


def test_half_precision_is_summed_in_single() -> None:
    # In float16 the sum would be infinite, since the largest number is 65504.
    assert verify.average([floats(60000, dtype="float16")] * 3, [1.0] * 3).tolist() == [60000.0]


@given(
    st.integers(1, 5).flatmap(
        lambda count: st.tuples(
            st.lists(st.floats(0.01, 100, allow_nan=False), min_size=count, max_size=count), st.integers(0, 2**32 - 1)
        )
    ),
    st.sampled_from(["float16", "float32", "float64"]),
)
def test_two_ways_to_the_same_bits(case: tuple[list[float], int], dtype: str) -> None:
    """The runtime's torch arithmetic and the check's numpy arithmetic agree to the bit, whatever the weights."""
    weights, seed = case
    arrays = [np.random.default_rng([seed, rank]).normal(size=33).astype(dtype) for rank in range(len(weights))]
    for array in arrays:
        array[:11] = arrays[0][:11]  # frozen
        array[11:15] = np.clip(array[11:15], -1, 1) * np.finfo(dtype).max  # the sum of these values overflows
    wide = torch.float64 if dtype == "float64" else torch.float32
    total, mean = torch.zeros(33, dtype=wide), WeightedMean(len(arrays))
    for array, weight in zip(arrays, weights, strict=True):
        mean.begin(weight)
        mean.add(total, torch.from_numpy(array))
    theirs = total.to(torch.from_numpy(arrays[0]).dtype).numpy()
    assert verify.average(arrays, weights).tobytes() == theirs.tobytes()


class Model(torch.nn.Module):
    """A model with tied weights, two dtypes and an integer buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2, bias=False)
        self.second = torch.nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("wide", torch.tensor([value], dtype=torch.float64))
        self.register_buffer("count", torch.tensor(int(value)))
        torch.nn.init.constant_(self.first.weight, value)


def told(model: Model) -> dict[str, torch.Tensor]:
    """Return the flat state that a policy would report."""
    return {name: torch.from_numpy(array) for name, array in verify.read_model(model).items()}


def play_round(
    directory: Path, number: int, *, wrong32: float = 0.0, wrong64: float = 0.0, lie: bool = False, lose: int = -1
) -> None:
    """Simulate a round: ranks 1, 2 and 3 donate (3 is the best), and rank 0 takes the mean, exactly or not.

    The donor `lose` leaves no trace.
    """
    donors = {rank: Model(float(rank)) for rank in (1, 2, 3)}
    for rank, model in donors.items():
        if rank != lose:
            event = SnapshotTaken(round=number, iteration=9, state=told(model))
            verify.EventWriter(directory, rank, model)(event)
    replacer = Model(2.0)
    replacer.count.fill_(3)
    reported = told(replacer)
    with torch.no_grad():
        replacer.wide += wrong64
        replacer.first.weight[1, 1] += wrong32
    verify.EventWriter(directory, 0, replacer)(
        AverageApplied(
            round=number,
            donors=(1, 2, 3),
            weights=(1.0, 1.0, 1.0),
            best=3,
            iteration=9,
            state=reported if lie else told(replacer),
        )
    )


def test_a_right_average_passes(tmp_path: Path) -> None:
    play_round(tmp_path, 1)
    verifier = verify.Verifier(tmp_path)
    verifier.poll()
    verifier.poll()
    assert verifier.verified_count == 1


def test_a_state_counts_tied_weights_once() -> None:
    state = verify.read_model(Model(1.0))
    assert {name: array.size for name, array in state.items()} == {"float32": 4, "float64": 1, "int64": 1}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"wrong32": 1e-6}, r"float32: 1 of 4 entries .* the first is 3: applied .*2\.00000\d+.*, recomputed .*2\.0"),
        ({"wrong64": 1e-15}, r"float64: 1 of 1 entries .* the first is 0: applied"),
        ({"wrong32": 1.0, "lie": True}, r"the state that the policy reported as applied differs from the model"),
        ({"lose": 2}, r"its donor 2 never took a snapshot"),
    ],
)
def test_a_wrong_average_is_caught(tmp_path: Path, options: dict[str, Any], wanted: str) -> None:
    play_round(tmp_path, 7, **options)
    with pytest.raises(verify.VerificationError, match=f"round 7, rank 0: {wanted}"):
        verify.Verifier(tmp_path).poll()


def test_integers_are_the_best_donors() -> None:
    state = {"int64": np.array([5])}
    donors = {1: {"int64": np.array([4])}, 2: {"int64": np.array([5])}}
    verify.check_average(state, donors, {1: 1.0, 2: 1.0}, best=2)
    with pytest.raises(verify.VerificationError, match="int64"):
        verify.check_average(state, donors, {1: 1.0, 2: 1.0}, best=1)


def test_a_donor_that_gives_what_its_model_never_held_is_caught(tmp_path: Path) -> None:
    play_round(tmp_path, 1)
    model = Model(1.0)
    verify.EventWriter(tmp_path, 1, model)(SnapshotTaken(round=1, iteration=9, state=told(Model(4.0))))
    with pytest.raises(verify.VerificationError, match="snapshot of its donor 1 differs from that rank's model"):
        verify.Verifier(tmp_path).poll()


def test_the_check_leaves_little_on_the_disk(tmp_path: Path) -> None:
    verifier = verify.Verifier(tmp_path)
    for number in range(1, 21):
        play_round(tmp_path, number)
        verifier.poll()
        assert len(list(tmp_path.iterdir())) <= 3 * verify.ROUNDS_KEPT
    assert verifier.verified_count == 20
