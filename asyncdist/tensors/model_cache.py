"""Keeps a model's flat tensors and layouts from one collective to the next.

Allocation is slow, because the kernel provides memory page by page. It took 34 ms to allocate 64 MiB, 8 ms to fill them
and 30 ms to reduce them. Only the most recently used models are cached, because shared memory needs file descriptors.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from torch import nn

#: Maximum number of cached models. Each model uses one or two file descriptors per dtype.
MODEL_COUNT_MAX: Final = 64


class Scratch:
    """Caches objects that one rank derives from its models, by model and purpose.

    The objects must refer to their model only weakly, if at all, so that the model can be freed.
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

    def take(self, model: nn.Module, purpose: str) -> Any:
        """Remove and return a cached object, or return None. The caller owns the object until :meth:`give_back`."""
        return self._kept.get(model, {}).pop(purpose, None)

    def give_back(self, model: nn.Module, purpose: str, thing: Any) -> None:
        """Cache ``thing`` for the next :meth:`take`. If the limit is exceeded, evict the least recently used model."""
        things = self._kept.pop(model, {})
        things[purpose] = thing
        self._kept[model] = things
        if len(self._kept) > MODEL_COUNT_MAX:
            del self._kept[next(iter(self._kept))]

    def forget(self, model: nn.Module) -> None:
        """Remove all cached objects of a model."""
        self._kept.pop(model, None)


class TrainedModels:
    """The set of this rank's models that a policy has trained, or that were loaded from a population's checkpoint.

    Their weights may differ between ranks.
    """

    def __init__(self, _: object) -> None:
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
