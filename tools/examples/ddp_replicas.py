"""Replicas of two ranks each, under DDP, of which the worse one takes the weights of the better one.

asyncdist run -n 4 tools/examples/ddp_replicas.py
"""

# mypy: ignore-errors

import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

import asyncdist as ad
from asyncdist.integrations.pytorch import SelectiveAveraging, new_replica_group

SIZE = 2  # ranks 0 and 1 hold one replica, ranks 2 and 3 the next

world = ad.blocking.process_world()
replica = world.rank // SIZE
torch.manual_seed(0)  # all begin with equal weights
model = DistributedDataParallel(nn.Linear(8, 1), process_group=new_replica_group(SIZE))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if replica == 0 else 1e-5)  # replica 1 learns too slowly
averaging = SelectiveAveraging(model, optimizer, average_every=20, replica_size=SIZE, replacement_ratio=0.5)
# From now on, each rank draws different data.
for step in range(500):
    inputs = torch.randn(64, 8)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients of the replica's two ranks
    optimizer.step()
    info = averaging.step(loss=loss)  # weights are taken on both ranks of a replica at the same step
    if info:
        print(f"rank {world.rank} of replica {replica}, step {step}, {info}")
print(f"rank {world.rank} has trained to a loss of {loss:.4f}")
averaging.close()
dist.destroy_process_group()
