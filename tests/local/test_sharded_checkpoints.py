"""Tests checkpoints of models that are sharded over a replica, in one process with a fake process group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist, nn

import asyncdist as ad

pytestmark = pytest.mark.slow  # DTensors take most of a second to import


@contextlib.contextmanager
def shard_mesh(rank: int, size: int) -> Iterator[Any]:
    """Yield the mesh of a rank's replica of two ranks, in a job of ``size`` ranks that exists only in the block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replica", "shard"))["shard"]
    finally:
        dist.destroy_process_group()


def sharded(mesh: Any, value: float, dim: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose weight is sharded over the mesh, and an optimizer that has made a step."""
    from torch.distributed.tensor import DTensor, Shard

    model = nn.Linear(4, 4, bias=False)
    shard = DTensor.from_local(torch.full((4 // (2 - dim), 4 // (1 + dim)), value), mesh, [Shard(dim)], run_check=False)
    model.weight = nn.Parameter(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Do a step of the optimizer, and return this rank's shard of the weight."""
    weight: Any = model.weight
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return weight.detach().to_local().flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("saved_rank", "saved_size"), [(2, 4), (0, 2), (4, 6)])
def test_a_shard_is_loaded_on_another_number_of_ranks(tmp_path: Path, saved_rank: int, saved_size: int) -> None:
    """Regression: torch refused to copy between the meshes of two jobs, after the policy's state had been loaded."""

    def save(_: ad.blocking.World) -> list[float]:
        ad.blocking.save_population(tmp_path, model, optimizer)
        return step(model, optimizer)

    def load(_: ad.blocking.World) -> list[float]:
        ad.blocking.load_population(tmp_path, model, optimizer)
        return step(model, optimizer)

    with shard_mesh(saved_rank, saved_size) as mesh:
        model, optimizer = sharded(mesh, 1.0)
        expected = ad.run_local(ad.blocking.hosted(save), ranks=1)
    with shard_mesh(0, 4) as mesh:
        model, optimizer = sharded(mesh, 2.0)
        assert ad.run_local(ad.blocking.hosted(load), ranks=1) == expected


@pytest.mark.parametrize("is_sharded", [True, False])
def test_another_part_of_the_model_is_refused(tmp_path: Path, is_sharded: bool) -> None:
    def save(_: ad.blocking.World) -> None:
        ad.blocking.save_population(tmp_path, model)

    def load(_: ad.blocking.World) -> None:
        part = r"the shard .* placed by S\(1\)" if is_sharded else "whole"
        found = r"the shard .* placed by S\(0\) in the checkpoint"
        with pytest.raises(ValueError, match=rf"'weight' is {part} in this model and {found}"):
            ad.blocking.load_population(tmp_path, model)

    with shard_mesh(5, 6) as mesh:
        model, _ = sharded(mesh, 1.0)
        ad.run_local(ad.blocking.hosted(save), ranks=1)
    with shard_mesh(0, 2) as mesh:
        model = sharded(mesh, 2.0, dim=1)[0] if is_sharded else nn.Linear(4, 4, bias=False)
        ad.run_local(ad.blocking.hosted(load), ranks=1)


def test_a_soup_of_shards_is_refused(tmp_path: Path) -> None:
    """Regression: torch's error named an unknown process group."""

    def save(_: ad.blocking.World) -> None:
        ad.blocking.save_population(tmp_path, model)

    with shard_mesh(0, 2) as mesh:
        model, _ = sharded(mesh, 1.0)
        ad.run_local(ad.blocking.hosted(save), ranks=1)
    with pytest.raises(ValueError, match=r"rank 0 of .* does not fit the model: .* 'weight' is whole in this model"):
        ad.uniform_soup(nn.Linear(4, 4, bias=False), tmp_path)
