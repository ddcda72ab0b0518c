"""Stops and starts reading other ranks' snapshots as members are lost, leave or are admitted."""

from __future__ import annotations

from asyncdist.collectives.one_sided import StreamedWindow
from asyncdist.protocols.joining.membership import Membership


class WindowFollower:
    """Stops reading snapshots of members that leave or are lost, and starts reading those of admitted members."""

    def __init__(self, membership: Membership, window: StreamedWindow) -> None:
        self._membership = membership
        self._window = window

    def may_admit(self) -> bool:
        """Return True, because a restarted rank can continue from the leader's state after each step."""
        return True

    def on_lost(self, rank: int) -> None:
        """Stop reading snapshots of a rank that is lost or has left."""
        self._window.retire(rank)

    def on_new_leader(self) -> None:
        """Stop reading snapshots of the former leader, and of all other ranks that are not living members."""
        for rank in self._membership.known - self._membership.living:
            self._window.retire(rank)

    def on_reachable(self, rank: int) -> None:
        """Start to read snapshots of a restarted member, and let it read this rank's snapshots."""
        self._window.admit(rank)

    def on_admitted(self, rank: int) -> None:
        """Do nothing, because :meth:`on_reachable` has already handled the restarted rank."""

    def on_settling(self) -> None:
        """Do nothing, because members of a one-sided policy do not wait for each other."""
