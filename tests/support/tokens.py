"""Tokens for the steps of DiLoCo's policies in tests whose plans weight the ranks equally or by tokens."""

from __future__ import annotations

from typing import Any


def tokens_for(policy: Any, count: float) -> float | None:
    """Return ``count``, or None for a policy that does not count tokens, whose ``step`` refuses them."""
    return None if policy._own_options.weights == "equal" else count
