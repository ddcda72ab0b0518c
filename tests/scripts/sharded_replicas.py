"""Averages two replicas of two ranks under ``fully_shard``, and computes each average with plain torch, too.

Before that, two models must be refused: one with parameters sharded over all four ranks, and one whose replicas are
sharded differently. Each rank reports the reasons of these refusals, a digest of its whole model after each iteration,
the policy's actions, the bytes that it moved, and whether plain torch gives the same bits. Plain torch computes
momentum * own + (1 - momentum) * donor's from whole tensors, which are gathered inside a replica at every swap point.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from support.mpi import report
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import asyncdist as ad
from asyncdist.launchers import addresses
from protocols import ReplicaAveragingPolicy, SnapshotTaken

SIZE, EVERY, SWAP, MOMENTUM = 2, 10, 5, 0.25


class Model(nn.Module):
    """A model with layers that do not divide evenly, one of which leaves the second rank nothing, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 9)
        self.norm = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.hidden(inputs)).tanh())
        return out


def build(replica: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(replica)
    model = Model()
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 * rank + step))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() * (1 + rank // SIZE)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, whose parts torch gathers."""
    return {name: each.full_tensor().detach().clone() for name, each in model.named_parameters()}  # type: ignore[attr-defined]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors.values())).hexdigest()


def mixed(own: dict[str, torch.Tensor], average: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    both = {name: own[name] * MOMENTUM + average[name] * (1 - MOMENTUM) for name in own}
    low = {name: torch.minimum(own[name], average[name]) for name in own}
    high = {name: torch.maximum(own[name], average[name]) for name in own}
    return {name: both[name].clamp(low[name], high[name]) for name in own}


def refusal(mesh: DeviceMesh, dim: int) -> str:
    """Return the error for a model of one layer that is sharded over a mesh, along one of its dimensions."""
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    try:
        with ad.blocking.policy(
            ReplicaAveragingPolicy(
                model, torch.optim.SGD(model.parameters(), 0.1), replica_size=SIZE, average_every=EVERY
            )
        ):
            return ""
    except (ValueError, ad.AsyncdistError) as error:
        return f"{type(error).__name__}: {error}"


with ad.blocking.open_world() as world:
    torch.set_num_threads(1)
    port = int(ad.blocking.all_gather(torch.tensor(addresses.find_free_port(), device="cpu"))[0])
    if "MASTER_PORT" not in os.environ:  # the ranks were not started by a launcher of torch
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    replica = world.rank // SIZE
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    refused = [refusal(DeviceMesh("cpu", [0, 1, 2, 3]), 0), refusal(meshes[replica], replica)]
    model, optimizer = build(replica, meshes[replica])
    snapshots: dict[int, int] = {}

    def note(event: Any) -> None:
        if isinstance(event, SnapshotTaken):
            snapshots[event.round] = event.iteration

    policy = ReplicaAveragingPolicy(
        model,
        optimizer,
        replica_size=SIZE,
        average_every=EVERY,
        replacement_ratio=0.5,
        swap_every=SWAP,
        momentum=MOMENTUM,
        optimizer_state="reset",
        route="direct" if "direct" in sys.argv else "auto",
        quorum=1.0,
        grace_s=30.0,
        on_event=note,
    )
    at_swaps: dict[int, dict[str, torch.Tensor]] = {}
    applied: list[dict[str, Any]] = []
    digests = []
    with ad.blocking.policy(policy) as averaging:
        for step in range(100_000):
            loss = train_step(model, optimizer, world.rank, step)
            own = whole(model)
            if (step + 1) % SWAP == 0:
                at_swaps[step] = own
                model(torch.ones(2, 3))  # an evaluation, after which the outermost parameters stay whole
            info = averaging.step(-loss)
            after = whole(model)
            if info:
                applied.append(
                    {"step": step, "round": info.round, "donors": info.donors, "own": own, "after": after}
                    | {"state_count": len(optimizer.state), "nbytes": info.nbytes}
                )
            digests.append(digest(after))
            is_over = torch.tensor(float(len(applied) >= 2))
            dist.all_reduce(is_over)
            if is_over:  # on all ranks in the same step
                break
            world.sleep(0.002)  # ranks share cores
    everything: list[Any] = [None] * world.size
    dist.all_gather_object(everything, (snapshots, at_swaps))
    for each in applied:
        taken, at = everything[each["donors"][0]]
        average = at[taken[each["round"]]]
        expected = mixed(each["own"], average)
        each["equal"] = digest(expected) == digest(each.pop("after")) != digest(each.pop("own"))
    statistics, pool = policy.statistics(), policy._inner._own.snapshots
    shard_nbytes = sum(each.to_local().nbytes for each in model.parameters()) + sum(b.nbytes for b in model.buffers())  # type: ignore[attr-defined]
    report(
        world.rank,
        {
            "refused": refused,
            "digests": digests,
            "applied": applied,
            "snapshots": snapshots,
            "shard_nbytes": shard_nbytes,
            "whole_nbytes": sum(each.nbytes for each in whole(model).values()),
            "sent_nbytes": statistics.sent_nbytes,
            "received_nbytes": statistics.received_nbytes,
            "snapshot_count": statistics.snapshot_count,
            "replacement_count": statistics.replacement_count,
            # in addition to the model
            "buffers_nbytes": (pool.in_use + len(pool._free)) * policy._flat.nbytes,
        },
    )
    dist.barrier()
    dist.destroy_process_group()
