"""Reads JAX's results from ``data/jax_table.json`` and compares asyncdist's results with them.

``data/jax_table.py`` describes the recording, on four devices, and for reductions also on one and three. ``model``
computes the same results for any number of ranks.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import optree
import torch

import asyncdist as ad
from support.jax_functions import LOSSES, ON_MEMBERS

RANKS = 4
OPERATIONS = {"psum": ad.psum, "pmean": ad.pmean, "pmin": ad.pmin, "pmax": ad.pmax}


@functools.cache
def table() -> dict[str, Any]:
    path = Path(__file__).resolve().parents[1] / "data" / "jax_table.json"
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["ranks"] == RANKS
    return found


def tree(recorded: Any) -> Any:
    """Return a tree of tensors from its JSON."""
    if "dict" in recorded:
        return {key: tree(value) for key, value in recorded["dict"].items()}
    if "list" in recorded:
        return [tree(value) for value in recorded["list"]]
    if "tuple" in recorded:
        return tuple(tree(value) for value in recorded["tuple"])
    values = [float.fromhex(value) if isinstance(value, str) else value for value in recorded["values"]]
    dtype = getattr(torch, recorded["dtype"])
    if dtype.is_complex:
        return torch.tensor(values, dtype=dtype.to_real()).view(dtype).reshape(recorded["shape"])
    return torch.tensor(values, dtype=dtype).reshape(recorded["shape"])


def assert_equal(found: Any, expected: Any, *, ulps: int = 0) -> None:
    """Assert equal structure, dtypes and shapes, and values within the given units in the last place."""
    assert optree.tree_structure(found) == optree.tree_structure(expected)
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True)
    for mine, theirs in pairs:
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        one, two = _numbers(mine), _numbers(theirs)
        if one.dtype.kind != "f":
            assert np.array_equal(one, two), (mine, theirs)
            continue
        assert np.array_equal(np.isnan(one), np.isnan(two)), (mine, theirs)
        if ulps == 0:
            numbers = ~np.isnan(one)
            assert one[numbers].tobytes() == two[numbers].tobytes(), (mine, theirs)
        else:
            np.testing.assert_array_max_ulp(one, two, maxulp=ulps)


def _numbers(leaf: torch.Tensor) -> Any:
    """Convert to numpy: bfloat16 to float32, complex numbers to pairs."""
    real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    return (real.float() if real.dtype == torch.bfloat16 else real).numpy()


def model(operation: str, parts: list[Any]) -> Any:
    """Return the result of a reduction in plain numpy: leaf by leaf, in rank order."""
    rows = zip(*(optree.tree_leaves(part) for part in parts), strict=True)
    return optree.tree_unflatten(optree.tree_structure(parts[0]), [_reduced_leaf(operation, row) for row in rows])


def _reduced_leaf(operation: str, row: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if row[0].dtype != torch.bfloat16:
        return torch.from_numpy(_reduced(operation, [leaf.numpy() for leaf in row]))
    if operation != "pmean" or len(row) == 1:
        return torch.from_numpy(_reduced(operation, [_numbers(leaf) for leaf in row])).bfloat16()
    return torch.from_numpy(_numbers(_reduced_leaf("psum", row)) / np.float32(len(row))).bfloat16()


def _reduced(operation: str, parts: list[Any]) -> Any:
    dtype = parts[0].dtype
    with np.errstate(all="ignore"):
        if len(parts) == 1:
            return parts[0].astype(_dtype_of(operation, dtype))
        if operation in ("pmin", "pmax"):
            limit = np.inf if operation == "pmin" else -np.inf
            found = np.where(np.isnan(parts[0]), dtype.type(limit), parts[0]) if dtype.kind == "f" else parts[0]
            for part in parts[1:]:
                found = np.where(part < found if operation == "pmin" else part > found, part, found)
            return np.asarray(found, dtype=dtype)
        total = np.zeros(parts[0].shape, dtype=np.int32 if dtype.kind == "b" else dtype)
        for part in parts:
            total = np.asarray(total + part.astype(total.dtype), dtype=total.dtype)
        if operation == "psum":
            return total
        wide = _dtype_of(operation, dtype)
        one, count = wide.type(1).real, wide.type(len(parts)).real
        return np.asarray(total.astype(wide) * wide.type(one / count), dtype=wide)


def _dtype_of(operation: str, dtype: Any) -> Any:
    """Return the dtype of the result."""
    if operation in ("pmin", "pmax") or dtype.kind in "fc":
        return dtype
    if operation == "psum":
        return np.dtype(np.int32) if dtype.kind == "b" else dtype
    return np.dtype(np.float64 if dtype == np.int64 else np.float32)


async def check_reductions(world: ad.World) -> None:
    """Compare with the table for its numbers of ranks. For other numbers, compare with the model."""
    cases = table()["reductions"]
    recorded = world.size if any(case["ranks"] == world.size for case in cases) else RANKS
    with await ad.new_mesh({"POP": world.size}):
        for case in cases:
            if case["ranks"] == recorded:
                parts = [tree(part) for part in case["inputs"]][: world.size]
                found = await OPERATIONS[case["operation"]](parts[world.rank], "POP")
                expected = tree(case["output"]) if recorded == world.size else model(case["operation"], parts)
                assert_equal(found, expected)


async def check_gathers(world: ad.World) -> None:
    """Compare with the table's first ranks for any number of ranks, and with the whole table for four."""
    with await ad.new_mesh({"POP": world.size}):
        for case in table()["gathers"]:
            parts = [tree(part) for part in case["inputs"]][: world.size]
            found = await ad.all_gather(parts[world.rank], "POP", axis=case["axis"], tiled=case["tiled"])
            join = torch.cat if case["tiled"] else torch.stack
            joined = optree.tree_map(lambda *leaves, j=join, dim=case["axis"]: j(leaves, dim=dim), *parts)
            assert_equal(found, joined)
            if world.size == RANKS:
                assert_equal(found, tree(case["output"]))


async def check_grid(world: ad.World) -> None:
    """Check sums along the rows and columns of two by two ranks."""
    with await ad.new_mesh({"POP": 2, "DP": 2}):
        for case in table()["grids"]:
            found = await ad.psum(tree(case["inputs"][world.rank]), case["axis_name"])
            assert_equal(found, tree(case["outputs"][world.rank]))


class Descent:
    """Gradient descent with momentum, as a functional optimizer."""

    def __init__(self, rate: float, momentum: float) -> None:
        self._rate = rate
        self._momentum = momentum

    def init(self, params: Any, /) -> Any:
        return optree.tree_map(torch.zeros_like, params)

    def update(self, gradients: Any, velocity: Any, /, *, params: Any) -> tuple[Any, Any]:
        velocity = optree.tree_map(lambda v, g: v * self._momentum + g, velocity, gradients)
        return optree.tree_map(lambda v: -v * self._rate, velocity), velocity


async def check_updates(world: ad.World, *, in_place: bool) -> None:
    """Check gradients averaged over four ranks, with torch's optimizer or a functional one."""
    with await ad.new_mesh({"DP": RANKS}):
        for case in table()["updates"]:
            loss, data, params = LOSSES[case["loss"]], tree(case["inputs"][world.rank]), tree(case["params"])
            optimizer: Any = Descent(case["rate"], case["momentum"])
            state = optimizer.init(params)
            if in_place:
                params = optree.tree_map(lambda leaf: leaf.requires_grad_(), params)
                leaves: Any = params.values()
                optimizer = torch.optim.SGD(leaves, lr=case["rate"], momentum=case["momentum"])
            step = ad.gradient_update(loss, optimizer, "DP")
            for outputs in case["outputs"]:
                given = params
                value, params, state = await step(state, params, data["x"], data["y"])
                assert (params is given) == in_place
                found = {"value": value, "params": optree.tree_map(torch.detach, params)}
                assert_equal(found, tree(outputs[world.rank]), ulps=1)


async def check_shards(world: ad.World) -> None:
    """Check a population of eight, two on each rank."""
    mesh = await ad.new_mesh({"POP": RANKS})
    for case in table()["shards"]:
        run = getattr(ad, case["operation"])(ON_MEMBERS[case["function"]], mesh, ("POP", None), "POP")
        assert_equal(await run(tree(case["members"]), tree(case["scale"])), tree(case["output"]), ulps=1)
