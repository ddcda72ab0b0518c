"""Checks the numbers of tokens that a training loop passes to the ``step`` of DiLoCo's policies."""

from __future__ import annotations

from typing import Final

from asyncdist import validation

#: Smallest number of tokens of a step, and smallest weight of a contribution by tokens.
LEAST_TOKENS: Final = 1e-9


class StepTokens:
    """Checks that the training loop passes the number of tokens in all steps or in none.

    Args:
        weights: Option ``weights`` of the policy. With ``"equal"``, no numbers of tokens are allowed.
    """

    def __init__(self, weights: str) -> None:
        self._weights = weights
        self._has_tokens: bool | None = None  # None before the first step

    def count(self, tokens: float | None, metric: object) -> float:
        """Return the number of tokens or examples of a step: ``tokens``, or 1 if it is None.

        Args:
            metric: Value that was passed to ``step`` by position, where a number of tokens is an error. None if the
                policy takes a metric there.

        Raises:
            TypeError: The weights are ``"tokens"``, and the number of tokens was passed by position.
            ValueError: ``tokens`` is not a finite number above 0, has no effect, or is missing in some steps.
        """
        if tokens is None and metric is not None and self._weights != "equal":
            raise TypeError(
                "step() takes the number of tokens by name: step(tokens=n). A positional number is a metric, and has "
                "no effect on the weights"
            )
        count = 1.0
        if tokens is not None:
            count = validation.real(
                "tokens", tokens, "a finite number > 0 (of a tensor, tokens.item())", low=LEAST_TOKENS
            )
            if self._weights == "equal":
                raise ValueError(
                    f"tokens must be None with weights='equal', under which it has no effect, got {tokens!r:.80}; pass "
                    "weights='tokens' to the policy, or call step() without tokens"
                )
        if self._has_tokens not in (None, tokens is not None):
            given, other = ("None", "a number") if tokens is None else (repr(tokens), "None")
            raise ValueError(
                f"with weights={self._weights!r}, which adds up tokens, tokens must be passed in all steps or in no "
                f"step, got {given} after steps with {other}; a step without tokens would count as 1"
            )
        self._has_tokens = tokens is not None
        return count
