"""Selective averaging in a loop that Accelerate has prepared.

::

    from asyncdist.integrations.accelerate import SelectiveAveraging      # before the Accelerator is made

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    averaging = SelectiveAveraging(model, optimizer, average_every=100)
    for batch in loader:
        ...
        averaging.step(loss)                          # asyncdist run -n 4 train.py

Importing this module hides the variables by which launchers tell of ranks: each rank's ``Accelerator`` prepares one
process, with mixed precision and gradient accumulation as usual, and nobody waits in its loaders.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncdist.integrations import pytorch
from asyncdist.integrations.joining import hide_ranks

hide_ranks()


class SelectiveAveraging(pytorch.SelectiveAveraging):
    """Is that of plain PyTorch, for replicas of one rank each. Raises ValueError if ``replica_size`` is given."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, average_every: int, **options: Any) -> None:
        if "replica_size" in options:
            raise ValueError(
                f"replica_size is {options['replica_size']!r}; the Accelerator knows of one rank: for replicas under "
                "DDP, import SelectiveAveraging from asyncdist.integrations.pytorch, and wrap the model yourself"
            )
        super().__init__(model, optimizer, average_every, **options)
