"""Lets one rank take part in asynchronous DiLoCo with islands (groups of ranks).

Each rank is a member of two groups: its island, and the group of all ranks, in which only the servers of islands
contribute. The global server is the last rank, so that the loss of one rank does not affect both a regional server and
the global server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

from torch import Tensor

from asyncdist.messaging.services import Services
from asyncdist.protocols.async_diloco.islands.regional import Regional
from asyncdist.protocols.async_diloco.member import AsyncMember
from asyncdist.protocols.async_diloco.member_store import MemberStore
from asyncdist.protocols.async_diloco.messages import Applied
from asyncdist.protocols.async_diloco.options import ServerOptions
from asyncdist.protocols.async_diloco.statistics import AsyncDiLoCoStatistics
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.joining.state_transfer import packed, unpacked
from asyncdist.protocols.selective.islands.layout import Island

logger = logging.getLogger("protocols.async_diloco.islands")


class Federation:
    """Sends one rank's contributions to its island's server, and the island's contributions to the global server.

    Args:
        everyone: Members of the policy, in the order in which they become the global server.
        store: This rank's anchor (common weights) and contribution in its island.
        is_divided_anew: Whether the loaded checkpoint was saved with other islands.

    Attributes:
        member: This rank as a member of its island.
        global_member: This rank as a member of the group of all ranks.
        membership: Members of the island.
        global_store: This rank's global anchor and its island's contribution.
    """

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        everyone: Membership,
        island: Island,
        store: MemberStore,
        global_store: MemberStore,
        options: ServerOptions,
        *,
        is_divided_anew: bool,
    ) -> None:
        own = options.own
        assert own.global_every is not None and own.merge_weight is not None, "there are islands"
        self._island = island
        self.global_store = global_store
        islands = {rank: index for index in range(island.count) for rank in island.ranks_of(index)}
        global_options = replace(options, own=own.of_global_server(), islands=islands, mirror_every=island.count)
        self.global_member = AsyncMember(
            services,
            scopes,
            everyone,
            global_store,
            global_options,
            name="the global server",
        )
        self.scopes = scopes.of_part(f"island {island.index}")
        self.membership = Membership(services, self.scopes, island.ranks)
        self._regional = Regional(
            self.global_member,
            global_store,
            island=island.index,
            every=own.global_every,
            weight=own.merge_weight,
            decay=own.error_feedback,
            membership=self.membership,
            is_divided_anew=is_divided_anew,
        )
        self.member = AsyncMember(
            services,
            self.scopes,
            self.membership,
            store,
            options,
            name=f"island {island.index}",
            regional=self._regional,
        )
        global_store.on_answer = self._on_answer

    def _on_answer(self) -> None:
        if self.member.server is not None:
            self.member.server.start_due_task()  # merges the answer

    async def settled(self, deadline: float) -> None:
        """Wait until this rank may leave the group of all ranks. It may already leave its island."""
        self.global_member.withdraw()
        await self.global_member.settled(deadline)

    def counted(self, found: AsyncDiLoCoStatistics) -> AsyncDiLoCoStatistics:
        """Return ``found`` with this rank's counts as a regional server and as the global server added."""
        global_server = self.global_member.server
        return replace(
            found,
            merge_count=self._regional.merge_count,
            lost_progress_count=self._regional.lost_count,
            global_count=0 if global_server is None else global_server.applied_count,
            global_version=self.global_store.base.version,
        )

    def state(self) -> dict[str, Any]:
        """Return a copy of the newest global anchor and, on the global server, of the outer optimizer's state."""
        global_server, division = self.global_member.server, {"division": _division_of(self._island)}
        if global_server is None or not global_server.has_begun:
            return {**self.global_store.newest.state(), **division}
        held, outer = global_server.held()
        return {**held.state(), "outer": outer, **division}


def divided_anew(
    state: Mapping[str, Any], island: Island, sources: Mapping[int, int], *, logs: bool
) -> dict[str, Any] | None:
    """If a state was saved with other islands, return it without its island's contributions; otherwise None.

    The anchors are kept. If ``logs``, a warning is logged.

    Args:
        sources: Rank of the saved run that each rank continues.
    """
    division, own = state["global"].get("division"), _division_of(island)
    if division is None:
        return None
    saved_islands = {rank: index for index, ranks in enumerate(division) for rank in ranks}
    continues_own = all(saved_islands.get(sources[rank]) == index for index, ranks in enumerate(own) for rank in ranks)
    if continues_own and len(division) == len(own):
        return None
    if logs:
        logger.warning(
            "the checkpoint is of other islands (%d of %d ranks) than those of this job (%d of %d ranks): each island "
            "continues from its newest anchor, and does not contribute its earlier progress to the global anchor",
            len(division),
            len(division[0]),
            len(own),
            len(own[0]),
        )

    def alone(held: Mapping[str, Any] | None) -> dict[str, Any] | None:
        return None if held is None else {**held, "merged": 0}

    def outer_alone(data: Tensor) -> Tensor:
        return packed({**unpacked(data), "regional": None})

    served, outer, answer = alone(state["served"]), state["outer"], state["answer"]
    if served is not None and "outer" in served:
        served["outer"] = outer_alone(served["outer"])
    if answer is not None:
        answer = {**answer, "report": astuple(replace(Applied(*answer["report"]), merged=0))}
    return {
        **state,
        "base": alone(state["base"]),
        "served": served,
        "outer": None if outer is None else (outer[0], outer_alone(outer[1])),
        "answer": answer,
        "global": {**state["global"], "applied": ()},
    }


def _division_of(island: Island) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each island."""
    return tuple(tuple(island.ranks_of(index)) for index in range(island.count))
