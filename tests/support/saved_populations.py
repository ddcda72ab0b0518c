"""Saves populations of small models, loads them, and edits the files of their checkpoints."""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import asyncdist as ad
from asyncdist import World


def made(seed: int = 0, width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with random weights and a dropout, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def weights_of(model: nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in model.parameters()]


async def save(
    world: World, path: Path, metrics: list[float | None], keep: int | None = None, extra: Any = None
) -> Path:
    """Save a population whose weights are the ranks' numbers; return its folder."""
    model, optimizer = made(world.rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(world.rank)
    return await ad.save_population(path, model, optimizer, metric=metrics[world.rank], keep=keep, extra=extra)


async def load(world: World, path: Path, width: int = 3) -> tuple[int, bool, float]:
    """Load a state; return the rank that saved it, whether it is a copy, and the mean of the first weights."""
    model, optimizer = made(width=width)
    found = await ad.load_population(path, model, optimizer)
    return found.source, found.is_copy, next(model.parameters()).mean().item()


def change_entries(folder: Path, **fields: Any) -> None:
    """Change fields of the manifest's entry on rank 0's file."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][0].update(fields)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def put(folder: Path, state: Any, **parts: Any) -> None:
    """Replace rank 0's state by a different one, with the size and checksum of the manifest."""
    path = folder / "rank-00000.pt"
    whole = {**torch.load(path, weights_only=True), **state, **parts} if isinstance(state, dict) else state
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    put_bytes(folder, buffer.getvalue())


def put_bytes(folder: Path, data: bytes) -> None:
    """Replace rank 0's file, with the size and checksum of the manifest."""
    (folder / "rank-00000.pt").write_bytes(data)
    change_entries(folder, nbytes=len(data), crc32=zlib.crc32(data))
