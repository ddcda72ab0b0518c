"""Gathers data whose size differs between ranks: tensors with different first dimensions, or lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch

from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.error_exchange import (
    Call,
    attempt,
    exchange_headers,
    raise_first_error,
    run_and_raise,
)
from asyncdist.collectives.groups import Group
from asyncdist.errors import DisagreementError
from asyncdist.functional.collectives import resolve_group
from asyncdist.functional.main_process import check_world_size
from asyncdist.runtime.world import World
from asyncdist.tensors import serialization
from asyncdist.tensors.byte_views import dtype_name, flat_bytes, oddity_of

#: Kind, dtype and shape of a member's data.
_Description: TypeAlias = tuple[str, str, list[int]]

_ALLOWED: Final = "the data to gather must be a dense tensor with at least one dimension, or a list"


async def gather_distributed_data(
    local_tensor: torch.Tensor | list[Any],
    world_size: int | None = None,
    rank: int | None = None,
    training_group: Group | None = None,
    *,
    world: World | None = None,
) -> torch.Tensor | list[Any] | None:
    """Concatenate every member's data, in the group's order, on the group's first rank. Other ranks get None.

    Args:
        local_tensor: Dense tensor of shape (n, ...), of any dtype, on any device. n may be 0 and may differ between
            members. The other dimensions and the dtype must be equal. Alternatively, on all members, a list of values
            that can be sent (:data:`asyncdist.tensors.serialization.ALLOWED`). The result is a list, or a tensor on the
            first rank's device.
        world_size, rank: None, or the group's size and this rank, for compatibility with torchgfn.
        training_group: Ranks that take part, by default all.
        world: World of the call, by default the current one.

    Raises:
        DisagreementError: Trailing dimensions or dtypes differ, or only some members pass a list. Every member raises
            the error, which names two ranks that differ.
        TypeError, ValueError: This rank's data is not a tensor or list, or an argument is wrong. The other members get
            RemoteError.
        LocalProtocolError: This rank is not in the group.
    """
    world, group = resolve_group(world, training_group)

    def check_rank() -> None:
        if rank is not None and rank != world.rank:
            raise ValueError(f"rank must be None or {world.rank}, this rank's number, got {rank!r}")

    outcome = await attempt(
        lambda: _describe(local_tensor),
        lambda described: serialization.encode(described[0]),
        checks=[lambda: check_world_size(world_size, group), check_rank],
    )

    async def work(collectives: Collectives) -> tuple[list[_Description], torch.Tensor | None]:
        headers = await exchange_headers(collectives, group, outcome, Call("gather_distributed_data"))
        raise_first_error(headers)
        descriptions = [serialization.decode(header.inline) for header in headers]
        _check_alike(group, descriptions)
        sizes = list(map(_nbytes, descriptions))
        return descriptions, await collectives.gather_bytes(outcome.value[1], sizes, group, group.ranks[0])

    descriptions, gathered = await run_and_raise(world.collectives, group, outcome, work)
    if gathered is None:
        return None
    if not isinstance(local_tensor, torch.Tensor):
        parts = torch.split(gathered, list(map(_nbytes, descriptions)))
        return [item for part in parts for item in serialization.decode(part.numpy().data)]
    shape = (sum(sizes[0] for _, _, sizes in descriptions), *local_tensor.shape[1:])
    if not gathered.numel():
        return local_tensor.new_empty(shape)
    return gathered.view(local_tensor.dtype).view(shape).to(local_tensor.device)


def _describe(data: Any) -> tuple[_Description, torch.Tensor]:
    """Return the data's kind, dtype and shape, and its bytes as a uint8 tensor.

    A list's "shape" is its encoded size.
    """
    if isinstance(data, list):
        payload = serialization.encode(data)
        return ("list", "", [len(payload)]), torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{_ALLOWED}, got a {serialization.type_name(type(data))}")
    oddity = oddity_of(data)
    if oddity is not None:
        raise TypeError(f"{_ALLOWED}, got {oddity}")
    if data.ndim == 0:
        raise ValueError(f"{_ALLOWED}, got a tensor without dimensions with the value {data.item()!r}")
    return ("tensor", dtype_name(data.dtype), list(data.shape)), flat_bytes(data)


def _check_alike(group: Group, descriptions: Sequence[_Description]) -> None:
    kind, dtype, shape = descriptions[0]
    for rank, (its_kind, its_dtype, its_shape) in zip(group.ranks, descriptions, strict=True):
        if kind != its_kind:
            mine, theirs = f"a {kind}", f"a {its_kind}"
        elif kind == "list":
            continue
        elif dtype != its_dtype:
            mine, theirs = dtype, its_dtype
        elif shape[1:] != its_shape[1:]:
            mine, theirs = f"shape {tuple(shape)}", f"shape {tuple(its_shape)}"
        else:
            continue
        raise DisagreementError(
            "the data to gather must have the same kind, dtype and shape on all members except for the first "
            f"dimension, but rank {group.ranks[0]} has {mine} and rank {rank} has {theirs}",
            ranks=(group.ranks[0], rank),
        )


def _nbytes(description: _Description) -> int:
    kind, dtype, shape = description
    return shape[0] if kind == "list" else math.prod(shape) * serialization.dtype_of(dtype).itemsize
