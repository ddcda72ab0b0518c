"""Records which of a rank's models were trained. A trained model's weights may differ between ranks."""

from __future__ import annotations

import weakref

from torch import nn


class TrainedModels:
    """The set of this rank's models that a policy has trained, or that were loaded from a population's checkpoint."""

    def __init__(self, _: object) -> None:
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
