"""Keeps flat tensors and layouts of a model from one collective to the next.

It is kept for as long as the model lives, and for so many models that were used last: memory that the ranks of a host
share takes a descriptor, and a process has about a thousand.

Fresh memory is dear: the kernel hands it out page by page, and 64 MiB took 34 ms to come by where the copy into it took
8 and the whole reduction 30. Finding and checking the tensors of 200 layers took 2.5 ms, copying them less than one.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from torch import nn

#: Each keeps one or two descriptors for every dtype of its tensors.
MODEL_COUNT_MAX: Final = 64


class Scratch:
    """Keeps things of one rank, by model and purpose. They may refer to their model only weakly."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()

    def take(self, model: nn.Module, purpose: str) -> Any:
        """Return what was kept last, or None; it is the caller's until :meth:`give_back`, or for good."""
        return self._kept.get(model, {}).pop(purpose, None)

    def give_back(self, model: nn.Module, purpose: str, thing: Any) -> None:
        """Keep ``thing`` for the next :meth:`take`, and let go of the model that was not used for longest."""
        things = self._kept.pop(model, {})
        things[purpose] = thing
        self._kept[model] = things
        if len(self._kept) > MODEL_COUNT_MAX:
            del self._kept[next(iter(self._kept))]

    def forget(self, model: nn.Module) -> None:
        """Keep nothing of a model any more."""
        self._kept.pop(model, None)
