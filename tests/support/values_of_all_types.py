"""Values of every type that can be sent, values that cannot, and a comparison of type, content, order and bits."""

from __future__ import annotations

import collections
import enum
import struct
from typing import Any

import numpy as np
import torch
from torch import nn

from support import odd_tensors


def same(one: Any, two: Any) -> bool:
    """Return whether two values are equal in type and content, at every depth."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return odd_tensors.same(one, two)
    if isinstance(one, (np.ndarray, np.generic)):
        return bool(one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes())
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", two)
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, dict):
        return len(one) == len(two) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(one.items(), two.items(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(v, w) for v, w in zip(one, two, strict=True))
    if isinstance(one, (set, frozenset)):
        return canonical(one) == canonical(two)
    return bool(one == two)


def canonical(value: Any) -> str:
    """Return a string for a hashable value that does not depend on the order of its sets."""
    if isinstance(value, tuple):
        return f"({', '.join(map(canonical, value))},)"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}{sorted(map(canonical, value))}"
    return repr(value)


def _tensors() -> list[torch.Tensor]:
    numbers = torch.arange(-3, 9)
    names = "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64"
    found = [numbers.abs().to(getattr(torch, name)).reshape(3, 4) for name in names.split()]
    found += [numbers.to(getattr(torch, name)) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]
    found += [torch.tensor(float("nan")), torch.empty(0), torch.empty(2, 0, 3, dtype=torch.int16)]
    found += [torch.arange(12.0).reshape(3, 4).t(), torch.arange(12.0)[::3], torch.ones(1).expand(5)]
    found += [tensor for name, tensor in odd_tensors.ODD.items() if name != "a parameter"]
    return [*found, torch.ones(3, requires_grad=True)]


#: ints beyond float32, float64 and 64 bits, both sides of every limit of the encoding.
INTS = [
    sign * (1 << power) + step
    for sign in (1, -1)
    for power in (0, 7, 24, 31, 53, 63, 64, 65, 200)
    for step in (-1, 0, 1)
]
FLOATS = [0.0, -0.0, 1.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), -float("inf"), float("nan")]
TEXTS = ["", "naïve", "漢字 😀", "line\nbreak\0nul", "\ud800 alone"]
VALUES: list[Any] = [
    None,
    True,
    False,
    INTS,
    FLOATS,
    TEXTS,
    1,
    1.0,
    2**24 + 1,
    10**30,
    "text",
    b"",
    b"\x00\xff",
    bytearray(b"abc"),
    complex(-0.0, float("inf")),
    [],
    (),
    {},
    set(),
    frozenset(),
    [1, [2, (3, [4.0, (True, None)])]],
    (1,),
    [(), [()], {}],
    {1: "one", "1": 1, (1, 2): [1], 0: None, None: {}, b"k": {2.5: ()}, frozenset({1}): -1},
    {0: 1},
    {6: ["float32", [1], b"abcd"]},
    {"b": 1, "a": 2},
    {1, "a", (2, 3)},
    frozenset({b"x", None}),
    np.float64(0.1),
    np.float32(-0.0),
    np.int8(-3),
    np.bool_(True),
    np.complex128(1 - 2j),
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((0, 4), dtype=np.float16),
    np.array(5),
    *_tensors(),
    {"state": {"weight": torch.arange(4.0), "step": 3}, "shape": (2, 2)},
]
#: Values that cannot be sent with an outcome.
LARGE: list[Any] = [
    list(range(5000)),
    "x" * 100_000,
    torch.arange(300_000, dtype=torch.float64),
    {index: str(index) for index in range(3000)},
    2**20_000,
]


class Colour(enum.IntEnum):
    RED = 1


class Named(collections.namedtuple("Named", "a b")):
    pass


class Own:
    pass


def _endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


#: Expected text of the error.
UNSUPPORTED: list[tuple[Any, str]] = [
    (Own(), "Own"),
    ({"a": [1, Own()]}, "['a'][1]"),
    (Colour.RED, "Colour"),
    (Named(1, 2), "Named"),
    (collections.OrderedDict(a=1), "collections.OrderedDict"),
    ((len,), "builtin_function_or_method"),
    (nn.Parameter(torch.ones(1)), "Parameter"),
    (torch.ones(2, device="meta"), "meta"),
    (torch.ones(2, 2).to_sparse(), "sparse"),
    (np.array(["text"]), "<U4"),
    (np.array([None]), "object"),
    (range(3), "range"),
    (_endless(), "100 levels"),
    ({Own(): 1}, "Own"),
]
