"""Tests the relays of large agreements without a loop: which joins a rank stores, and when it reports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncdist.collectives.agreement import relays
from asyncdist.collectives.agreement.messages import AgreementKey, Join
from asyncdist.waits import WaitId


class Timer:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Engine:
    """Stands in for the engine: keeps all timers."""

    def __init__(self) -> None:
        self.transport = type("Transport", (), {"may_return": False, "size": 40})
        self.timers: list[Timer] = []

    def call_later(self, delay_s: float, what: WaitId, call: Callable[..., object], *args: Any) -> Timer:
        self.timers.append(Timer())
        return self.timers[-1]


def test_the_timer_of_an_agreement_that_is_dropped_is_cancelled() -> None:
    """Regression: the timer of the oldest agreement, which was dropped for lack of room, raised KeyError later."""
    engine, sent = Engine(), list[object]()
    tree: Any = relays.Relays(engine, 1, lambda message, rank: sent.append(message), ())  # type: ignore[arg-type]
    for number in range(relays._KEPT_COUNT_MAX + 1):
        key = AgreementKey(f"operation {number}", ((0, 39),), 1)
        tree.join(Join(key.text, (), ()), 0)
    assert len(sent) == 1 and len(tree._subtree_joins) == relays._KEPT_COUNT_MAX
    assert [timer.is_cancelled for timer in engine.timers[:2]] == [True, False]
