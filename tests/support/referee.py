"""Checks every promise of a selective averaging's coordinator after every event."""

from __future__ import annotations

import math
from collections import Counter

from asyncdist.messaging import wire
from protocols.selective.lifecycle import PLAUSIBLE_ROUND_MAX
from protocols.selective.messages import Assign, End, Frozen, Joined, Rejoin
from protocols.selective.roster import Send
from protocols.selective.selection import SelectiveRules
from support.selective import OpenedCoordinator


class Referee:
    """Feeds a coordinator and checks every promise after every call."""

    def __init__(self, size: int, options: SelectiveRules, *, takes_over: bool = False) -> None:
        self.route = options.route
        self.coordinator = OpenedCoordinator(range(size), options, may_join=range(size) if takes_over else None)
        self.live = set(range(size))
        self.now = 0.0
        self.number = 0
        self.last_round = 0
        self.round_count = 0
        self.named: set[int] = set()
        self.assigned: dict[int, Assign] = {}
        self.ends: Counter[int] = Counter()
        self.frozen: set[int] = set()

    def check(self, sends: tuple[Send, ...]) -> None:
        """Check the messages that the coordinator sends after one event."""
        for send in sends:
            assert send.dest in self.live
            message = send.message
            if isinstance(message, Rejoin):
                assert send.round == 0
                continue
            if isinstance(message, Assign):
                self.on_assign(send.dest, send.round, message)
                continue
            assert send.round == self.number
            assert send.dest in self.named
            assert self.ends[send.dest] == 0, "a round must send nothing to a rank after End"
            if isinstance(message, Frozen):
                assert send.dest not in self.frozen
                assigned = self.assigned[send.dest]
                assert assigned.role == "replacer" or send.dest in assigned.reducers
                assert set(message.reducers) <= set(assigned.reducers) & (self.live | set(message.donors))
                self.frozen.add(send.dest)
                self.on_frozen(message)
            else:
                assert isinstance(message, End)
                self.ends[send.dest] += 1
        statistics = self.coordinator.statistics()
        open_count = statistics.rounds_decided - statistics.rounds_ended
        assert open_count in (0, 1)
        if not open_count:
            self.all_released()
        else:
            assert self.coordinator.next_deadline() is not None
        assert self.coordinator.finished == (not self.live)

    def all_released(self) -> None:
        """Check that the last round has ended for all."""
        assert all(self.ends[rank] == 1 for rank in self.named & self.live), (
            "each rank named in the round must receive exactly one End"
        )

    def on_assign(self, dest: int, number: int, message: Assign) -> None:
        """Check the beginning of a round."""
        if number != self.number:
            self.all_released()
            assert number == max(self.number, self.last_round) + 1
            assert number <= wire.ROUND_MAX, "the round number must fit into the header"
            self.round_count += 1
            self.number, self.assigned, self.frozen = number, {}, set()
            self.named = set(message.donors) | set(message.replacers)
            self.ends.clear()
        assert dest not in self.assigned
        self.assigned[dest] = message
        assert (dest in message.donors) != (dest in message.replacers)
        assert message.role == ("donor" if dest in message.donors else "replacer")
        assert message.reducers in ((), message.donors, message.replacers)
        assert message.part == (message.reducers.index(dest) if dest in message.reducers else -1)
        assert not message.reducers or self.route == "sharded"

    def on_frozen(self, message: Frozen) -> None:
        """Check the donors of a round."""
        allowed = next(iter(self.assigned.values())).donors
        assert set(message.donors) <= set(allowed) & self.live
        assert list(message.donors) == sorted(message.donors)
        assert len(message.donors) == len(message.weights) == len(message.iterations)
        assert all(weight > 0 for weight in message.weights)
        assert message.best in message.donors or (message.best == -1 and not allowed)
        assert 0 < message.timeout_s < math.inf

    def feed(self, event: tuple[str, int, int, int, float, float]) -> None:
        """Take one event: its kind, a rank, rounds back from the newest, an iteration, a metric, and the time since."""
        kind, rank, back, iteration, value, step = event
        self.now += step
        number = self.number - back
        coordinator = self.coordinator
        match kind:
            case "report":
                sends = coordinator.on_report(rank, iteration, value, step, self.now, interval_s=iteration / 100)
            case "ready":
                sends = coordinator.on_ready(rank, number, iteration, self.now)
            case "decline":
                sends = coordinator.on_decline(rank, number, "no", self.now)
            case "applied":
                sends = coordinator.on_applied(rank, number, iteration, self.now)
            case "abandoned":
                sends = coordinator.on_abandoned(rank, number, "gave up", self.now)
            case "joined":
                last_round = max(0, number)
                if rank in self.live:
                    self.last_round = max(self.last_round, min(last_round, PLAUSIBLE_ROUND_MAX))
                joined = Joined(last_round, iteration // 2, -1, iteration, value, step, iteration / 100)
                sends = coordinator.on_joined(rank, joined, self.now)
            case "gone":
                self.live.discard(rank)
                sends = (coordinator.on_leave if back else coordinator.on_lost)(rank, self.now)
            case _:
                sends = coordinator.on_time(self.now)
        self.check(sends)

    def drain(self) -> None:
        """Advance the time until no deadline is due."""
        for _ in range(6):
            deadline = self.coordinator.next_deadline()
            if deadline is None:
                break
            self.now = max(self.now, deadline)
            self.check(self.coordinator.on_time(self.now))
        assert self.coordinator.next_deadline() is None, (
            "without further reports, the coordinator must have no more deadlines"
        )
        statistics = self.coordinator.statistics()
        assert statistics.rounds_decided == statistics.rounds_ended == self.round_count
