"""Tests the weights of the trial steps of selective DiLoCo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.selective_diloco.policy import _trial_weights
from asyncdist.tensors.codecs import find_codec
from asyncdist.tensors.flat_state import FlatState


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trial_steps_begin_at_the_anchor(dtype: torch.dtype, is_late: bool) -> None:
    """Regression: a trial step of bfloat16 weights contained the rounding of the anchor or the base."""
    model = torch.nn.Linear(5, 1, bias=False, dtype=dtype)
    layout = WireLayout(FlatState(model).entries, range(1), {"weight"}, 1, find_codec("float32"))
    anchor = torch.linspace(1.0, 1.9, 5)
    base = torch.linspace(2.1, 3.7, 5) if is_late else anchor
    fragment: Any = SimpleNamespace(layout=layout, anchors=(anchor,), bases=(base,))
    with torch.no_grad():
        model.weight.copy_(base)
        model.weight += 0.25
    change = (model.weight.detach().double() - base.to(dtype).double()).flatten()
    (found,) = _trial_weights(fragment, [model.weight], 0.5)
    assert torch.allclose(found.double(), anchor.double() + change / 2, atol=1e-6)
