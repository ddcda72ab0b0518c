"""Trains a small classifier on several ranks; the worst ranks adopt the average weights of the good ones.

asyncdist run -n 4 train.py         four ranks on this host
asyncdist sim train.py --ranks 4    the same, simulated
python train.py                     a single rank
"""

import torch

import asyncdist as ad
from asyncdist.integrations.pytorch import SelectiveAveraging

EPOCHS, BATCH = 20, 32


def main() -> None:
    world = ad.blocking.process_world()  # this process is rank world.rank of world.size
    torch.manual_seed(0)  # gives all ranks the same data and initial weights
    inputs = torch.randn(2048, 20)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to(world.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    # Every 100 steps each rank reports its mean loss. The worst quarter then adopts the average of the other ranks.
    # The constructor seeds each rank differently, so that the batches below differ.
    averaging = SelectiveAveraging(model, optimizer, average_every=100, replacement_ratio=0.25)
    for epoch in range(EPOCHS):
        for batch in torch.randperm(len(inputs)).split(BATCH):
            loss = torch.nn.functional.cross_entropy(
                model(inputs[batch].to(world.device)), labels[batch].to(world.device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            info = averaging.step(loss=loss)  # an average can replace the weights only in this call
            if info:
                print(f"rank {world.rank}, epoch {epoch}, {info}")
    correct = (model(inputs.to(world.device)).argmax(1).cpu() == labels).float().mean()
    print(f"rank {world.rank}: accuracy {correct:.3f}")


if __name__ == "__main__":
    main()
