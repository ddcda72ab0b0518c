"""Divides the members of a policy into replicas: groups of ranks that train one model together, as under DDP.

The ranks with the same index in their replicas are *counterparts*: they have the same part of the model. All ranks are
members. If one rank of a replica is lost or leaves, the whole replica no longer takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Replicas:
    """Divides ``ranks`` into groups of ``size`` consecutive ranks. Each group trains one replica of the model.

    Attributes:
        ranks: All ranks of the policy, in the group's order.
    """

    ranks: tuple[int, ...]
    size: int = 1

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the replica of ``rank``, including ``rank``."""
        if self.size == 1:
            return (rank,)
        first = self.ranks.index(rank) // self.size * self.size
        return self.ranks[first : first + self.size]

    def index(self, rank: int) -> int:
        """Return the index of ``rank`` in its replica."""
        return self.replica_ranks(rank).index(rank)

    def counterparts(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same part of the model as ``rank``, including ``rank``."""
        return self.ranks if self.size == 1 else self.ranks[self.index(rank) :: self.size]

    def place_of(self, rank: int) -> dict[str, int]:
        """Return entries for a checkpoint that identify the part of the model on ``rank``."""
        return {"replica_size": self.size, "replica_index": self.index(rank)}

    def check_saved(self, rank: int, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless ``state`` was saved by a rank with the same part of the model as ``rank``."""
        own, saved = self.place_of(rank), {name: state[name] for name in ("replica_size", "replica_index")}
        if own != saved:
            ours, theirs = (
                f"rank {each['replica_index']} of a replica with {each['replica_size']} ranks" for each in (own, saved)
            )
            raise ValueError(
                f"the state must be of {ours}, got a state of {theirs}. Use the replica_size of the run that saved it; "
                "load each rank's own state, or call load_population with policy="
            )


#: Default division, in which each rank is a replica.
SINGLE: Final = Replicas(())
