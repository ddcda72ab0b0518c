"""Keeps a one-sided policy's window in step with the policy's members, of whom restarted ranks may become one again."""

from __future__ import annotations

from asyncdist.collectives.one_sided import FollowedWindow
from asyncdist.protocols.joining.membership import Membership


class WindowFollower:
    """Notifies a window of members that leave, are lost, or are admitted; no member waits for another."""

    def __init__(self, membership: Membership, window: FollowedWindow) -> None:
        self._membership = membership
        self._window = window

    def may_admit(self) -> bool:
        """Return True: a newcomer can continue from the leader's state after each step."""
        return True

    def on_lost(self, rank: int) -> None:
        """Read no further version of a rank that is lost or has left."""
        self._window.retire(rank)

    def on_new_leader(self) -> None:
        """Read no further version of the ranks that are not members; the former leader is one of them."""
        for rank in self._membership.known - self._membership.living:
            self._window.retire(rank)

    def on_reachable(self, rank: int) -> None:
        """Read the versions of a restarted member, and let it read this rank's."""
        self._window.admit(rank)

    def on_admitted(self, rank: int) -> None:
        """Do nothing: :meth:`on_reachable` was called."""

    def on_settling(self) -> None:
        """Do nothing: members of a one-sided policy do not wait for each other."""
