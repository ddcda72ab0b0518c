"""Remembers the models of a rank that were trained before: their weights may differ between ranks."""

from __future__ import annotations

import weakref

from torch import nn


class TrainedModels:
    """Knows the models of this rank that a policy has trained, or that were loaded from a population's checkpoint.

    Made once for each rank, by ``services.shared(TrainedModels)``.
    """

    def __init__(self, _: object) -> None:
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
