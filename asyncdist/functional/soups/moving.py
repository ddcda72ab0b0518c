"""An exponential moving average of one model's weights: torch's AveragedModel with a bias-corrected decay."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from asyncdist import validation


def ema(model: nn.Module, decay: float = 0.999, *, device: torch.device | str | None = None) -> AveragedModel:
    """Return a torch ``AveragedModel`` that keeps the exponential moving average of a model's weights.

    Call ``averaged.update_parameters(model)`` after each optimizer step. ``averaged.module`` has the average. This
    average differs from torch's ``get_ema_multi_avg_fn`` in five ways:

    - The decay is bias-corrected: the model of t steps ago contributes decay^t, divided by the sum of these powers. In
      torch's average, the first model contributes decay^t after t steps, which is still 37 % after 1,000 steps.
    - Weights of less than 32 bits are kept in float32, because an update of 0.1 % would vanish in bfloat16.
    - Floating buffers are averaged, and integer buffers are copied.
    - Infinities, as in an attention mask, are preserved.
    - A decay outside [0, 1) raises ValueError.

    Args:
        model: Model to average. Its initial weights are copied.
        decay: Fraction of the average that is kept at each update, from 0 to below 1.
        device: Device of the average, by default the model's.
    """
    decay = validation.real("decay", decay, "a number from 0 to below 1", low=0.0, high=math.nextafter(1.0, 0.0))
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    place = None if device is None else torch.device(device)
    averaged = AveragedModel(model, place, avg_fn=functools.partial(_average, decay), use_buffers=True)
    for tensor in (*averaged.module.parameters(), *averaged.module.buffers()):
        if tensor.is_floating_point() and tensor.itemsize < 4:
            tensor.data = tensor.data.float()
    return averaged


def _average(decay: float, averaged: torch.Tensor, value: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """Return the average after one more value. ``averaged`` is the average of ``count`` values."""
    if not (averaged.is_floating_point() or averaged.is_complex()):
        return value
    # Tensor operations are used, because reading the count as a number would wait for the GPU once per parameter.
    precise = torch.float32 if averaged.device.type == "mps" else torch.float64  # MPS has no float64
    exponent = (torch.as_tensor(count, dtype=precise, device=averaged.device) + 1.0) * (
        math.log(decay) if decay else -math.inf
    )
    share = ((1.0 - decay) / -torch.expm1(exponent)).to(averaged.dtype)
    new = value.to(averaged.dtype)
    mixed = torch.lerp(averaged, new, share)
    # torch.lerp computes a difference, which is NaN for infinities, as in an attention mask, and may overflow.
    apart = torch.where(share == 1, new, averaged * (1 - share) + new * share)
    return torch.where(averaged == new, new, torch.where(mixed.isfinite(), mixed, apart))
