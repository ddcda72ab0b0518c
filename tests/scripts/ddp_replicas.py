"""Averages four ranks, as two replicas of two under DDP, and repeats the same by hand with plain torch.

Each rank reports a digest of its weights after each iteration, the policy's actions, and whether the computation by
hand gives the same bits. By hand, the rank trains with DDP and without a policy. If the policy took an average, it
takes the weights that ``on_event`` has shown; with two replicas, these are the other replica's weights at an earlier
iteration. Before that, DDP over all ranks is refused.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from support.mpi import report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import asyncdist as ad
from protocols import AverageApplied, ReplicaAveragingPolicy

SIZE, EVERY = 2, 10


def build(replica: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(replica)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train_step(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 * rank + step))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() * (1 + rank // SIZE)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


with ad.blocking.open_world() as world:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replica = world.rank // SIZE
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, optimizer = build(replica)
    wrapped = DistributedDataParallel(model, process_group=groups[replica])
    by_hand, its_optimizer = build(replica)
    wrapped_by_hand = DistributedDataParallel(by_hand, process_group=groups[replica])
    averages: list[torch.Tensor] = []

    def note(event: Any) -> None:
        if isinstance(event, AverageApplied):
            averages.append(event.state["float32"].clone())

    refused = ""
    try:
        over_all = DistributedDataParallel(nn.Linear(1, 1))
        its_own = torch.optim.SGD(over_all.parameters())
        with ad.blocking.policy(ReplicaAveragingPolicy(over_all, its_own, replica_size=SIZE, average_every=EVERY)):
            pass
    except ValueError as error:
        refused = str(error)
    policy = ReplicaAveragingPolicy(
        wrapped,
        optimizer,
        replica_size=SIZE,
        average_every=EVERY,
        replacement_ratio=0.5,
        swap_every=5,
        quorum=1.0,
        grace_s=30.0,
        on_event=note,
    )
    applied, digests, equal = [], [], True
    with ad.blocking.policy(policy) as averaging:
        for step in range(100_000):
            loss = train_step(wrapped, optimizer, world.rank, step)
            train_step(wrapped_by_hand, its_optimizer, world.rank, step)
            info = averaging.step(-loss)
            if info:
                applied.append(step)
                taken = averages[-1] if averages else torch.empty(sum(p.numel() for p in model.parameters()))
                dist.broadcast(taken, SIZE * replica, group=groups[replica])
                nn.utils.vector_to_parameters(taken.clone(), by_hand.parameters())
            digests.append(digest(model))
            equal = equal and digest(by_hand) == digests[-1]
            is_over = torch.tensor(float(len(applied) >= 2))
            dist.all_reduce(is_over)
            if is_over:  # on all ranks in the same step
                break
            world.sleep(0.002)  # ranks share cores
    report(world.rank, {"digests": digests, "applied": applied, "equal": equal, "refused": refused})
    dist.barrier()
    dist.destroy_process_group()
