"""Decides which rank coordinates a policy when its coordinator is lost, stops, or does not attend to its task.

`Succession` is one rank's view: a plain synchronous object that turns news into instructions, like
`protocols.selective.member`. All ranks know the order of succession. When a rank learns that the coordinator is gone,
it looks for the first rank of that order which can take over: if that is itself it claims the task, else it nominates
that rank, which may not have heard of the loss or may have left the policy.

Each claim opens an *epoch*. The epochs of one rank are its own: no two ranks ever claim the same one. The largest epoch
that a rank has heard of counts, so ranks that have claimed at the same time, or a coordinator that was only slow, end
up with one coordinator: the others learn of a larger epoch and follow. (The term of Raft, Ongaro and Ousterhout 2014,
without the vote: nothing that a coordinator decides has to outlive it, since weights change on members only.)
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

#: So often is a rank nominated, once in each of the nominating rank's cadences, until the next in the order is.
NOMINATION_COUNT_MAX: Final = 3


class Nominate(NamedTuple):
    """Tell a rank that the coordinator is gone, and that it is the next."""

    dest: int


class Claim(NamedTuple):
    """Coordinate from now on, in this epoch, and tell all members."""

    epoch: int


class Follow(NamedTuple):
    """Take part in the epoch of another rank that coordinates."""

    epoch: int
    coordinator: int


class Inform(NamedTuple):
    """Tell a rank, which has missed it, which rank coordinates now."""

    dest: int


Step: TypeAlias = Nominate | Claim | Follow | Inform
Steps: TypeAlias = tuple[Step, ...]


class Succession:
    """Keeps one rank's view of who coordinates.

    Args:
        rank: this rank.
        order: ranks that may take over, the first one first; with this rank, unless it is a reserved coordinator.
        coordinator: the rank that coordinates in epoch 0.

    Attributes:
        epoch: the largest that this rank has heard of.
        coordinator: the rank that coordinates in it; None when that one is gone.
    """

    def __init__(self, rank: int, order: Sequence[int], coordinator: int) -> None:
        self.rank = rank
        self.epoch = 0
        self.coordinator: int | None = coordinator
        self._order = tuple(order)
        self._lost: set[int] = set()
        self._unavailable: set[int] = set()  # lost, left, or out of the policy
        self._passed_over: set[int] = set()  # for now: they do not answer
        self._nomination_count = 0

    def on_lost(self, rank: int) -> Steps:
        """Note that a rank was lost, or as the coordinator has stopped."""
        self._lost.add(rank)
        self._unavailable.add(rank)
        if rank == self.coordinator:
            self.coordinator = None
            self._passed_over.clear()
            self._nomination_count = 0
        return self._seek() if self.coordinator is None else ()

    def on_left(self, rank: int) -> Steps:
        """Note that a rank cannot take over, since it has left the policy. As the coordinator it goes on."""
        self._unavailable.add(rank)
        return self._seek() if self.coordinator is None else ()

    def leave(self) -> None:
        """Claim nothing from now on: this rank leaves the policy. As the coordinator it goes on."""
        self._unavailable.add(self.rank)

    def on_cadence(self) -> Steps:
        """Go on looking, while there is no coordinator: a message may have been lost, or the next rank may be busy."""
        if self.coordinator is not None:
            return ()
        self._nomination_count += 1
        if self._nomination_count >= NOMINATION_COUNT_MAX:
            self._nomination_count = 0
            if (passed_over := self._next()) is not None:
                self._passed_over.add(passed_over)
        return self._seek()

    def on_nomination(self, source: int, epoch: int) -> Steps:
        """Answer a rank that knows of no coordinator. If none is known here either, this rank is looking already."""
        if epoch < self.epoch:
            return () if self.coordinator is None else (Inform(source),)
        if epoch == self.epoch:
            return ()
        self.epoch, self.coordinator = epoch, None  # of a coordinator that this rank has not heard of, and that is gone
        return self._seek()

    def on_suspicion(self) -> Steps:
        """Take the task over from a coordinator that does not attend to it; it may do so again later."""
        is_due = self.coordinator not in (None, self.rank) and self.rank not in self._unavailable
        return self._claim() if is_due else ()

    def on_claim(self, epoch: int, coordinator: int, source: int) -> Steps:
        """Note which rank coordinates in an epoch, as ``source`` says."""
        if epoch < self.epoch:
            return () if self.coordinator is None else (Inform(source),)
        if epoch == self.epoch and self.coordinator is not None:
            return ()
        if coordinator in self._lost:  # it has claimed, and died
            self.epoch = max(self.epoch, epoch)
            self.coordinator = None
            return self._seek()
        if epoch == self.epoch:  # of a coordinator that is gone here
            return ()
        self.epoch, self.coordinator = epoch, coordinator
        self._passed_over.clear()
        return (Follow(epoch, coordinator),)

    def is_available(self, rank: int) -> bool:
        """Return whether a rank may take part, as far as is known."""
        return rank not in self._unavailable

    def place(self, limit: int) -> int | None:
        """Return this rank's place, from 0, among those that can take over from the coordinator; None from a limit."""
        if self.rank == self.coordinator or self.rank in self._unavailable:
            return None
        able = (rank for rank in self._order if rank != self.coordinator and rank not in self._unavailable)
        return next((place for place, rank in enumerate(islice(able, limit)) if rank == self.rank), None)

    # ---------------------------------------------------------------- helpers

    def _next(self) -> int | None:
        """Return the rank whose turn it is to take over; None when no rank is left that can, as far as is known."""
        for rank in self._order:
            if rank not in self._unavailable and (rank == self.rank or rank not in self._passed_over):
                return rank
        return None

    def _seek(self) -> Steps:
        rank = self._next()
        if rank is None:
            return ()
        return self._claim() if rank == self.rank else (Nominate(rank),)

    def _claim(self) -> Steps:
        """Open the next epoch that is this rank's own."""
        count, place = len(self._order), self._order.index(self.rank)
        self.epoch = self.epoch - (self.epoch - 1 - place) % count + count
        self.coordinator = self.rank
        self._passed_over.clear()
        return (Claim(self.epoch),)
