"""Starts ranks with ``launch_subprocesses``, which report through files in a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import asyncdist as ad
from asyncdist.launch.config import MultiprocessConfig

#: A generous limit in seconds: a slow job passes, a hanging one fails.
TIMEOUT_S = 100.0

METHODS = ("forkserver", "spawn")


def config(world_size: int = 2, **options: Any) -> MultiprocessConfig:
    return MultiprocessConfig(world_size=world_size, **options)


def launch_here(func: Callable[..., Any], cfg: MultiprocessConfig, *args: Any, **kwargs: Any) -> None:
    ad.launch_subprocesses(func, cfg, None, 0, *args, **kwargs)


def report(folder: str, value: object) -> None:
    partial = Path(folder, f"{os.getpid()}.partial")
    partial.write_text(json.dumps(value))
    partial.rename(Path(folder, f"{dist.get_rank() if dist.is_initialized() else os.environ['RANK']}.json"))


def reports(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def note_rank(folder: str) -> None:
    report(folder, [dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size(), dist.get_backend()])
