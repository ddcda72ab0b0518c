"""Trains two replicas of two ranks with DiLoCo, kills one rank, and lets the restarted replica join again.

``rejoining_replicas.py KILLED KIND POLICY`` is started with ``--restarts 1``. KILLED is the killed rank, KIND is
``ddp`` or ``fully_shard``, and POLICY is ``diloco``, or ``async`` for asynchronous DiLoCo that waits for both replicas,
which must equal DiLoCo, or ``selective``, which makes a fixed number of steps. Each rank reports its incarnation, the
iteration at which it has joined, the donors of each round, and its whole parameters at the end. Except for
``selective``, :func:`expected` computes these parameters from the other facts without the policy.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch
from support.mpi import report
from torch import nn

import asyncdist as ad
from asyncdist.integrations.pytorch import new_replica_group
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, ReplicaAveragingPolicy

SIZE, EVERY, STEPS_AFTER, KILLED_AT = 2, 5, 30, 12
SELECTIVE_STEPS = 1500
OUTER = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)


def new_model() -> nn.Module:
    """Return the same model on all ranks: layers that two ranks cannot divide evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a rank's batch; the targets of the second replica are doubled."""
    generator = torch.Generator().manual_seed(100_000 * rank + step)
    inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    loss: torch.Tensor = (model(inputs) - inputs.sum(1, keepdim=True) * (1 + rank // SIZE)).square().mean()
    return loss


def expected(donors: Mapping[int, tuple[int, ...]], absent: range, lost: int, steps: int) -> list[torch.Tensor]:
    """Return the parameters at the end, which are equal on all ranks.

    Args:
        donors: First ranks of the replicas whose differences count, by round.
        absent: Steps that the lost replica has not made. After them, it has the other replica's state.
        lost: The lost replica.
    """
    models = [new_model() for _ in range(2)]
    optimizers = [new_optimizer(model) for model in models]
    anchor = [parameter.detach().clone().requires_grad_() for parameter in models[0].parameters()]
    outer = OUTER(anchor)
    for step in range(steps):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(SIZE * replica, SIZE * (replica + 1)):
                (loss_of(model, rank, step) / SIZE).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            given = [models[rank // SIZE] for rank in donors[(step + 1) // EVERY]]
            for place, own in enumerate(anchor):
                differences = [own.detach() - list(model.parameters())[place].detach() for model in given]
                own.grad = torch.stack(differences).mean(0)
            outer.step()
            for model in models:
                nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(anchor).detach(), model.parameters())
        if step + 1 == absent.stop:
            models[lost].load_state_dict(models[1 - lost].state_dict())
            optimizers[lost].load_state_dict(copy.deepcopy(optimizers[1 - lost].state_dict()))
    return [parameter.detach() for parameter in models[0].parameters()]


def divided(kind: str) -> Any:
    """Return the model that DDP or `fully_shard` divides among the ranks of this rank's replica."""
    group = new_replica_group(SIZE)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(new_model(), process_group=group)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = DeviceMesh.from_group(group, "cpu"), new_model()
    fully_shard(model[2], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)
    return model


def new_policy(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if name == "selective":
        return ReplicaAveragingPolicy(model, optimizer, replica_size=SIZE, average_every=EVERY, replacement_ratio=0.5)
    options: dict[str, Any] = {"average_every": EVERY, "replica_size": SIZE, "outer_optimizer": OUTER}
    if name == "async":
        return AsyncDiLoCoPolicy(model, optimizer, quorum=2, late="wait", **options)
    return DiLoCoPolicy(model, optimizer, **options)


def train(world: ad.World, killed: int, kind: str, name: str) -> dict[str, Any]:
    model = divided(kind)
    optimizer = new_optimizer(model)
    policy = new_policy(name, model, optimizer)
    donors, until = dict[int, tuple[int, ...]](), SELECTIVE_STEPS if name == "selective" else 10**9
    with ad.blocking.policy(policy) as averaging:
        joined_at = policy.iteration
        while policy.iteration < until:
            if world.rank == killed and policy.iteration == KILLED_AT and not world.incarnation:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(model, world.rank, policy.iteration).backward()
            optimizer.step()
            info = averaging.step(
                **({"loss": policy.iteration % 7 + world.rank // SIZE} if name == "selective" else {})
            )
            if info:
                donors[info.round] = info.donors
                is_back = policy.iteration > KILLED_AT + EVERY and len(info.donors) == 2
                until = min(until, policy.iteration + STEPS_AFTER) if is_back else until
            world.sleep(0.01)
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each.detach() for each in model.parameters()]
    return {
        "incarnation": world.incarnation,
        "joined_at": joined_at,
        "donors": list(donors.items()),
        "steps": policy.iteration,
        "whole": [each.tolist() for each in whole],
    }


if __name__ == "__main__":
    with ad.blocking.open_world() as world:
        torch.set_num_threads(1)
        report(world.rank, train(world, int(sys.argv[1]), *sys.argv[2:]))
        torch.distributed.destroy_process_group()
