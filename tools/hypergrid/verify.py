"""Verifies applied averages bit for bit, by recomputing them with numpy and without asyncdist.

On the ranks, an `EventWriter` stores each donor's snapshot and each replacer's new weights. It also reads the model,
and so detects an average that never reached the model, or a snapshot that differs from the model.
In the driver a `Verifier` recomputes each average as it appears: the sum over the donors in rank order, in float32 or
wider, of snapshot times weight (weight 1 multiplies nothing), divided by the sum of the weights (a sum of 1 divides
nothing), rounded once to the stored dtype; integers and bools as the best donor has them. A sum of finite values that
overflows is computed with weights scaled by 2^-64, and where the quotient is the one of donors that all equal the last
one, the average is that donor's value (`asyncdist.tensors.means` says why). All bytes must be equal.
Files of past rounds are deleted.
Dtypes that numpy does not have (bfloat16) are not supported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

ROUNDS_KEPT = 2
"""Number of rounds whose snapshots are kept: a replacer may apply after its donors have begun the next round."""

Array = np.ndarray[Any, np.dtype[Any]]
State = dict[str, Array]
"""A model's whole state: a 1-D array for each dtype, keyed by the dtype's name."""


class VerificationError(Exception):
    """Raised if an applied average is not the average of its donors' snapshots."""


# -- on the ranks -----------------------------------------------------------------------------------------------------


def read_model(model: torch.nn.Module) -> State:
    """Copy the model's parameters and persistent buffers into one array per dtype, each tied tensor once."""
    parts: dict[str, list[Array]] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for tensor in model.state_dict().values():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen:
            seen.add(key)
            parts.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor.reshape(-1).numpy())
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


class EventWriter:
    """An `on_event` callback that stores donated snapshots and applied averages.

    Args:
        directory: Folder of the files: `round000012-donor3.npz`, `round000012-replacer0.npz`.
        rank: This rank.
        model: The model that the policy averages.
    """

    def __init__(self, directory: Path, rank: int, model: torch.nn.Module) -> None:
        self._directory, self._rank, self._model = directory, rank, model

    def __call__(self, event: Any) -> None:
        """Store a `SnapshotTaken` or `AverageApplied` event, and ignore other events."""
        kind = {"SnapshotTaken": "donor", "AverageApplied": "replacer"}.get(type(event).__name__)
        if kind is None:
            return
        told = {name: tensor.numpy() for name, tensor in event.state.items()}
        state = read_model(self._model)
        header: dict[str, Any] = {"truthful": equal_bytes(told, state)}
        if kind == "replacer":
            header |= {"donors": list(event.donors), "weights": list(event.weights), "best": event.best}
        save(self._directory / f"round{event.round:06d}-{kind}{self._rank}.npz", header, state)


def save(path: Path, header: Mapping[str, Any], state: State) -> None:
    """Write a file atomically."""
    unfinished = path.with_suffix(".part")
    with open(unfinished, "wb") as file:
        np.savez(file, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **state)
    unfinished.rename(path)


def load(path: Path) -> tuple[dict[str, Any], State]:
    """Read a file that `save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        state = {name: file[name] for name in file.files}
    return json.loads(state.pop("header").tobytes()), state


# -- the arithmetic ---------------------------------------------------------------------------------------------------


def equal_bytes(one: State, other: State) -> bool:
    """Return whether two states are equal bit for bit (NaN equals itself, 0.0 is not -0.0)."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].tobytes() == other[name].tobytes() for name in one
    )


def average(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return the weighted mean of floating arrays of one dtype, as the module's docstring defines it."""
    stored = arrays[0].dtype
    if len(arrays) == 1:
        return arrays[0].copy()
    if np.issubdtype(stored, np.complexfloating):  # as real and imaginary parts
        parts = [np.ascontiguousarray(array).view(array.real.dtype) for array in arrays]
        return average(parts, weights).view(stored)
    wide = [array.astype(np.promote_types(stored, np.float32)) for array in arrays]
    mean = _quotient(wide, weights)
    is_of_equal = (mean == _quotient([wide[-1]] * len(wide), weights)) & (mean != wide[-1])
    return np.where(is_of_equal, wide[-1], mean).astype(stored)


def _quotient(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return the weighted sum divided by the sum of the weights."""
    kind, scale = arrays[0].dtype.type, 2.0**-64
    total, scaled, finite = np.zeros(0), np.zeros(0), np.isfinite(arrays).all(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        for place, (array, weight) in enumerate(zip(arrays, weights, strict=True)):
            product = array if weight == 1.0 else array * kind(weight)
            total = total + product if place else product
            scaled = scaled + array * kind(weight * scale) if place else array * kind(weight * scale)
        quotient = total if sum(weights) == 1.0 else total / kind(sum(weights))
        scaled = scaled / kind(sum(weights) * scale)
    result = np.where(np.isfinite(total) | ~finite, quotient, scaled)
    largest = np.finfo(kind).max
    return np.where(finite, np.clip(result, -largest, largest), result)


def check_average(applied: State, donors: Mapping[int, State], weights: Mapping[int, float], best: int) -> None:
    """Check that an applied state equals the average of its donors' snapshots.

    Args:
        applied: The replacer's state right after it applied.
        donors: Each donor's snapshot, by rank.
        weights: Each donor's weight, by rank, not normalised.
        best: The donor whose integers and bools are taken.

    Raises:
        VerificationError: They differ; the message names the first difference.
    """
    ranks = sorted(donors)
    for name, got in applied.items():
        if np.issubdtype(got.dtype, np.inexact):
            expected = average([donors[rank][name] for rank in ranks], [weights[rank] for rank in ranks])
        else:
            expected = donors[best][name]
        if not equal_bytes({name: got}, {name: expected}):
            raise VerificationError(f"{name}: {_first_difference(got, expected)}")


def _first_difference(got: Array, expected: Array) -> str:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.size} entries of {got.dtype} were applied, the donors gave {expected.size} of {expected.dtype}"
    width = got.dtype.itemsize
    bits = got.view(np.uint8).reshape(-1, width), expected.view(np.uint8).reshape(-1, width)
    where = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    return (
        f"{len(where)} of {got.size} entries are not the average of the donors' snapshots; the first is {where[0]}: "
        f"applied {got[where[0]].item()!r}, recomputed {expected[where[0]].item()!r}"
    )


# -- in the driver ----------------------------------------------------------------------------------------------------


class Verifier:
    """Checks the averages in a directory as they appear.

    Attributes:
        verified_count: Number of averages found correct.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.verified_count = 0

    def poll(self) -> None:
        """Check the new averages, then delete their files and the snapshots of old rounds.

        Raises:
            VerificationError: An average is wrong; names round and rank.
        """
        newest = 0
        for path in sorted(self._directory.glob("round*.npz")):
            match = re.fullmatch(r"round(\d+)-(donor|replacer)(\d+)\.npz", path.name)
            if match is None:
                continue
            number, rank = int(match[1]), int(match[3])
            newest = max(newest, number)
            if match[2] == "replacer":
                try:
                    self._check(path, number)
                except VerificationError as error:
                    raise VerificationError(f"round {number}, rank {rank}: {error}") from None
                self.verified_count += 1
                path.unlink()
        for path in self._directory.glob("round*-donor*.npz"):
            if int(path.name[5:11]) <= newest - ROUNDS_KEPT:
                path.unlink()

    def _check(self, path: Path, number: int) -> None:
        header, applied = load(path)
        if not header["truthful"]:
            raise VerificationError("the state that the policy reported as applied differs from the model")
        donors: dict[int, State] = {}
        for rank in header["donors"]:
            snapshot = self._directory / f"round{number:06d}-donor{rank}.npz"
            if not snapshot.exists():
                raise VerificationError(f"its donor {rank} never took a snapshot in that round")
            told, donors[rank] = load(snapshot)
            if not told["truthful"]:
                raise VerificationError(f"the snapshot of its donor {rank} differs from that rank's model")
        weights = dict(zip(header["donors"], header["weights"], strict=True))
        check_average(applied, donors, weights, header["best"])
