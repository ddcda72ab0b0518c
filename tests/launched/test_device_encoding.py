"""Tests that contributions of a model on a device are encoded there, on a stand-in that CPUs have."""

from __future__ import annotations

from scripts import encoding_on_a_device
from support import torchrun


def test_contributions_encoded_on_a_device_have_equal_bits() -> None:
    assert torchrun.run_alone(encoding_on_a_device.__file__).check().stdout == "equal\n"
