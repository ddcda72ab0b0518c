"""Remembers the models of a rank that were trained before, whose weights may therefore differ between ranks."""

from __future__ import annotations

import weakref

from torch import nn


class TrainedModels:
    """Holds this rank's models that a policy has trained or that were loaded from a population's checkpoint.

    ``services.shared(TrainedModels)`` makes one instance per rank.
    """

    def __init__(self, _: object) -> None:
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
