"""Rules of selective averaging for tests of its decision core."""

from typing import Any

from protocols.selective.rules import SelectiveRules

STRATEGIES = ("mean", "weighted_mean", "best_only", "reset_weights")


def rules(**options: Any) -> SelectiveRules:
    return SelectiveRules(**({"quorum": 1.0, "grace_s": 1.0, "round_timeout_s": 8.0} | options))
