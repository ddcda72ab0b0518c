"""Kills a process that saves again and again, at drawn moments; each time the population that is left can be loaded."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import asyncdist as ad


def made(value: float) -> nn.Module:
    model = nn.Linear(200, 200)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


async def save_for_ever(world: ad.World, folder: Path) -> None:
    number = 0
    while True:
        number += 1
        if number % 2:
            await ad.save_population(folder, made(number), extra=number, keep=2, world=world)
        else:
            await (await ad.async_save_population(folder, made(number), extra=number, keep=2, world=world))


async def load(world: ad.World, folder: Path) -> int:
    model = made(0.0)
    found = await ad.load_population(folder, model, world=world)
    assert all(bool(torch.all(parameter == found.extra)) for parameter in model.parameters())
    return int(found.extra)


def main(times: int, seed: int) -> None:
    rng = random.Random(seed)
    torch.set_num_threads(1)  # a forked child has none of its parent's threads, and would wait for them
    with tempfile.TemporaryDirectory() as name:
        folder, torn = Path(name), 0
        for _ in range(times):
            before = set(folder.glob("*/manifest.json"))
            child = os.fork()
            if not child:
                ad.run(save_for_ever, folder)
            while not set(folder.glob("*/manifest.json")) - before:
                time.sleep(0.001)
            time.sleep(0.05 * rng.random())
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            newest = max(folder.iterdir())
            torn += not (newest / "manifest.json").exists()
            number = ad.run(load, folder)
            assert number > 0
    print(f"{times} kills, {torn} in the midst of a save, seed {seed}: each left a whole population")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
