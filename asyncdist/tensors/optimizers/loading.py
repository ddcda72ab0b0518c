"""Loads another rank's optimizer state without rounding it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def load_exactly(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Call ``optimizer.load_state_dict(state)``, but keep the dtype of each tensor in the state.

    torch converts all floating-point tensors of the state to the dtype of their parameter, which would round the
    float32 moments of bfloat16 weights.
    """
    optimizer.load_state_dict(dict(state))
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for place, entries in state["state"].items():
        held = optimizer.state.get(parameters[place]) if isinstance(place, int) and place < len(parameters) else None
        if not isinstance(held, dict) or not isinstance(entries, Mapping):
            continue
        for name, value in entries.items():
            now = held.get(name)
            if name == "step" or not isinstance(value, Tensor) or not isinstance(now, Tensor):
                continue  # torch keeps step counts, or needs them as float32 on the GPU
            if now.dtype != value.dtype:
                held[name] = value.to(now.device)
