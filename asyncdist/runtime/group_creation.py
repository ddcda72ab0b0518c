"""Makes and frees groups of ranks, for ``World.new_group`` and ``Group.free``.

All members agree first, so that either all or none of them make the group. A rank makes one group at a time
(:class:`asyncdist.collectives.agreed_start.Turns`), because two concurrent groups would get the same tag.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from asyncdist import validation
from asyncdist.collectives.agreed_start import Start, Turns, assemble, start_together
from asyncdist.collectives.agreement.agreements import Agreements
from asyncdist.collectives.agreement.messages import Losses
from asyncdist.collectives.collectives import Collectives
from asyncdist.collectives.group_ledger import GroupLedger
from asyncdist.collectives.groups import Group, check_ranks, free_all, short
from asyncdist.collectives.membership import MembershipLog
from asyncdist.errors import ClosedError, DisagreementError, LocalProtocolError, RankLostError
from asyncdist.messaging import wire
from asyncdist.messaging.channels import Channel
from asyncdist.messaging.services import Services
from asyncdist.runtime.failing.replica_mates import ReplicaMates
from asyncdist.waits import WaitId, WaitKind

#: Seconds that a rank waits to be notified of a loss that has ended its request for a group, before it repeats the
#: request.
_NOTICED_AFTER_S: Final = 0.05
_SUBJECT: Final = "new group"
_OF_SURVIVORS: Final = "group of the survivors"

logger = logging.getLogger("asyncdist.runtime.group_creation")


class GroupCreation:
    """Makes and frees the groups of one rank. ``ledger`` records them."""

    def __init__(
        self,
        services: Services,
        agreements: Agreements,
        collectives: Collectives,
        attendance: MembershipLog,
        system: Channel[object],
    ) -> None:
        self._attendance = attendance
        self.ledger = GroupLedger(attendance, self._free, self._forget)
        self._services = services
        self._agreements = agreements
        self._collectives = collectives
        self._system = system
        self._turns = Turns(services, agreements)

    async def new_groups(
        self, lists: Iterable[Sequence[int]], timeout_s: float, *, part_of: Start[Any] | None = None
    ) -> list[Group]:
        """Make several groups one after another, or none if one fails. See :meth:`asyncdist.World.new_groups`."""
        made: list[Group] = []
        wanted = list(lists)
        now = self._services.time
        give_up_at = now() + timeout_s
        try:
            for ranks in wanted:
                made += [await self.new_group(ranks, _left_s(give_up_at - now()), part_of=part_of)]
        except BaseException as error:  # Raised also by a cancellation or an invalid list.
            self._decline(wanted[len(made) + 1 :], error, part_of)
            await free_all(made)
            raise
        return made

    def _decline(self, lists: Iterable[Sequence[int]], error: BaseException, part_of: Start[Any] | None) -> None:
        """Notify the other members that this rank will not join their groups, so that they do not wait for it."""
        subject = _SUBJECT if part_of is None else _subject_for(part_of)
        for ranks in lists:
            # No member waits for a list that is not a valid group.
            with contextlib.suppress(LocalProtocolError, TypeError):
                members = check_ranks(ranks, rank=self._services.rank, size=self._services.size)
                meeting = self._agreements.next_request(members, subject)
                self._agreements.decline(meeting, error if isinstance(error, Exception) else None)

    async def surviving_group(self, group: Group, timeout_s: float) -> Group:
        """Make a group of the living members of ``group``. See :func:`asyncdist.surviving_group`.

        Members are notified of a loss at different times. A member whose request includes a lost rank gets an error and
        requests a smaller group, so all remaining members request the final list equally often. The agreement is named
        after the original group, because tasks that lost a rank in different groups may request equal lists
        concurrently.

        Members that were restarted since the group was made are omitted. A restarted rank may never call this method,
        and the others connect to it at different times, so that they would request different lists.
        """
        services, has_lost = self._services, self._attendance.has_lost
        origin = group.lease.origin or group.key
        is_of_all = not group.lease.serial
        if services.incarnation and is_of_all:
            logger.warning(
                "rank %d was restarted, so surviving_group() returns a group of this rank alone: the ranks that were "
                "never lost do not wait for it",
                services.rank,
            )
            return await self.new_group([services.rank], timeout_s, subject=_OF_SURVIVORS)
        gone: set[int] = set()

        async def live() -> list[int]:
            nonlocal gone
            gone = set(services.gone)
            return [rank for rank in group.ranks if rank not in gone and not has_lost(group, rank)]

        # A rank that was notified of a loss earlier may end the request. This rank then waits until it is notified.
        subject, end_at = f"{_OF_SURVIVORS} of {origin:x}", services.time() + timeout_s
        made = await self._new_group_despite_losses(live, end_at, subject, lambda: services.gone != gone)
        made.lease.origin = origin
        return made

    async def _new_group_despite_losses(
        self,
        ranks: Callable[[], Awaitable[Sequence[int]]],
        end_at: float,
        subject: str,
        has_changed: Callable[[], bool],
    ) -> Group:
        """Make a group of ``await ranks()``. If a loss ends the request, repeat it once ``has_changed()``, or soon."""
        services = self._services
        while True:
            try:
                return await self.new_group(await ranks(), _left_s(end_at - services.time()), subject=subject)
            except (RankLostError, ClosedError, DisagreementError):
                if services.engine.failure is not None or services.time() >= end_at:
                    raise
                until = min(end_at, services.time() + _NOTICED_AFTER_S)
                await services.engine.until(has_changed, WaitId(WaitKind.LOSSES), deadline=until)

    async def replica_group(self, ranks: Sequence[int], timeout_s: float, *, subject: str = _SUBJECT) -> Group:
        """Make a group of the ranks of a replica. On a restarted rank, first wait until the other ranks are back.

        If a rank of a replica is lost, the others end as well, and all of them are restarted at different times. A rank
        may also be lost again while it starts. From this call on, the loss of another rank of the replica therefore
        ends this restarted rank, too, as a lost rank.
        """
        services = self._services
        if not services.incarnation:
            return await self.new_group(ranks, timeout_s, subject=subject)
        others = [rank for rank in ranks if rank != services.rank]
        services.shared(ReplicaMates).ranks = frozenset(others)

        def have_returned() -> bool:
            is_back = (rank not in services.gone and services.restarted.get(rank) for rank in others)
            return all(is_back)

        end_at = services.time() + timeout_s

        async def returned() -> Sequence[int]:
            await services.engine.until(have_returned, WaitId(WaitKind.LOSSES), deadline=end_at)
            return ranks

        return await self._new_group_despite_losses(returned, end_at, subject, lambda: not have_returned())

    async def new_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        *,
        part_of: Start[Any] | None = None,
        subject: str = _SUBJECT,
    ) -> Group:
        """Make a group of ``ranks``. See :meth:`asyncdist.World.new_group`.

        Args:
            part_of: Start of the operation that needs the group, or None. The groups of such a start are counted
                separately.
            subject: Name of the operation, such as a new group or a group of survivors. Each operation's groups are
                counted separately.
        """
        if part_of is not None:
            subject = _subject_for(part_of)
        services = self._services
        members = check_ranks(ranks, rank=services.rank, size=services.size)
        validation.seconds("timeout_s", timeout_s)
        transport = services.engine.transport
        # Count the losses before the agreement, so that the loss of a member during the agreement ends the group, too.
        loss_count = self._attendance.loss_count

        async def make(start: Start[Group]) -> Group:
            async with self._turns.turn(start, timeout_s, self.ledger.numbers_in_use) as agreed:
                tag = self.ledger.tag_of(agreed.number)
                native = None
                if transport.capabilities.native_collectives:
                    await assemble(self._agreements, members, "new communicator")
                    native = transport.new_group(members, tag)
                # Several kinds of operations create groups. No two groups of the same ranks may share a serial number.
                qualified = start.meeting.key.subject
                serial = agreed.time if qualified == _SUBJECT else wire.scope_of(members, qualified, agreed.time)
                group = self.ledger.open(members, services.rank, tag, serial, native, made_after=loss_count)
                services.is_admitted = services.is_admitted or len(members) > 1
                if part_of is not None:
                    group.lease.subjects.append(subject)
                return group

        name = f"new group of {len(members)} ranks"
        return await start_together(
            services, self._agreements, members, subject, make, Group.free, name=name, part_of=part_of
        )

    def losses(self) -> Losses:
        """Return the lost ranks.

        A restarted rank omits ranks that it has not connected to, because they may be alive.
        """
        return tuple(each for each in self._attendance.lost if not self._services.is_unmet(each[0]))

    async def _free(self, group: Group) -> None:
        """Free a group. If the caller is cancelled, continue in the background."""
        if group.lease.is_freed or self._services.engine.failure is not None:
            return
        group.lease.is_freed = True
        name = f"the end of a group of {group.size} ranks"
        await self._services.engine.shielded(self._services.spawn_service(self._end(group), name=name), group.tag)

    async def _end(self, group: Group) -> None:
        what = WaitId(WaitKind.GROUP_COLLECTIVES, name=short(group.ranks))
        await self._services.engine.until(lambda: not self._collectives.is_busy(group), what)
        freed = self.ledger.free(group, self.losses())
        for rank in group.ranks:
            if rank != self._services.rank and rank not in self._services.gone:
                with contextlib.suppress(RankLostError):
                    self._system.send_nowait(freed, rank)

    def _forget(self, group: Group) -> None:
        """Remove the records of a group that all members have freed from the agreements and the checker."""
        for subject in group.lease.subjects:
            self._agreements.forget(group.ranks, subject)
        checker = self._services.engine.transport.collective_checker
        if checker is not None:
            checker.forget(group.ranks, group.key, self._services.rank)


def _left_s(seconds: float) -> float:
    return max(round(seconds, 3), 0.001)


def _subject_for(part_of: Start[Any]) -> str:
    return f"{_SUBJECT} for {part_of.name}"
