"""Flat host tensors that are kept from one collective to the next.

Fresh memory is dear: the kernel hands it out page by page, and 64 MiB took 34 ms to come by where the copy into it took
8 and the whole reduction 30. So who reduces a model again and again keeps its buffer, for as long as the model lives.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn


class Scratch:
    """The kept tensors of one rank, by model and purpose."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, torch.dtype], torch.Tensor]]
        self._kept = weakref.WeakKeyDictionary()

    def take(
        self, model: nn.Module, purpose: tuple[str, torch.dtype], count: int, dtype: torch.dtype, *, pinned: bool
    ) -> torch.Tensor:
        """A 1-D tensor with undefined content; the caller's until :meth:`give_back`, or for good."""
        kept = self._kept.get(model, {}).pop(purpose, None)
        if kept is not None and kept.numel() == count and kept.dtype == dtype:
            return kept
        return torch.empty(count, dtype=dtype, pin_memory=pinned)

    def give_back(self, model: nn.Module, purpose: tuple[str, torch.dtype], tensor: torch.Tensor) -> None:
        """Keep ``tensor`` for the next :meth:`take`."""
        self._kept.setdefault(model, {})[purpose] = tensor
