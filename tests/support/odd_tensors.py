"""Dense tensors with unusual memory layouts, and their comparison."""

from __future__ import annotations

import torch


def odd_tensors() -> dict[str, torch.Tensor]:
    """Return new tensors, each with its own memory."""
    column = torch.arange(6.0).reshape(3, 2)[:1, 1]  # one element and stride 2, which torch calls contiguous

    def pair() -> torch.Tensor:
        return torch.tensor([[1 + 2j, -3j], [0.5, -1 - 1j]])

    found: dict[str, torch.Tensor] = {
        "one row of a column": column,
        "one row of a column of bfloat16": torch.arange(6).bfloat16().reshape(3, 2)[:1, 1],
        "one row of two columns of complex": torch.arange(12).to(torch.complex64).reshape(3, 4)[:1, ::2],
        "one row of an image": torch.arange(12.0).reshape(3, 2, 2)[:1, :, :1],
        "expanded": torch.tensor([[3.0]]).expand(2, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "channels last": torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
        "every second": torch.arange(7.0)[::2],
        "conjugated": pair().conj(),
        "one conjugated": pair()[:1, 0].conj(),
        "negated": pair().conj().imag,
        "one negated": pair().conj().imag[:1, 1],
        "half of a conjugated": pair().to(torch.complex128).conj().t()[:1],
        "no rows": torch.empty(0, 3),
        "no columns": torch.empty(3, 0, dtype=torch.int16),
        "a parameter": torch.nn.Parameter(torch.arange(4.0).reshape(2, 2).t()),
        "bool": torch.tensor([[True], [False]]),
        "bfloat16": torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.bfloat16),
        "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
        "uint64": torch.tensor([0, 2**64 - 1], dtype=torch.uint64),
    }
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        found[name] = torch.tensor([[-1.5, 0.25], [2.0, 0.0]]).to(getattr(torch, name))
        found[f"one row of a column of {name}"] = found[name].clone()[:1, 1]
    return found


#: All of these tensors have at least one dimension.
ODD = odd_tensors()


def not_dense() -> dict[str, torch.Tensor]:
    """Make tensors without plain values in memory, by a word of the error that refuses them.

    torch imports its compiler for a jagged tensor, which takes seconds.
    """
    return {
        "meta": torch.ones(2, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    }


def bits(tensor: torch.Tensor) -> bytes:
    """Return the values' bytes, copied by torch to a plain tensor."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether dtype, shape and bits are equal."""
    return (one.dtype, one.shape) == (two.dtype, two.shape) and bits(one) == bits(two)
