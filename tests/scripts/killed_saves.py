"""Kills a process again and again while it saves, and each time loads the checkpoint that is left.

    python killed_saves.py TIMES SEED

The process is stopped in order to see whether it is in a save, so that no kill is too late on a slow machine.
"""

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


def kill_in_a_save(child: int, folder: Path, rng: random.Random) -> None:
    """Kill the child after it has finished one or more saves, at a random time during a later save."""
    before, wanted = set(folder.glob("*/manifest.json")), rng.randint(1, 2)  # every other save is an asynchronous one
    while len(set(folder.glob("*/manifest.json")) - before) < wanted:
        time.sleep(0.001)
    while True:
        while is_whole(folder):
            time.sleep(0.0002)
        time.sleep(0.005 * rng.random())
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED)
        if not is_whole(folder):
            break
        os.kill(child, signal.SIGCONT)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def is_whole(folder: Path) -> bool:
    """Return whether the newest save is complete."""
    return (max(folder.iterdir()) / "manifest.json").exists()


def main(times: int, seed: int) -> None:
    rng = random.Random(seed)
    torch.set_num_threads(1)  # a forked child does not have its parent's threads, and would wait for them
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(times):
            child = os.fork()
            if not child:
                ad.run(save_for_ever, folder)
            kill_in_a_save(child, folder, rng)
            assert ad.run(load, folder) > 0
    print(f"{times} kills in the midst of a save, seed {seed}: each left a whole population")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
