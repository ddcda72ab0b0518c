"""Trains one model with DDP in the ranks' group, while a policy averages a second model in the same program.

DDP's model must equal that of training alone, and the other model that of local SGD; both are computed with plain torch
on every rank. The policy refuses DDP's model and the module inside it, because DDP keeps them equal on all ranks.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from scripts.population import sgd
from support.mpi import report
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

import asyncdist as ad
from protocols import AverageAllPolicy

STEPS, EVERY = 12, 4


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(samples).square().mean().backward()
    optimizer.step()


def new_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def samples_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_alone(size: int) -> torch.Tensor:
    model = new_model()
    optimizer = sgd(model)
    for step in range(STEPS):
        train_step(model, optimizer, torch.cat([samples_of(rank, step) for rank in range(size)]))
    return flat(model)


def train_locally(size: int) -> torch.Tensor:
    models = [new_model() for _ in range(size)]
    optimizers = [sgd(model) for model in models]
    for step in range(STEPS):
        for rank in range(size):
            train_step(models[rank], optimizers[rank], samples_of(rank, step))
        if (step + 1) % EVERY == 0:
            mean = torch.stack([flat(model) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return flat(models[0])


async def refusal(model: nn.Module) -> str:
    try:
        async with AverageAllPolicy(model, sgd(model), average_every=EVERY):
            return "none"
    except (ValueError, ad.LocalProtocolError) as error:
        return f"{type(error).__name__}: {str(error).partition(':')[0]}"


async def main(world: ad.World) -> list[Any]:
    replicated, local = DistributedDataParallel(new_model()), new_model()
    optimizers = [sgd(replicated), sgd(local)]
    objects = [id(parameter) for model in (replicated, local) for parameter in model.parameters()]
    refusals = [await refusal(replicated), await refusal(replicated.module)]
    averages = 0
    async with AverageAllPolicy(local, optimizers[1], average_every=EVERY) as policy:
        for step in range(STEPS):
            for model, optimizer in zip((replicated, local), optimizers, strict=True):
                train_step(model, optimizer, samples_of(world.rank, step))
            averages += bool(await policy.step(0.0))
    kept = objects == [id(parameter) for model in (replicated, local) for parameter in model.parameters()]
    alone, locally = train_alone(world.size), train_locally(world.size)
    off = [(flat(replicated) - alone).abs().max().item(), (flat(local) - locally).abs().max().item()]
    apart = [(alone - flat(new_model())).abs().max().item(), (alone - locally).abs().max().item()]
    weights = flat(replicated).tolist() + flat(local).tolist()
    return [refusals, averages, kept, max(off), min(apart), weights]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    report(int(os.environ["RANK"]), ad.run(main))
    dist.destroy_process_group()
