"""Synchronises the ranks of one replica, so that they apply the same means in the same steps.

All ranks of a replica call :meth:`ReplicaGroup.agree` before they apply a mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncdist import AsyncdistError, ClosedError, DisagreementError, Group, World, reduce_and_broadcast, validation
from asyncdist.collectives.agreed_start import Start, start_together
from asyncdist.collectives.groups import free_all
from asyncdist.protocols.joining.replica_layout import Replicas
from asyncdist.protocols.metrics import mean_of
from asyncdist.protocols.starting.differences import LEFT_OUT, explained
from asyncdist.runtime.failing.replica_mates import ReplicaMates
from asyncdist.tensors.flat_state import Fingerprint, FlatState
from asyncdist.wording import ranks_in_words

logger = logging.getLogger("protocols.exchange.replicas.group")

#: Seconds after which a leaving rank logs a warning because other ranks of its replica have not left. Allows for long
#: steps.
_LEAVING_WARNING_S: Final = 20.0


class Readiness(NamedTuple):
    """Reports one rank's state before it applies a mean, or the joint state of its replica's ranks.

    Attributes:
        nonfinite: Description of a part of the weights or of the optimizer that is not finite; "" if all is finite.
        norm: L2 norm of the mean difference, or None if it is unknown.
        norms: L2 norms of the donors' contributions. Empty without a mean.
        has_cosine: Whether ``norms`` belong to the contributions that were sent, so that the cosine is known.
        checksum: Checksum of the weights, which must be equal on all ranks of the replica. None if it is not compared.
        admits: Whether this rank leads the policy, and can admit a restarted replica.
    """

    has_mean: bool
    nonfinite: str
    norm: float | None = None
    norms: tuple[float, ...] = ()
    has_cosine: bool = False
    checksum: int | None = None
    admits: bool = False


class ReplicaGroup:
    """Synchronises this rank with the other ranks of its replica.

    :meth:`agree`, :meth:`smallest`, :meth:`gathered` and :meth:`mean` raise ClosedError if one of these ranks has left.

    Attributes:
        group: Group of the replica's ranks, in the order of their indices. :meth:`free` frees it.
    """

    def __init__(self, world: World, group: Group) -> None:
        self.world = world
        self.group = group
        self._may_be_unequal = False  # whether a step was interrupted, so that the ranks' weights may differ

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the replica."""
        return self.group.ranks

    async def check_sharding(self, mesh_ranks: tuple[int, ...], all_ranks: Sequence[int]) -> None:
        """Raise ValueError if parameters are not sharded over exactly the replica's ranks, in ascending order.

        Args:
            mesh_ranks: Ranks over which this rank's parameters are sharded.
            all_ranks: Ranks of all replicas.
        """
        if list(all_ranks) != sorted(all_ranks):
            validation.refuse("group", list(all_ranks), "ranks in ascending order if replicas are sharded")
        ranks = self.ranks

        def compare(meshes: list[tuple[int, ...]]) -> None:
            for rank, mesh in zip(ranks, meshes, strict=True):
                if mesh and (mesh != meshes[0] or len(mesh) != len(ranks)):
                    raise ValueError(
                        f"the parameters of rank {rank} must be sharded over the {len(ranks)} ranks of its replica, "
                        f"{list(ranks)}, got the ranks {list(mesh)}"
                    )

        await reduce_and_broadcast(lambda: mesh_ranks, compare, group=self.group, world=self.world)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Mark the replica as inconsistent if the ``with`` body, a step, is interrupted.

        The ranks' weights may then differ, so no further step is allowed.

        Raises:
            ClosedError: An earlier step was interrupted.
        """
        if self._may_be_unequal:
            raise ClosedError(
                "an earlier step was cancelled or failed, so the weights of this replica's ranks may be inconsistent; "
                "leave the policy and load a checkpoint"
            )
        self._may_be_unequal = True
        yield
        self._may_be_unequal = False

    async def agree(self, own: Readiness) -> Readiness:
        """Exchange reports within the replica, and return the joint report.

        In the joint report, ``has_mean`` is true if all ranks have the mean, ``nonfinite`` is the first reported
        description, and ``norm`` is the norm of all parts together.

        Raises:
            ValueError: The ranks have different weights.
        """
        return Readiness(*await self._combined(lambda: tuple(own), self._joint))

    async def smallest(self, own: int) -> int:
        """Return the smallest of the numbers that the replica's ranks pass."""
        (found,) = await self._combined(lambda: (own,), lambda rows: (min(each for (each,) in rows),))
        return int(found)

    async def gathered(self, own: Any) -> tuple[Any, ...]:
        """Return the values that the replica's ranks pass: trees of tuples, lists, strings and numbers."""
        return await self._combined(lambda: (own,), lambda rows: tuple(each for (each,) in rows))

    async def mean(self, fn: Callable[[], float]) -> float:
        """Call ``fn`` on all ranks of the replica at the same time, and return the mean of their results.

        Raises:
            RemoteError: ``fn`` has raised on another rank.
        """
        (found,) = await self._combined(lambda: (fn(),), lambda rows: (mean_of([each for (each,) in rows]),))
        return float(found)

    async def leave(self, step_count: int) -> None:
        """Wait until all ranks of the replica leave, and log a warning if this takes long.

        If a rank has ended its training loop early, the other ranks are waiting in DDP's all-reduce and cannot be
        notified. Do not wait if a step of this rank was interrupted.

        Args:
            step_count: Number of steps that this rank has taken.
        """
        world = self.world
        if self._may_be_unequal:
            return  # if a lost rank has interrupted the step, this rank may still end with its replica
        world.services.shared(ReplicaMates).ranks = frozenset()

        def warn() -> None:
            logger.warning(
                "rank %d has left its policy after %d steps, and waits for %s of its replica; if they wait for its "
                "gradients, in DDP for example, they wait forever: all ranks of a replica must make the same number of "
                "steps",
                world.rank,
                step_count,
                ranks_in_words([rank for rank in self.ranks if rank != world.rank]),
            )

        timer = asyncio.get_running_loop().call_later(_LEAVING_WARNING_S, warn)
        try:
            await self._combined(tuple, self._joint)
        except AsyncdistError:  # another rank is lost, or has left with an error that it reports
            return
        finally:
            timer.cancel()

    async def free(self) -> None:
        """Free the group of the replica's ranks."""
        await free_all([self.group])

    async def _combined(
        self, report: Callable[[], tuple[Any, ...]], combine: Callable[[list[tuple[Any, ...]]], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        def decide(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
            left = [rank for rank, each in zip(self.group.ranks, rows, strict=True) if not each]
            if not left:
                return combine(rows)
            if len(left) < len(rows):
                raise ClosedError(
                    f"all ranks of a replica must make the same number of steps, but {ranks_in_words(left)} of the "
                    f"replica {list(self.group.ranks)} left the policy while another rank of it waits for an average"
                )
            return ()

        return await reduce_and_broadcast(report, decide, group=self.group, world=self.world)

    def _joint(self, rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        return _joint([Readiness(*each) for each in rows], self.group.ranks)


def _joint(each: Sequence[Readiness], ranks: Sequence[int]) -> tuple[Any, ...]:
    """Combine the reports of all ranks of a replica, and raise ValueError if their weights differ."""
    first_with = {own.checksum: rank for rank, own in zip(ranks, each, strict=True) if own.checksum is not None}
    if len(first_with) > 1:
        raise ValueError(
            "the ranks of a replica must have equal weights before an average, but the weights of "
            f"{ranks_in_words(sorted(first_with.values()))} differ. Wrap the model in DistributedDataParallel(model, "
            f"process_group=asyncdist.integrations.pytorch.new_replica_group({len(ranks)})) and train the wrapped "
            "model, or pass replica_size=1"
        )
    norms = [own.norm for own in each if own.norm is not None]
    nonfinite = next(filter(None, (own.nonfinite for own in each)), "")
    whole = math.hypot(*norms) if norms else None
    of_donors = tuple(math.hypot(*parts) for parts in zip(*(own.norms for own in each), strict=False))
    has_mean, has_cosine = all(own.has_mean for own in each), any(own.has_cosine for own in each)
    return has_mean, nonfinite, whole, of_donors, has_cosine, None, any(own.admits for own in each)


async def new_replica(
    world: World,
    start: Start[Any] | None,
    replicas: Replicas,
    flat: FlatState,
    timeout_s: float,
    *,
    is_sharded: bool = False,
) -> ReplicaGroup:
    """Create the group of this rank's replica. Collective among its ranks.

    Args:
        start: Start of the policy, as part of which the group is created. None if the replica was restarted.
        flat: State of this rank's model, or of its shards.
        is_sharded: Whether each rank has a part of the model, even if ``flat`` does not know of other ranks.
    """
    replica_ranks, groups = replicas.replica_ranks(world.rank), world.peers.groups
    if start is None:
        group = await groups.replica_group(replica_ranks, timeout_s, subject="restarted replica")
    else:
        group = await groups.new_group(replica_ranks, timeout_s, part_of=start)
    replica = ReplicaGroup(world, group)
    try:
        if is_sharded or flat.mesh_ranks:
            await replica.check_sharding(flat.mesh_ranks, replicas.ranks)
    except BaseException:
        await replica.free()
        raise
    return replica


async def joined_replica(
    world: World,
    start: Start[Any],
    replicas: Replicas,
    flat: FlatState,
    first_weights: Mapping[str, str],
    timeout_s: float,
) -> ReplicaGroup:
    """Create the group of this rank's replica, and compare its model with the other replicas' models.

    Args:
        first_weights: Values that must be equal on all ranks with the same part of the model.
    """
    replica = await new_replica(world, start, replicas, flat, timeout_s)
    try:
        values = {**first_weights, "model": flat.fingerprint.digest[:16]}
        if flat.trained_only:
            values[LEFT_OUT] = flat.left_out_digest()[:16]
        await _agree_among_counterparts(world, replicas.counterparts(world.rank), values, flat.fingerprint, timeout_s)
    except BaseException:
        await replica.free()
        raise
    world.services.shared(ReplicaMates).ranks = frozenset(replica.ranks) - {world.rank}
    return replica


async def _agree_among_counterparts(
    world: World, counterparts: Sequence[int], values: Mapping[str, str], mine: Fingerprint, timeout_s: float
) -> None:
    """Compare values that must be equal on the ranks with the same part of the model.

    Args:
        mine: Layout of this rank's model, to describe a difference.

    Raises:
        DisagreementError: The values differ. The error names the first difference.
    """

    async def compare(start: Start[None]) -> None:
        try:
            await start.agree(dict(values), timeout_s=timeout_s)
        except DisagreementError as error:
            left_s = start.left_s(timeout_s)
            raise await explained(error, world, counterparts, mine, start, left_s) from None

    async def forget(_: None) -> None:
        return

    if len(counterparts) > 1:
        subject = "the parts of a model that is exchanged"
        await start_together(world.services, world.agreements, counterparts, subject, compare, forget, name=subject)
