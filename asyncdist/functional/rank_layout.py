"""Assigns roles to ranks: agent groups that train, replay buffers, and a coordinator that does neither.

A :class:`RankLayout` is computed from numbers or host names, or written by the user.
:func:`initialize_distributed_compute` makes its groups in the current world, as a :class:`DistributedContext`.

In a layout, every rank has one role, and all agent groups have the same size, at least 1. If there are buffers, each
serves at least one training rank, and every training rank has exactly one buffer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from asyncdist import validation
from asyncdist.collectives.agreed_start import Start, start_together
from asyncdist.collectives.groups import Group, free_all
from asyncdist.functional.main_process import reduce_and_broadcast
from asyncdist.runtime.world import World, world_to_await
from asyncdist.wording import ranks_in_words

Placement: TypeAlias = Literal["arithmetic", "host"]
_TIMEOUT_S: Final = 60.0
_SUBJECT: Final = "distributed compute"
_WORDS_LENGTH_MAX: Final = 2000


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Assigns a role to each rank.

    Attributes:
        agent_groups: Training ranks of each agent group, as tuples or lists. Groups have equal sizes and need not be
            contiguous.
        clients: Training ranks that each buffer rank serves, by buffer rank. Empty without buffers.
        coordinator: Rank that neither trains nor serves a buffer, or None.

    Raises:
        TypeError: A field is not a list or dict.
        ValueError: The roles are inconsistent.
    """

    world_size: int
    agent_groups: tuple[tuple[int, ...], ...]
    clients: Mapping[int, tuple[int, ...]]
    coordinator: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_size", validation.count("world_size", self.world_size))
        groups = _tuple("agent_groups", self.agent_groups, "groups of ranks")
        groups = tuple(_tuple(f"agent_groups[{index}]", group, "ranks") for index, group in enumerate(groups))
        object.__setattr__(self, "agent_groups", groups)
        if not isinstance(self.clients, Mapping):
            validation.refuse("clients", self.clients, "a dict that maps buffer ranks to training ranks", TypeError)
        clients = {buffer: _tuple(f"clients[{buffer!r}]", ranks, "ranks") for buffer, ranks in self.clients.items()}
        object.__setattr__(self, "clients", clients)
        if not self.agent_groups:
            raise ValueError("agent_groups must have at least one group of training ranks, got no group")
        for index, group in enumerate(self.agent_groups):
            if not group:
                raise ValueError(f"agent group {index} must have at least one rank, got no rank")
        sizes = [len(group) for group in self.agent_groups]
        if len(set(sizes)) > 1:
            raise ValueError(f"agent groups must have equal sizes, got {sizes}")
        self._check_roles()
        self._check_clients()

    def _check_roles(self) -> None:
        coordinators = () if self.coordinator is None else (self.coordinator,)
        named = [*self.training_ranks, *self.clients, *coordinators]
        for rank in named:
            if type(rank) is not int or not 0 <= rank < self.world_size:
                raise ValueError(f"each rank of the layout must be from 0 to {self.world_size - 1}, got {rank!r}")
        counts = Counter(named)
        twice = sorted(rank for rank, count in counts.items() if count > 1)
        idle = [rank for rank in range(self.world_size) if rank not in counts]
        for ranks, count_in_words in ((twice, "several"), (idle, "none")):
            if ranks:
                words = f"but {ranks_in_words(ranks)} would have {count_in_words}"
                raise ValueError(f"each rank must have exactly one role, {words}")

    def _check_clients(self) -> None:
        training = set(self.training_ranks)
        if len(self.clients) > len(training):
            raise ValueError(
                f"the layout must have at most one buffer for each of its {len(training)} training ranks, got "
                f"{len(self.clients)}"
            )
        for buffer, ranks in self.clients.items():
            if not ranks:
                raise ValueError(
                    f"buffer rank {buffer} must have at least one training rank as a client, got no client"
                )
            strangers = [rank for rank in ranks if rank not in training]
            if strangers:
                served = ranks_in_words(strangers)
                raise ValueError(f"the clients of buffer rank {buffer} must be training ranks, got {served}")
        counts = Counter(rank for ranks in self.clients.values() for rank in ranks)
        wrong = [rank for rank in sorted(training) if self.clients and counts[rank] != 1]
        if wrong:
            raise ValueError(
                f"each training rank must have exactly one buffer, but {ranks_in_words(wrong)} would have "
                f"{counts[wrong[0]]}"
            )

    @classmethod
    def arithmetic(
        cls, world_size: int, num_remote_buffers: int = 0, num_agent_groups: int = 1, *, coordinator: int | None = None
    ) -> RankLayout:
        """Assign training ranks first, in contiguous groups, then buffer ranks, which serve the training ranks in turn.

        The coordinator is skipped in the numbering. ValueError is raised if the numbers are inconsistent.
        """
        training_count = _check_counts(world_size, num_remote_buffers, num_agent_groups, coordinator)
        ranks = [rank for rank in range(world_size) if rank != coordinator]
        training, buffers = ranks[:training_count], ranks[training_count:]
        size = training_count // num_agent_groups
        return cls(
            world_size,
            tuple(tuple(training[first : first + size]) for first in range(0, training_count, size)),
            {buffer: tuple(training[index :: len(buffers)]) for index, buffer in enumerate(buffers)},
            coordinator,
        )

    @classmethod
    def by_host(
        cls,
        hosts: Sequence[str],
        num_remote_buffers: int = 0,
        num_agent_groups: int = 1,
        *,
        coordinator: int | None = None,
    ) -> RankLayout:
        """Place each agent group, and each buffer with its clients, on one host if possible.

        Each buffer in turn is placed on the last rank of the host with the most training ranks per buffer. Each host is
        then filled with whole agent groups, and the remaining ranks form the other groups. A training rank uses a
        buffer on its own host if there is one, otherwise the buffer with the fewest clients.

        Args:
            hosts: Host name of each rank.
            coordinator: Rank that neither trains nor serves a buffer, or None.

        Raises:
            ValueError: The numbers are inconsistent.
        """
        training_count = _check_counts(len(hosts), num_remote_buffers, num_agent_groups, coordinator)
        training: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            if rank != coordinator:
                training.setdefault(host, []).append(rank)
        buffers = _choose_buffers(training, num_remote_buffers)
        groups = _fill_hosts(list(training.values()), training_count // num_agent_groups)
        return cls(len(hosts), groups, _assign(training, buffers), coordinator)

    @property
    def training_ranks(self) -> tuple[int, ...]:
        """All training ranks, in ascending order."""
        return tuple(sorted(rank for group in self.agent_groups for rank in group))

    @property
    def buffer_ranks(self) -> tuple[int, ...]:
        """All buffer ranks, in ascending order."""
        return tuple(sorted(self.clients))

    @property
    def agent_group_size(self) -> int:
        """Number of ranks in each agent group."""
        return len(self.agent_groups[0])

    def agent_group_of(self, rank: int) -> int | None:
        """Return the index of a rank's agent group, or None if the rank does not train."""
        return next((index for index, group in enumerate(self.agent_groups) if rank in group), None)

    def buffer_of(self, rank: int) -> int | None:
        """Return the buffer rank that serves a training rank, or None."""
        return next((buffer for buffer, ranks in self.clients.items() if rank in ranks), None)

    def __str__(self) -> str:
        lines = [f"{self.world_size} ranks: {len(self.training_ranks)} train, {len(self.clients)} buffer"]
        lines += [f"agent group {index}: {ranks_in_words(group)}" for index, group in enumerate(self.agent_groups)]
        lines += [f"buffer rank {rank}: serves {ranks_in_words(self.clients[rank])}" for rank in self.buffer_ranks]
        if self.coordinator is not None:
            lines.append(f"coordinator: rank {self.coordinator}")
        return "\n".join(lines)


class BufferRanks:
    """Records the ranks that serve replay buffers in this world, so that no buffer rank waits for them as clients."""

    def __init__(self, _: object) -> None:
        self.ranks: frozenset[int] = frozenset()


class DistributedContext:
    """The roles and groups of a world's ranks, as seen by one rank.

    A group that includes this rank supports every collective on every transport. Its ``communicator`` is the backend's
    native communicator, or None. Other groups only have the attribute ``ranks``.

    Attributes:
        agent_group_id: Index of this rank's agent group, or None if it does not train.
        assigned_buffer: Buffer rank that serves this training rank, or None.
        assigned_training_ranks: Training ranks that this buffer rank serves, or None on other ranks.
    """

    def __init__(self, world: World, layout: RankLayout, groups: Mapping[tuple[int, ...], Group]) -> None:
        self.layout = layout
        self.my_rank = rank = world.rank
        self.world_size = world.size
        self.num_training_ranks = len(layout.training_ranks)
        self.agent_group_size = layout.agent_group_size
        self.agent_group_id = layout.agent_group_of(rank)
        self.assigned_buffer = layout.buffer_of(rank)
        self.assigned_training_ranks = list(layout.clients[rank]) if rank in layout.clients else None
        self._world = world
        self._groups = dict(groups)

    @property
    def agent_groups(self) -> list[Group]:
        """All agent groups, in index order."""
        return [self._group(ranks) for ranks in self.layout.agent_groups]

    @property
    def train_global_group(self) -> Group:
        """Group of all training ranks."""
        return self._group(self.layout.training_ranks)

    @property
    def buffer_group(self) -> Group | None:
        """Group of all buffer ranks, or None if there are no buffers."""
        return self._group(self.layout.buffer_ranks) if self.layout.clients else None

    @property
    def agent_group(self) -> Group | None:
        """This rank's agent group, or None if the rank does not train."""
        return None if self.agent_group_id is None else self.agent_groups[self.agent_group_id]

    @property
    def dc_mpi4py(self) -> DistributedContext | None:
        """This context on MPI, or None on other transports, as code ported from torchgfn expects."""
        return self if self._world.transport_name == "mpi" else None

    def is_buffer_rank(self) -> bool:
        """Return whether this rank has a replay buffer."""
        return self.my_rank in self.layout.clients

    def is_training_rank(self) -> bool:
        """Return whether this rank trains."""
        return self.agent_group_id is not None

    def is_coordinator_rank(self) -> bool:
        """Return whether this rank is the coordinator, which neither trains nor serves a buffer."""
        return self.my_rank == self.layout.coordinator

    async def cleanup(self) -> None:
        """Free the groups without waiting for other ranks. Afterwards, this rank cannot use them.

        A second call does nothing.
        """
        groups, self._groups = self._groups, {}
        await free_all(groups[ranks] for ranks in sorted(groups))

    def _group(self, ranks: tuple[int, ...]) -> Group:
        return self._groups.get(ranks) or Group.seen_from_outside(ranks)

    def __repr__(self) -> str:
        if self.is_training_rank():
            role = f"trains in agent group {self.agent_group_id}"
        else:
            role = "is the coordinator" if self.is_coordinator_rank() else "buffers"
        return f"<DistributedContext rank {self.my_rank} of {self.world_size} {role}>"


async def initialize_distributed_compute(
    num_remote_buffers: int = 0,
    num_agent_groups: int = 1,
    *,
    coordinator: int | None = None,
    placement: Placement = "arithmetic",
    hostname: str | None = None,
    layout: RankLayout | None = None,
    dist_backend: str | None = None,
    world: World | None = None,
) -> DistributedContext:
    """Assign a role to every rank of the world, and make the groups. All ranks must call this function.

    Args:
        num_remote_buffers: Number of buffer ranks, at most one per training rank.
        num_agent_groups: Number of agent groups, which must divide the number of training ranks.
        coordinator: Rank that neither trains nor serves a buffer, for example for ``protocols.coordinate``.
        placement: ``"arithmetic"`` (:meth:`RankLayout.arithmetic`) or ``"host"`` (:meth:`RankLayout.by_host`).
        hostname: Host of this rank, for ``"host"``, by default ``world.hostname``.
        layout: Layout to use instead of the arguments above.
        dist_backend: None or the world's transport (``world.transport_name``, or gloo), as in torchgfn.
        world: World of the call, by default the current one.

    Raises:
        ValueError, TypeError: The numbers, the layout or ``dist_backend`` do not fit this world. The other ranks get
            RemoteError.
        DisagreementError: The ranks request different roles. The error names the first difference.
        StartTimeoutError: Some ranks did not join in time.
    """
    world = world_to_await(world)
    world.check()
    everybody = world.group.ranks
    with world.agreements.objecting(everybody, _SUBJECT):
        if placement not in ("arithmetic", "host"):
            validation.refuse("placement", placement, "one of 'arithmetic', 'host'")
        _check_dist_backend(world, dist_backend)
        if layout is None:
            _check_counts(world.size, num_remote_buffers, num_agent_groups, coordinator)
        else:
            _check_layout(world, layout)
    options = {"buffers, groups, coordinator": f"{num_remote_buffers}, {num_agent_groups}, {coordinator}"}
    options |= {"placement": placement, "layout": "none" if layout is None else _describe(layout)}

    async def make(start: Start[DistributedContext]) -> DistributedContext:
        await start.agree(options, timeout_s=_TIMEOUT_S)
        plan = layout
        if plan is None and placement == "host":
            own_host = world.hostname if hostname is None else hostname
            hosts = await reduce_and_broadcast(lambda: own_host, list, world=world)
            plan = RankLayout.by_host(hosts, num_remote_buffers, num_agent_groups, coordinator=coordinator)
        elif plan is None:
            plan = RankLayout.arithmetic(world.size, num_remote_buffers, num_agent_groups, coordinator=coordinator)
        world.services.shared(BufferRanks).ranks = frozenset(plan.buffer_ranks)
        lists = sorted({plan.training_ranks, plan.buffer_ranks, *plan.agent_groups})
        own = [ranks for ranks in lists if world.rank in ranks]
        groups = await world.peers.groups.new_groups(own, start.left_s(_TIMEOUT_S), part_of=start)
        return DistributedContext(world, plan, dict(zip(own, groups, strict=True)))

    # A cancelled caller must wait for an exchange of host names, because it uses the world's group.
    is_held = placement == "host" and layout is None
    return await start_together(
        world.services,
        world.agreements,
        everybody,
        _SUBJECT,
        make,
        DistributedContext.cleanup,
        name=_SUBJECT,
        is_held=is_held,
    )


#: Names used by code written for mpi4py. The class and the function support every transport.
DistributedContextmpi4py = DistributedContext
initialize_distributed_compute_mpi4py = initialize_distributed_compute


def _check_layout(world: World, layout: object) -> None:
    if not isinstance(layout, RankLayout):
        validation.refuse("layout", layout, "a RankLayout or None", TypeError)
    if layout.world_size != world.size:
        raise ValueError(f"the layout must be for {world.size} ranks, the world's size, got {layout.world_size}")


def _check_dist_backend(world: World, dist_backend: str | None) -> None:
    carriers = (world.transport_name, "gloo") if world.transport_name == "torch" else (world.transport_name,)
    if dist_backend is None or dist_backend in carriers:
        return
    raise ValueError(
        f"dist_backend must be {' or '.join(map(repr, carriers))} or None, because this world runs on "
        f"{' over '.join(carriers)}, got {dist_backend!r}. To change the transport, pass it to run(main, transport=...)"
    )


def _describe(layout: RankLayout) -> str:
    """Describe a layout in one line. A long description is cut off and followed by a digest."""
    text = str(layout).replace("\n", "; ")
    if any(sorted(group) != list(group) for group in layout.agent_groups):  # str() does not show the order
        text = f"{text}; agent groups in the order {list(map(list, layout.agent_groups))}"
    if len(text) <= _WORDS_LENGTH_MAX:
        return text
    return f"{text[:_WORDS_LENGTH_MAX]}... ({hashlib.sha256(text.encode()).hexdigest()})"


def _check_counts(world_size: int, buffer_count: int, group_count: int, coordinator: int | None) -> int:
    """Return the number of training ranks, or raise ValueError for inconsistent numbers."""
    validation.count("world_size", world_size)
    validation.count("num_remote_buffers", buffer_count, least=0)
    validation.count("num_agent_groups", group_count)
    if coordinator is not None and (type(coordinator) is not int or not 0 <= coordinator < world_size):
        validation.refuse("coordinator", coordinator, f"a rank from 0 to {world_size - 1} or None")
    rank_count = world_size if coordinator is None else world_size - 1
    training_count = rank_count - buffer_count
    besides = "" if coordinator is None else " besides the coordinator"
    if training_count < 1 or buffer_count > training_count:
        raise ValueError(
            f"num_remote_buffers must be from 0 to {rank_count // 2} with {rank_count} ranks{besides}, since each "
            f"buffer needs a training rank, got {buffer_count}"
            if rank_count
            else f"at least one training rank is needed, but the coordinator is the only one of {world_size} ranks"
        )
    if training_count % group_count:
        divisors = [number for number in range(1, training_count + 1) if training_count % number == 0]
        raise ValueError(
            f"num_agent_groups must be one of {', '.join(map(str, divisors))} with {training_count} training ranks, "
            f"got {group_count}"
        )
    return training_count


def _tuple(name: str, values: Any, of: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        validation.refuse(name, values, f"a list of {of}", TypeError)
    return tuple(values)


def _choose_buffers(training: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """Choose ``count`` buffer ranks, remove them from the training ranks of their hosts, and return them by host."""
    buffers: dict[str, list[int]] = {host: [] for host in training}
    for _ in range(count):
        # Among equal hosts, the first one is chosen. Hosts with a single training rank are chosen last.
        host = max(training, key=lambda name: (len(training[name]) > 1, len(training[name]) / (len(buffers[name]) + 1)))
        buffers[host].insert(0, training[host].pop())
    return buffers


def _fill_hosts(hosts: Sequence[Sequence[int]], size: int) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = []
    rest: list[int] = []
    for ranks in hosts:
        whole = len(ranks) // size * size
        groups += [tuple(ranks[first : first + size]) for first in range(0, whole, size)]
        rest += ranks[whole:]
    groups += [tuple(rest[first : first + size]) for first in range(0, len(rest), size)]
    return tuple(sorted(groups))


def _assign(training: Mapping[str, Sequence[int]], buffers: Mapping[str, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    clients: dict[int, list[int]] = {buffer: [] for ranks in buffers.values() for buffer in sorted(ranks)}
    if not clients:
        return {}
    strangers = []
    for host, ranks in training.items():
        local = buffers[host]
        for index, rank in enumerate(ranks):
            if local:
                clients[local[index % len(local)]].append(rank)
            else:
                strangers.append(rank)
    for rank in strangers:
        clients[min(clients, key=lambda buffer: len(clients[buffer]))].append(rank)
    for buffer, served in clients.items():
        if not served:  # this buffer has no training rank yet
            busiest = max(clients, key=lambda other: len(clients[other]))
            clients[buffer].append(clients[busiest].pop())
    return {buffer: tuple(sorted(served)) for buffer, served in sorted(clients.items())}
