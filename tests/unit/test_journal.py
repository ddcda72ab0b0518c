"""Tests the checksum of a model's weights in a recording."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protocols.journal import checksum_of


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("buffer", tensor)
    return model


@pytest.mark.parametrize(
    ("given", "equal"),
    [
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        (torch._neg_view(torch.ones(2)), -torch.ones(2)),
        (torch.tensor([1 - 2j]).conj().imag, torch.tensor([2.0])),
    ],
    ids=["conjugate", "negative", "imaginary part"],
)
def test_checksum_is_that_of_the_values_of_a_view(given: torch.Tensor, equal: torch.Tensor) -> None:
    """Regression: torch does not reinterpret the bytes of a view with a conjugate or negative bit."""
    assert checksum_of(with_buffer(given)) == checksum_of(with_buffer(equal)) != checksum_of(with_buffer(-equal))


def test_a_sparse_buffer_has_no_checksum() -> None:
    """Regression: the size of a sparse tensor is unknown, so a recorded job ended with RuntimeError."""
    assert checksum_of(with_buffer(torch.ones(3).to_sparse())) == checksum_of(nn.Module())
