"""Trains two ranks with Accelerate's data loaders, backward and collectives, alongside a policy of asyncdist."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from support.mpi import report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy


async def main(world: ad.World) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(world.rank)
    inner = nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
    optimizer, loader = accelerator.prepare(torch.optim.SGD(inner.parameters(), lr=0.01), data)
    model = accelerator.prepare_model(inner, evaluation_mode=True)  # without DDP, so that each rank has its own weights
    replaced, go_on = 0, torch.ones(1)
    async with AsyncSelectiveAveragingPolicy(model, optimizer, average_every=4) as policy:
        while go_on.item():
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                replaced += bool(await policy.step(-loss))
            # Accelerate's collective runs between asyncdist's
            go_on = (accelerator.gather(torch.tensor([replaced])).sum() == 0).float()
    accelerator.wait_for_everyone()
    accelerator.end_training()  # destroys the default process group
    assert not torch.distributed.is_initialized()
    await ad.average_models(inner)  # asyncdist's groups still work after Accelerate's have ended
    weights = await ad.gather_from_all_ranks(lambda: inner.weight.detach())
    same = weights is None or torch.equal(*weights)
    report(world.rank, {"processes": accelerator.num_processes, "rank": accelerator.process_index, "same": same})


if __name__ == "__main__":
    ad.run(main, strict=True)
