"""Records the results of ``jax.lax`` and of optimizers on JAX for given inputs, as ``jax_table.json`` in this folder.

    pip install jax==0.10.2                        # in an environment of its own; the tests need none
    python tests/data/jax_table.py

Uses four CPU devices, 64-bit types and XLA's defaults; reductions are also computed on one and on three devices. Each
case contains every device's input and the outputs: one output if all are equal. Floats are written by ``float.hex``, so
nothing is rounded, and complex numbers as pairs. "special" contains infinities, NaN and zeros of both signs in all
relevant orders. ``support/jax_table.py`` reads the table.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
from jax_functions import LOSSES, ON_MEMBERS  # noqa: E402 the path is set above

RANKS = 4
NAN, INF = float("nan"), float("inf")
SPECIAL = np.array(
    [
        [0.0, -0.0, -0.0, 0.0, NAN, NAN, 1.0, 1.0, NAN, NAN, INF, -INF, INF, 1.0],
        [-0.0, 0.0, -0.0, 0.0, NAN, 1.0, NAN, 2.0, INF, -INF, INF, -INF, -INF, INF],
        [-0.0, 0.0, -0.0, 0.0, NAN, 2.0, 2.0, 3.0, INF, -INF, INF, -INF, 1.0, 1.0],
        [-0.0, 0.0, -0.0, 0.0, NAN, 3.0, 3.0, NAN, INF, -INF, INF, -INF, 1.0, 1.0],
    ]
)


def leaf_to_json(leaf: Any) -> dict[str, Any]:
    array = np.asarray(leaf)
    flat = array.ravel()
    values = (flat.view(flat.real.dtype) if array.dtype.kind == "c" else flat).tolist()
    if array.dtype.kind in "fcV":  # V: bfloat16
        values = [float(value).hex() for value in values]
    return {"dtype": str(array.dtype), "shape": list(array.shape), "values": values}


def to_json(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {"dict": {key: to_json(value) for key, value in tree.items()}}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [to_json(value) for value in tree]}
    return leaf_to_json(tree)


def device(tree: Any, index: int) -> Any:
    return jax.tree_util.tree_map(lambda leaf: np.asarray(leaf)[index], tree)


def every_device(tree: Any, count: int = RANKS) -> list[Any]:
    return [to_json(device(tree, index)) for index in range(count)]


def any_device(tree: Any, count: int = RANKS) -> Any:
    first, *others = every_device(tree, count)
    assert all(other == first for other in others), "the results of the devices differ"
    return first


def numbers(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.normal(size=shape) * 10.0 ** generator.integers(-3, 6, shape)


def dyadic(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Return numbers with few bits, so that sums of products are exact in any order."""
    return generator.integers(-8, 9, shape) / 4.0


def population(generator: np.random.Generator) -> Any:
    def whole(dtype: type) -> np.ndarray:
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, (RANKS, 5), dtype=dtype, endpoint=True)  # most sums wrap around

    return {
        "float64": numbers(generator, RANKS, 3, 4),
        "float32": numbers(generator, RANKS, 6).astype(np.float32),
        "narrow": [generator.normal(size=(RANKS, 40)).astype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16)],
        "special": SPECIAL,
        "special narrow": [SPECIAL.astype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16)],
        "integers": [whole(dtype) for dtype in (np.int8, np.uint8, np.int16, np.int32, np.int64)],
        "bool": (generator.integers(0, 2, (RANKS, 2)).astype(bool), np.ones((RANKS, 1), dtype=bool)),
        "scalar": numbers(generator, RANKS),
        "empty": np.zeros((RANKS, 0, 2)),
    }


def reductions() -> list[dict[str, Any]]:
    cases = []
    tree = population(np.random.default_rng(1))
    for name, ranks in itertools.product(("psum", "pmean", "pmin", "pmax"), (1, 3, RANKS)):
        mine = jax.tree_util.tree_map(lambda leaf, n=ranks: leaf[:n], tree)
        if name in ("psum", "pmean"):
            mine["complex"] = [complex_numbers(dtype)[:ranks] for dtype in (np.complex64, np.complex128)]
        devices = jax.devices()[:ranks]
        run = jax.pmap(lambda x, name=name: getattr(lax, name)(x, "POP"), axis_name="POP", devices=devices)
        case = {"operation": name, "ranks": ranks}
        cases.append({**case, "inputs": every_device(mine, ranks), "output": any_device(run(mine), ranks)})
    return cases


def complex_numbers(dtype: Any) -> np.ndarray:
    generator = np.random.default_rng(6)
    drawn = numbers(generator, RANKS, 6) + 1j * numbers(generator, RANKS, 6)
    special = np.array([complex(INF, 1), complex(1, INF), complex(-0.0, -0.0), complex(NAN, 1)])
    return np.concatenate([drawn, np.broadcast_to(special, (RANKS, 4))], axis=1).astype(dtype)


def gathers() -> list[dict[str, Any]]:
    generator = np.random.default_rng(2)
    tree = {"a": numbers(generator, RANKS, 2, 3), "b": [generator.integers(-9, 9, (RANKS, 2, 2))]}
    cases = []
    for axis, tiled in ((0, False), (1, False), (-1, False), (0, True), (1, True), (-1, True)):
        run = jax.pmap(lambda x, a=axis, t=tiled: lax.all_gather(x, "POP", axis=a, tiled=t), axis_name="POP")
        case = {"operation": "all_gather", "axis": axis, "tiled": tiled}
        cases.append({**case, "inputs": every_device(tree), "output": any_device(run(tree))})
    return cases


def grids() -> list[dict[str, Any]]:
    """Return results for a grid of two by two devices: the sums of rows and of columns."""
    tree = {"a": numbers(np.random.default_rng(3), RANKS, 5)}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("POP", "DP"))
    spec = PartitionSpec(("POP", "DP"))
    cases = []
    for axis_name in ("POP", "DP"):
        run = jax.shard_map(lambda x, n=axis_name: lax.psum(x, n), mesh=mesh, in_specs=spec, out_specs=spec)
        found = run(jax.tree_util.tree_map(lambda leaf: leaf.reshape(-1), tree))
        found = jax.tree_util.tree_map(lambda leaf: leaf.reshape(RANKS, -1), found)
        cases.append({"axis_name": axis_name, "inputs": every_device(tree), "outputs": every_device(found)})
    return cases


def updates() -> list[dict[str, Any]]:
    """Return three steps of gradient descent, with and without momentum, on gradients averaged over the devices."""
    cases = []
    for loss, momentum, draw in (
        ("square_error", 0.0, dyadic),
        ("square_error", 0.5, dyadic),
        ("scaled_error", 0.0, numbers),
        ("scaled_error", 0.5, numbers),
    ):
        generator = np.random.default_rng(4)
        shape = (2, 3) if loss == "square_error" else (3,)
        x, y = draw(generator, RANKS, *shape), draw(generator, RANKS, shape[0])
        bias = draw(generator, 1 if loss == "square_error" else 3)
        params = {"weight": draw(generator, 3), "bias": bias}

        def step(params: Any, velocity: Any, x: Any, y: Any, loss: str = loss, momentum: float = momentum) -> Any:
            value, gradients = jax.value_and_grad(LOSSES[loss])(params, x, y)
            gradients = lax.pmean(gradients, "DP")
            velocity = jax.tree_util.tree_map(lambda v, g: v * momentum + g, velocity, gradients)
            params = jax.tree_util.tree_map(lambda p, v: p - v * 0.125, params, velocity)
            return value, params, velocity

        def replicated(tree: Any) -> Any:
            return jax.tree_util.tree_map(lambda leaf: np.stack([leaf] * RANKS), tree)

        run = jax.pmap(step, axis_name="DP")
        now, velocity = replicated(params), replicated(jax.tree_util.tree_map(np.zeros_like, params))
        outputs = []
        for _ in range(3):
            value, now, velocity = run(now, velocity, x, y)
            outputs.append({"value": value, "params": now})
        case = {"loss": loss, "momentum": momentum, "rate": 0.125, "params": to_json(params)}
        inputs = every_device({"x": x, "y": y})
        cases.append({**case, "inputs": inputs, "outputs": [every_device(output) for output in outputs]})
    return cases


def shards() -> list[dict[str, Any]]:
    """Return results for a population of eight on four devices, mapped and vectorised."""
    generator = np.random.default_rng(5)
    members = {"x": numbers(generator, 8, 3), "n": generator.integers(-99, 99, 8)}
    scale = numbers(generator, 3)
    mesh = Mesh(np.array(jax.devices()), ("POP",))
    split, same = PartitionSpec("POP"), PartitionSpec()
    cases = []
    for name, function in ON_MEMBERS.items():
        ways = {
            "shmap_vmap": jax.vmap(function, in_axes=(0, None)),
            "shmap_map": lambda m, s, f=function: lax.map(lambda one: f(one, s), m),
        }
        for way, run in ways.items():
            found = jax.shard_map(run, mesh=mesh, in_specs=(split, same), out_specs=split)(members, scale)
            case = {"operation": way, "function": name, "members": to_json(members), "scale": to_json(scale)}
            cases.append({**case, "output": to_json(jax.tree_util.tree_map(np.asarray, found))})
    return cases


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    table = {
        "made": f"by jax_table.py with jax {jax.__version__}, numpy {np.__version__}, {RANKS} CPU devices",
        "ranks": RANKS,
        "reductions": reductions(),
        "gathers": gathers(),
        "grids": grids(),
        "updates": updates(),
        "shards": shards(),
    }
    lines = ",\n".join(f'"{key}": {_rows(value)}' for key, value in table.items())
    (HERE / "jax_table.json").write_text("{\n" + lines + "\n}\n")


def _rows(value: Any) -> str:
    """Format one case per line."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in value) + "\n]"


main()
