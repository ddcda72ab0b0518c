"""Base class of policies that restarted ranks can join while the policy runs.

A subclass has a mechanism (such as an exchange of weights) that it opens together with the membership. A restarted rank
loads the leader's whole state: the weights, the optimizer's state, and the policy's own state.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from asyncdist import AsyncdistError, ClosedError, LateError, LocalProtocolError, RankLostError
from asyncdist.protocols.joining.admission import Admission
from asyncdist.protocols.joining.dispatcher import PolicyDispatcher, Welcome, key_of
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.replica_layout import SINGLE, Replicas
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.joining.state_transfer import check_sendable, cloned
from asyncdist.protocols.policy import SpawnPolicy
from asyncdist.protocols.starting.without_lost import lost_members
from asyncdist.tensors.optimizers.loading import load_named, named_state

logger = logging.getLogger("protocols.joining.policy")

#: Number that a restarted rank sends to the other ranks of its replica if no leader has answered, because no policy is
#: running or the rank is about to raise an error.
NO_POLICY: Final = -1
REFUSED: Final = -2


class JoinablePolicy(SpawnPolicy):
    """Base class of policies that restarted ranks can join."""

    takes_metric: ClassVar[bool] = False
    admits_restarted = True
    _replicas: Replicas = SINGLE
    _admission: Admission | None = None  # None before the policy opens
    #: Names of the agreed values that change while the policy runs. A restarted rank may have other values for these
    #: names.
    progress_names: ClassVar[tuple[str, ...]] = ()

    # -- for subclasses ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _open(self, membership: Membership, scopes: PolicyScopes) -> None:
        """Open the policy's mechanism, such as an exchange, and create the admission with :meth:`_new_admission`."""

    def _opened_admission(self) -> Admission:
        """Return the admission that :meth:`_open` has created."""
        assert self._admission is not None, "the policy has not opened"
        return self._admission

    def _member_ranks(self) -> tuple[int, ...]:
        """Return the ranks that become members of the policy; by default, all ranks that start it."""
        return self._members

    @abc.abstractmethod
    def _begin_joined(self) -> None:
        """Start taking part as a member, after this restarted rank has loaded the leader's state."""

    @abc.abstractmethod
    def _finish_loading(self) -> None:
        """Finish loading the leader's state, and drop the parts that only a leader keeps."""

    async def _rejoin_replica(self) -> None:
        """Before this restarted rank joins, wait for the other ranks of its replica, which were restarted as well."""

    async def _gather_in_replica(self, own: int) -> tuple[int, ...]:
        """Return the numbers that the ranks of this restarted rank's replica pass to this method."""
        return (own,)

    async def _pass_on(self, state: Mapping[str, Any]) -> None:
        """Pass the leader's state, which this rank has loaded, on to ranks of its replica that are not members."""
        del state

    def _state_unit_nbytes(self) -> int:
        """Return the size of the model in bytes, which limits the size of the leader's state."""
        return self._flat.nbytes

    # -- starting and joining ---------------------------------------------------------------------------------------

    async def _start(self) -> None:
        agreed = await self._agree()
        meeting = self._joint_start.meeting
        gone = lost_members(self._world, self._members, meeting)
        lost = {each for rank in gone for each in self._replicas.replica_ranks(rank)}
        known = self._member_ranks()
        # Include ranks that were restarted since the start was agreed on. Members that started earlier still count
        # these ranks, so all members see the same changes of the leader.
        members = [rank for rank in self._leading_order() if rank in meeting.ranks]
        scopes = PolicyScopes.of_start(meeting.ranks, agreed)
        self.start_number = scopes.policy
        facts = self._services, scopes, members
        self._open(Membership(*facts, known=known, replaced=lost, replicas=self._replicas), scopes)

    def _leading_order(self) -> Sequence[int]:
        return self._member_ranks()

    def _new_admission(self, membership: Membership, scopes: PolicyScopes) -> Admission:
        return Admission(self._services, membership, scopes, self._member_ranks(), self._shared_values())

    def _shared_values(self) -> dict[str, str]:
        """Return the agreed values that training does not change. They are equal on members and restarted ranks."""
        return {name: value for name, value in self._agreed_values().items() if name not in self.progress_names}

    async def _join(self) -> None:
        if not self.admits_restarted:
            raise LocalProtocolError(
                f"{type(self).__name__} with islands does not admit a restarted rank to a running policy; the other "
                "ranks continue without it. To train with all ranks again, end the job, and start it from its last "
                "checkpoint"
            )
        # The other ranks must not count this rank as a member before they admit it.
        was_admitted, self._services.is_admitted = self._services.is_admitted, False
        check_sendable(self.model, self.optimizer)
        values = self._shared_values()
        # Determined before any attempt, because after a failed attempt this rank has left a policy.
        left = self._services.shared(PolicyDispatcher).newest_left(key_of(self._member_ranks(), values))
        attempt = 1
        try:
            while not await self._try_to_join(values, left, attempt, may_start=was_admitted):
                attempt += 1
                logger.info("the leader was lost before it admitted this rank; this rank asks the next leader")
        except BaseException:
            self._stage = "closed"
            raise
        self._services.is_admitted = True

    async def _try_to_join(self, values: Mapping[str, str], left: int, attempt: int, *, may_start: bool) -> bool:
        """Try to join once. Return False if the leader is lost while it sends its state.

        The ranks of a restarted replica join together: they ask the same leader, and either all get a state or none.
        """
        # The leader admits a replica of several ranks only when it applies an average, and the wait for that has no
        # time limit.
        deadline = self._world.time() + self._start_timeout_s if self._replicas.size == 1 else None
        await self._rejoin_replica()
        try:
            facts = self._member_ranks(), values, self._start_timeout_s
            own = self._replicas.replica_ranks(self._world.rank)
            with self._services.shared(PolicyDispatcher).applying(
                *facts, left=left, attempt=attempt, replica_ranks=own
            ) as application:
                welcome, leader = await application.welcomed()
        except AsyncdistError as error:
            # If all other ranks were restarted as well, no policy is running.
            is_startable = may_start and isinstance(error, ClosedError)
            if set(await self._gather_in_replica(NO_POLICY if is_startable else REFUSED)) != {NO_POLICY}:
                raise
            await self._start_among_newcomers()
            return True
        leaders = set(await self._gather_in_replica(leader))
        if REFUSED in leaders or NO_POLICY in leaders:
            raise LateError("another rank of this rank's replica could not join the policy")
        return leaders == {leader} and await self._try_to_join_leader(welcome, leader, deadline, values, attempt)

    async def _try_to_join_leader(
        self, welcome: Welcome, leader: int, deadline: float | None, values: Mapping[str, str], attempt: int
    ) -> bool:
        scopes = PolicyScopes.of_running(welcome, values)
        self.start_number = scopes.policy
        members = [rank for rank, _ in welcome.members]
        membership = Membership(
            self._services,
            scopes,
            members,
            known=self._member_ranks(),
            admitted=dict(welcome.members),
            leader=leader,
            attempt=attempt,
            replicas=self._replicas,
        )
        self._open(membership, scopes)
        state: Any = None
        lost: RankLostError | None = None
        try:
            try:
                state = await self._opened_admission().take_state(
                    self._state_unit_nbytes(), self._start_timeout_s, deadline
                )
            except RankLostError as error:
                if membership.is_broken:
                    raise
                lost = error
            if all(await self._gather_in_replica(state is not None)):
                self._restore_whole(state)
                await self._pass_on(state)
                self._begin_joined()
                return True
        except BaseException as error:
            await self._stop(error)
            raise
        # Do not wait, since no other rank needs a restarted rank without a state.
        await self._stop(lost or RankLostError("the leader was lost before all ranks had its state", rank=leader))
        return False

    def _whole_state(self) -> dict[str, Any]:
        """Return this rank's state after the current step, from which a restarted rank can continue."""
        weights = self._flat.new_buffers()
        self._flat.snapshot(weights)
        policy = {**self.state_dict(), "iteration": self.iteration + 1}
        return {"weights": weights.by_name(), "optimizer": named_state(self.model, self.optimizer), "policy": policy}

    def _restore_whole(self, state: Mapping[str, Any]) -> None:
        weights = self._flat.new_buffers()
        for name, tensor in weights.by_name().items():
            tensor.copy_(state["weights"][name])
        load_named(self.model, self.optimizer, cloned(state["optimizer"]))  # torch keeps the tensors
        with self._weights.following(has_new_state=True):
            self._flat.load(weights)
        self._restore(state["policy"])
        self._finish_loading()
