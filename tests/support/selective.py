"""Rules of selective averaging for tests of its decision core."""

from typing import Any

from protocols.selective.messages import PackedAssign, PackedFrozen
from protocols.selective.roster import Send
from protocols.selective.rounds import RoundCoordinator
from protocols.selective.selection import SelectiveRules

STRATEGIES = ("mean", "weighted_mean", "best_only", "reset_weights")


def rules(**options: Any) -> SelectiveRules:
    return SelectiveRules(**({"quorum": 1.0, "grace_s": 1.0, "round_timeout_s": 8.0} | options))


class OpenedCoordinator(RoundCoordinator):
    """A coordinator whose packed messages are unpacked as by their receivers."""

    def _advance(self, now: float, *, timers: bool = False) -> tuple[Send, ...]:
        return tuple(map(opened, super()._advance(now, timers=timers)))


def opened(send: Send) -> Any:
    """Return a send with its packed message decoded as by its receiver."""
    match send.message:
        case PackedAssign() as packed:
            assign = packed.opened(send.dest)
            assert assign is not None, f"{send} assigns no part to its receiver"
            return send._replace(message=assign)  # type: ignore[arg-type]
        case PackedFrozen() as packed:
            return send._replace(message=packed.opened())  # type: ignore[arg-type]
    return send
