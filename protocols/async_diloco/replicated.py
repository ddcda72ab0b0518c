"""Lets the ranks of a replica take part in asynchronous DiLoCo together.

Only the first rank of each replica is a member: it has the anchor (the members' common weights) and contributes. The
other ranks, its followers, act in the same steps (:mod:`protocols.exchange.replicas.follower_links`).

A restarted replica joins the running policy through its first rank, which loads the leader's state. Each follower gets
the optimizer's state of its counterpart in the leader's replica: under DDP a copy of the first rank's state, and under
`fully_shard` the state that the leader collected from its own followers when it admitted the replica.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncdist import LateError
from asyncdist.collectives.agreed_start import Start
from asyncdist.collectives.agreement.messages import Agreed
from asyncdist.protocols.async_diloco.options import AsyncDiLoCoOptions
from asyncdist.protocols.async_diloco.statistics import Progress
from asyncdist.protocols.diloco.anchored import AnchoredPolicy
from asyncdist.protocols.exchange.layout.copies import checksum_of
from asyncdist.protocols.exchange.layout.wire_layout import WireLayout
from asyncdist.protocols.exchange.replicas.follower_links import FollowerLinks, new_follower_links
from asyncdist.protocols.exchange.replicas.group import Readiness, ReplicaGroup, joined_replica, new_replica
from asyncdist.protocols.joining.policy import NO_POLICY, REFUSED
from asyncdist.protocols.joining.state_transfer import cloned, copied, packed, unpacked
from asyncdist.protocols.wrappers import check_replica_group
from asyncdist.tensors.byte_views import new_memory
from asyncdist.tensors.codecs import find_codec
from asyncdist.tensors.flat_state import Entry
from asyncdist.tensors.infinities import KnownInfinities
from asyncdist.tensors.optimizers.loading import load_named, named_state


class AsyncReplicatedPolicy(AnchoredPolicy):
    """Base class of asynchronous DiLoCo. The first (or only) rank of each replica is a member for its replica."""

    _own_options: AsyncDiLoCoOptions
    _known_infinities: KnownInfinities
    _links: FollowerLinks | None = None  # None unless replicas have several ranks
    _is_first = True  # whether this rank is the first, or the only, rank of its replica, and contributes for it
    _is_compared = False  # whether the replica's ranks are known to have equal weights
    _saved: Mapping[str, Any] | None = None  # kept until a start succeeds, since a failed start may be repeated

    # -- for subclasses ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _lay_out(self, entries: Sequence[Entry], parameters: set[str]) -> None:
        """Create this rank's contributions and anchor (common weights) from the model, or load a saved state."""

    @abc.abstractmethod
    def _take_saved(self) -> None:
        """Load a saved state, if there is one."""

    # -- the ranks of a replica -------------------------------------------------------------------------------------

    def _member_ranks(self) -> tuple[int, ...]:
        """Return the ranks that contribute: the first rank of each replica."""
        return self._members[:: self._replicas.size]

    def _parameters(self) -> set[str]:
        return self._known_infinities.without(dict(self.model.named_parameters(remove_duplicate=False)))

    def _checksum(self) -> int:
        entries = self._flat.entries
        layout = WireLayout(entries, range(len(entries)), self._parameters(), 1, find_codec("float32"))
        return checksum_of(layout.stepped, self._own_tensors())

    def _own_tensors(self) -> Sequence[Tensor]:
        return self._flat.tensors(self._layout_buffers)

    def _tensors(self) -> Sequence[Tensor]:
        """Return this rank's tensors. On the first rank of a sharded replica, add its copies of the other shards."""
        return self._own_tensors() if self._links is None else self._links.tensors(self._own_tensors())

    async def _collect(self, links: FollowerLinks, unsound: str) -> str:
        """Collect the replica's shards and tokens on its first rank.

        Return the name of a non-finite entry, or "" if all entries are finite.
        """
        self._reshard()
        own = Readiness(True, unsound)
        if not (unsound or self._is_compared or self._holds_shards()):
            own = own._replace(checksum=self._checksum())
        unsound = (await self._agree_in_replica(links.replica, own)).nonfinite
        self._is_compared = self._is_compared or not unsound
        self._progress.tokens = await links.replica.mean(lambda: self._progress.tokens)
        if not unsound:
            await links.collect(self._own_tensors())
        return unsound

    # -- starting ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._world.rank in self._member_ranks():
            await super()._start()
        else:
            await self._agree()
        self._saved = None

    async def _agree(self) -> Agreed:
        if self._replicas.size == 1:
            return await super()._agree()
        await self._free_replica()  # a restarted rank may have links from a failed attempt to join
        world, start = self._world, self._joint_start
        check_replica_group(self.model, self._replicas.replica_ranks(world.rank), world)
        agreed = await super()._agree()
        facts = world, start, self._replicas, self._flat, self._first_weights()
        left_s = start.left_s(self._start_timeout_s)
        await self._begin_with(await joined_replica(*facts, left_s), start, left_s)
        return agreed

    async def _begin_with(self, replica: ReplicaGroup, start: Start[Any] | None, left_s: float) -> None:
        facts = start, replica, self._flat.entries, self._parameters(), left_s
        links = self._links = await new_follower_links(*facts, is_sharded=self._holds_shards())
        try:
            await links.collect(self._own_tensors())
            if links.leads:
                self._lay_out(links.entries, links.parameters)
            else:
                self._take_saved()
        except BaseException:
            await self._free_replica()
            raise

    async def _free_replica(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            await links.free()

    # -- joining a running policy -----------------------------------------------------------------------------------

    async def _rejoin_replica(self) -> None:
        if self._replicas.size == 1 or self._links is not None:
            return
        check_replica_group(self.model, self._replicas.replica_ranks(self._world.rank), self._world)
        facts = self._world, None, self._replicas, self._flat, self._start_timeout_s
        await self._begin_with(await new_replica(*facts), None, self._start_timeout_s)
        self._services.is_admitted = False  # the new groups have set it to True

    async def _gather_in_replica(self, own: int) -> tuple[int, ...]:
        """Return the number that the first rank of this restarted replica passes to this method."""
        return (own,) if self._links is None else (await self._links.replica.gathered(own))[:1]

    async def _try_to_join(self, values: Mapping[str, str], left: int, attempt: int, *, may_start: bool) -> bool:
        if self._world.rank in self._member_ranks():
            return await super()._try_to_join(values, left, attempt, may_start=may_start)
        await self._rejoin_replica()
        (leader,) = await self._gather_in_replica(REFUSED)
        if leader == REFUSED:
            raise LateError("the first rank of this rank's replica could not join the policy")
        if leader == NO_POLICY:
            await self._start_among_newcomers()
            return True
        if not all(await self._gather_in_replica(False)):
            await self._free_replica()
            return False
        await self._load_as_follower()
        return True

    async def _pass_on(self, state: Mapping[str, Any]) -> None:
        if self._links is None:
            return
        # Without shards, the followers get this rank's state, which already belongs to the common weights.
        given = state["policy"]["followers"] or [packed({"optimizer": named_state(self.model, self.optimizer)})]
        policy = {"iteration": self.iteration, "metric": state["policy"]["metric"], "counts": None}
        await self._links.deliver_bytes([packed({**unpacked(each), "policy": policy}) for each in given])
        await self._links.deliver(self._own_tensors())

    async def _load_as_follower(self) -> None:
        """Load the state of this rank's counterpart, and the weights, which the first rank of its replica sends."""
        links = self._links
        assert links is not None, "a follower has a first rank"
        state = unpacked(await links.deliver_bytes([]))
        load_named(self.model, self.optimizer, cloned(state["optimizer"]))
        self._restore(state["policy"])
        self._saved = None
        self._progress = Progress(self.average_every)
        counterparts = state.get("weights")  # weights to which the state of a sharded model belongs
        if counterparts is not None:
            with self._weights.following(has_new_state=True), torch.no_grad():
                for own, new in zip(self._own_tensors(), counterparts, strict=True):
                    own.copy_(new)
        with self._weights.following(has_new_state=counterparts is None):
            await links.deliver(self._own_tensors())

    async def _collect_states(self, links: FollowerLinks) -> Sequence[Tensor]:
        """Collect the states of a sharded replica's followers on the leader, which admits a restarted replica."""
        if not self._holds_shards():
            return ()
        own = copied(
            lambda: {
                "optimizer": named_state(self.model, self.optimizer),
                "weights": tuple(each.detach() for each in self._own_tensors()),
            }
        )
        return await links.collect_bytes(new_memory(0) if own is None else own)
