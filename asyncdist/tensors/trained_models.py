"""Records which of a rank's models have been trained before, so that their weights may differ between ranks."""

from __future__ import annotations

import weakref

from torch import nn


class TrainedModels:
    """Set of this rank's models that a policy has trained or that were loaded from a population's checkpoint."""

    def __init__(self, _: object) -> None:
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
