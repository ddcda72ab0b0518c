"""Takes part in asynchronous DiLoCo with islands for one rank.

Each rank is a member of two groups: its island, and the group of all ranks, in which only the servers of islands
contribute. The global server is the last rank, so that the loss of one rank does not affect a regional and the
global server at once.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from asyncdist.messaging.services import Services
from asyncdist.protocols.async_diloco.blocks import Layouts
from asyncdist.protocols.async_diloco.holdings import Holdings
from asyncdist.protocols.async_diloco.islands.regional import Regional
from asyncdist.protocols.async_diloco.member import AsyncMember
from asyncdist.protocols.async_diloco.options import ServerOptions
from asyncdist.protocols.async_diloco.statistics import AsyncDiLoCoStatistics
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.selective.islands.layout import Island

logger = logging.getLogger("protocols.async_diloco.islands")


class Federation:
    """Sends one rank's contributions to its island's server, and the island's contributions to the global server.

    Args:
        scopes: Scopes of the policy among all ranks.
        everyone: Members of the policy, in the order in which they become the global server.
        holdings: This rank's anchor and contribution in its island.
        options: Options of the regional servers.

    Attributes:
        member: This rank as a member of its island.
        membership: Members of the island.
        holdings: This rank's global anchor and its island's contribution.
    """

    def __init__(
        self,
        services: Services,
        scopes: PolicyScopes,
        everyone: Membership,
        island: Island,
        layouts: Layouts,
        holdings: Holdings,
        upper_holdings: Holdings,
        options: ServerOptions,
    ) -> None:
        own, overlapped = options.own, options.own.late == "skip"
        assert own.global_every is not None and own.merge_weight is not None, "there are islands"
        self._island = island
        self.holdings = upper_holdings
        islands = {rank: index for index in range(island.count) for rank in island.ranks_of(index)}
        upper_options = replace(options, own=own.of_global_server(), islands=islands, mirror_every=island.count)
        self._upper = AsyncMember(
            services,
            scopes,
            everyone,
            layouts,
            upper_holdings,
            upper_options,
            is_overlapped=overlapped,
            name="the global server",
        )
        self.scopes = scopes.of_part(f"island {island.index}")
        self.membership = Membership(services, self.scopes, island.ranks)
        self._regional = Regional(
            self._upper,
            upper_holdings,
            layouts,
            island=island.index,
            every=own.global_every,
            weight=own.merge_weight,
            membership=self.membership,
        )
        self.member = AsyncMember(
            services,
            self.scopes,
            self.membership,
            layouts,
            holdings,
            options,
            is_overlapped=overlapped,
            name=f"island {island.index}",
            regional=self._regional,
        )
        upper_holdings.on_answer = self._on_answer

    def _on_answer(self) -> None:
        if self.member.server is not None:
            self.member.server.on_merge_due()

    async def settled(self, deadline: float) -> None:
        """Wait until this rank may leave the group of all ranks, after it has settled in its island."""
        self._upper.withdraw()
        await self._upper.settled(deadline)

    def leave(self) -> None:
        """Leave the group of all ranks."""
        self._upper.leave()

    async def freeze(self) -> None:
        """Stop changing the global anchor until :meth:`thaw`."""
        if self._upper.server is not None:
            await self._upper.server.freeze()

    def thaw(self) -> None:
        """Resume changing the global anchor."""
        if self._upper.server is not None:
            self._upper.server.thaw()

    def counted(self, found: AsyncDiLoCoStatistics) -> AsyncDiLoCoStatistics:
        """Return ``found`` with this rank's counts as a regional and as the global server."""
        upper = self._upper.server
        return replace(
            found,
            merge_count=self._regional.merge_count,
            lost_progress_count=self._regional.lost_count,
            global_count=0 if upper is None else upper.applied_count,
            global_version=self.holdings.base.version,
        )

    def state(self) -> dict[str, Any]:
        """Return a copy of this rank's newest global anchor and, on the global server, of the outer state."""
        upper = self._upper.server
        if upper is None or not upper.has_begun:
            return self.holdings.newest.state()
        held, outer = upper.held()
        return {**held.state(), "outer": outer}
