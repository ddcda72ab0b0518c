"""Tests the running mean of the loss that integrations use as a rank's metric."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncdist.integrations.metrics import RunningLoss
from asyncdist.protocols.metrics import NOT_MEASURED


def mean_of(*losses: Any) -> Any:
    loss = RunningLoss()
    for each in losses:
        loss.add(each)
    return loss()


@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), np.array([0.5]), torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True)]
)
def test_a_number_of_any_kind(value: Any) -> None:
    assert mean_of(value, 1.5) == 1.0


def test_no_loss_is_no_measurement() -> None:
    """Regression: without a loss since the last report, the mean was infinite, so a good rank was replaced."""
    assert mean_of() is NOT_MEASURED


@pytest.mark.parametrize("value", [None, "0.5", [0.5], {"loss": 0.5}, 1j, np.zeros(3), torch.ones(3), torch.tensor(1j)])
def test_what_is_no_number_is_named_as_the_policy_names_it(value: Any) -> None:
    """Regression: complex numbers and arrays were accepted, and a later error named another value."""
    with pytest.raises((TypeError, ValueError), match=r"^metric must be .*number"):
        RunningLoss().add(value)
