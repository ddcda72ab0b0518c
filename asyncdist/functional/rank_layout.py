"""Gives ranks their roles: agent groups that train, buffers that serve them, a coordinator that does neither.

:class:`RankLayout` is the plan: pure, checked, printable, made by arithmetic, by host, or by hand.
:func:`initialize_distributed_compute` turns it into groups on the current world, as a :class:`DistributedContext`.

Invariants of a layout: every rank has one role; agent groups are of one size and never empty; where there are buffers
each serves at least one training rank, and every training rank has exactly one.
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
from asyncdist.functional.main_process import compute_and_broadcast, gather_from_all_ranks
from asyncdist.runtime.world import World, current_world
from asyncdist.wording import ranks_in_words

Placement: TypeAlias = Literal["arithmetic", "host"]
_TIMEOUT_S: Final = 60.0
_SUBJECT: Final = "distributed compute"
_WORDS_LENGTH_MAX: Final = 2000


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Plans which rank has which role.

    Attributes:
        world_size: number of ranks.
        agent_groups: the training ranks of each agent group, of one size, contiguous or not. Lists are allowed.
        clients: for each buffer rank the training ranks that it serves; empty without buffers.
        coordinator: a rank that neither trains nor buffers, or None.

    Raises:
        TypeError: a field is no list or dict.
        ValueError: the roles do not fit together; the ranks or numbers concerned are named, and what is allowed.
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
            validation.refuse("clients", self.clients, "a dict, from buffer rank to training ranks", TypeError)
        clients = {buffer: _tuple(f"clients[{buffer!r}]", ranks, "ranks") for buffer, ranks in self.clients.items()}
        object.__setattr__(self, "clients", clients)
        if not self.agent_groups:
            raise ValueError("agent_groups is empty; allowed: one group of training ranks or more")
        for index, group in enumerate(self.agent_groups):
            if not group:
                raise ValueError(f"agent group {index} is empty; allowed: one rank or more in each")
        sizes = [len(group) for group in self.agent_groups]
        if len(set(sizes)) > 1:
            raise ValueError(f"agent groups have {sizes} ranks; allowed: as many in each")
        self._check_roles()
        self._check_clients()

    def _check_roles(self) -> None:
        coordinators = () if self.coordinator is None else (self.coordinator,)
        named = [*self.training_ranks, *self.clients, *coordinators]
        for rank in named:
            if type(rank) is not int or not 0 <= rank < self.world_size:
                raise ValueError(f"rank {rank!r} does not exist; allowed: 0 to {self.world_size - 1}")
        counts = Counter(named)
        twice = sorted(rank for rank, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"{ranks_in_words(twice)} would have several roles; allowed: one role for each rank")
        idle = [rank for rank in range(self.world_size) if rank not in counts]
        if idle:
            raise ValueError(f"{ranks_in_words(idle)} would have no role; allowed: one role for each rank")

    def _check_clients(self) -> None:
        training = set(self.training_ranks)
        if len(self.clients) > len(training):
            raise ValueError(
                f"{len(self.clients)} buffers for {len(training)} training ranks; allowed: at most one for each"
            )
        for buffer, ranks in self.clients.items():
            if not ranks:
                raise ValueError(f"buffer rank {buffer} has no clients; allowed: one training rank or more")
            strangers = [rank for rank in ranks if rank not in training]
            if strangers:
                served = ranks_in_words(strangers)
                raise ValueError(f"buffer rank {buffer} serves {served}; allowed: training ranks only")
        counts = Counter(rank for ranks in self.clients.values() for rank in ranks)
        wrong = [rank for rank in sorted(training) if self.clients and counts[rank] != 1]
        if wrong:
            raise ValueError(f"{ranks_in_words(wrong)} would have {counts[wrong[0]]} buffers; allowed: one for each")

    @classmethod
    def arithmetic(
        cls, world_size: int, num_remote_buffers: int = 0, num_agent_groups: int = 1, *, coordinator: int | None = None
    ) -> RankLayout:
        """Make training ranks first, in contiguous groups, then the buffers, which take the training ranks in turn.

        A reserved coordinator is left out, and the others are numbered without it.

        Raises:
            ValueError: the numbers do not fit; they are named, and what is allowed.
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
        """Keep agent groups, and buffers with their clients, on one host wherever that is possible.

        Buffers go to the hosts one after the other to the one with most training ranks for each buffer, which gives its
        last rank. Each host is then filled with whole agent groups; what is left over on the hosts makes up the rest.
        A training rank has a buffer on its own host if there is any, and else the one with the fewest clients.

        Args:
            hosts: of each rank, the name of its host.
            num_remote_buffers: how many ranks are buffers.
            num_agent_groups: how many groups the training ranks make.
            coordinator: a rank that has neither role.

        Raises:
            ValueError: the numbers do not fit; they are named, and what is allowed.
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
        """Return all training ranks, in ascending order."""
        return tuple(sorted(rank for group in self.agent_groups for rank in group))

    @property
    def buffer_ranks(self) -> tuple[int, ...]:
        """Return all buffer ranks, in ascending order."""
        return tuple(sorted(self.clients))

    @property
    def agent_group_size(self) -> int:
        """Return the number of ranks in each agent group."""
        return len(self.agent_groups[0])

    def agent_group_of(self, rank: int) -> int | None:
        """Return the index of a rank's agent group; None where the rank does not train."""
        return next((index for index, group in enumerate(self.agent_groups) if rank in group), None)

    def buffer_of(self, rank: int) -> int | None:
        """Return the buffer that serves this training rank, or None."""
        return next((buffer for buffer, ranks in self.clients.items() if rank in ranks), None)

    def __str__(self) -> str:
        lines = [f"{self.world_size} ranks: {len(self.training_ranks)} train, {len(self.clients)} buffer"]
        lines += [f"agent group {index}: {ranks_in_words(group)}" for index, group in enumerate(self.agent_groups)]
        lines += [f"buffer rank {rank}: serves {ranks_in_words(self.clients[rank])}" for rank in self.buffer_ranks]
        if self.coordinator is not None:
            lines.append(f"coordinator: rank {self.coordinator}")
        return "\n".join(lines)


class DistributedContext:
    """Holds the roles of a world's ranks, as groups, seen from one rank.

    A group that includes this rank can be used for any collective, on any transport, and its ``communicator`` is the
    backend's own where there is one. Any other group tells its ``ranks``, and refuses to be used.

    Attributes:
        layout: the plan.
        my_rank: this rank.
        world_size: number of ranks.
        num_training_ranks: how many of them train.
        agent_group_size: training ranks in each agent group.
        agent_group_id: the index of this rank's agent group; None where it does not train.
        assigned_buffer: the rank that buffers for this training rank, or None.
        assigned_training_ranks: the training ranks that this buffer serves; None on other ranks.
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
        """Return all agent groups, in order."""
        return [self._group(ranks) for ranks in self.layout.agent_groups]

    @property
    def train_global_group(self) -> Group:
        """Return the group of all training ranks."""
        return self._group(self.layout.training_ranks)

    @property
    def buffer_group(self) -> Group | None:
        """Return the group of all buffer ranks; None without buffers."""
        return self._group(self.layout.buffer_ranks) if self.layout.clients else None

    @property
    def agent_group(self) -> Group | None:
        """Return this rank's own agent group; None where it does not train."""
        return None if self.agent_group_id is None else self.agent_groups[self.agent_group_id]

    @property
    def dc_mpi4py(self) -> DistributedContext | None:
        """Return this context where it runs on MPI, None elsewhere: for ported code, which has another one there."""
        return self if self._world.transport_name == "mpi" else None

    def is_buffer_rank(self) -> bool:
        """Return whether this rank buffers."""
        return self.my_rank in self.layout.clients

    def is_training_rank(self) -> bool:
        """Return whether this rank trains."""
        return self.agent_group_id is not None

    def is_coordinator_rank(self) -> bool:
        """Return whether this rank is the reserved coordinator."""
        return self.my_rank == self.layout.coordinator

    async def cleanup(self) -> None:
        """Free the groups, as :meth:`asyncdist.Group.free` does, without waiting for other ranks.

        From then on this rank is outside of all of them. A second call does nothing.
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
    """Give every rank of the world its role, and make the groups. Collective over all ranks.

    Args:
        num_remote_buffers: how many ranks are buffers; at most one for each training rank.
        num_agent_groups: how many groups the training ranks make; it divides their number.
        coordinator: a rank that is to have neither role, for ``protocols.coordinate`` say.
        placement: ``"arithmetic"``: see :meth:`RankLayout.arithmetic`; ``"host"``: :meth:`RankLayout.by_host`.
        hostname: the host of this rank, for ``"host"``; ``world.hostname`` by default.
        layout: your own plan, in place of all these.
        dist_backend: for ported calls; None, or the transport of the world (``world.transport_name``, or gloo), which
            is chosen where the world is started.
        world: the current one by default.

    Raises:
        ValueError, TypeError: the numbers, the layout or ``dist_backend`` do not fit this world; says why, and what is
            allowed. A RemoteError on the other ranks.
        DisagreementError: the ranks ask for different roles; the first difference is named.
        StartTimeoutError: some ranks did not come in time.
    """
    world = world or current_world()
    world.check()
    everybody = world.group.ranks
    with world.agreements.objecting(everybody, _SUBJECT):
        if placement not in ("arithmetic", "host"):
            validation.refuse("placement", placement, "'arithmetic', 'host'")
        _check_dist_backend(world, dist_backend)
        if layout is None:
            _check_counts(world.size, num_remote_buffers, num_agent_groups, coordinator)
        else:
            _check_layout(world, layout)
    options = {"buffers, groups, coordinator": f"{num_remote_buffers}, {num_agent_groups}, {coordinator}"}
    options |= {"placement": placement, "layout": "none" if layout is None else _in_words(layout)}

    async def make(start: Start[DistributedContext]) -> DistributedContext:
        await start.agree(options, timeout_s=_TIMEOUT_S)
        plan = layout
        if plan is None and placement == "host":
            hosts = await _all_hosts(world, world.hostname if hostname is None else hostname)
            plan = RankLayout.by_host(hosts, num_remote_buffers, num_agent_groups, coordinator=coordinator)
        elif plan is None:
            plan = RankLayout.arithmetic(world.size, num_remote_buffers, num_agent_groups, coordinator=coordinator)
        lists = sorted({plan.training_ranks, plan.buffer_ranks, *plan.agent_groups})
        own = [ranks for ranks in lists if world.rank in ranks]
        groups = await world.peers.groups.new_groups(own, start.left_s(_TIMEOUT_S), part_of=start)
        return DistributedContext(world, plan, dict(zip(own, groups, strict=True)))

    # The names of the hosts go through the group of the world: a caller that went on before would call something else
    # there in between.
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


#: The names that code for mpi4py uses: here one class and one function serve every transport.
DistributedContextmpi4py = DistributedContext
initialize_distributed_compute_mpi4py = initialize_distributed_compute


def _check_layout(world: World, layout: object) -> None:
    if not isinstance(layout, RankLayout):
        validation.refuse("layout", layout, "a RankLayout, or None", TypeError)
    if layout.world_size != world.size:
        raise ValueError(f"the layout is for {layout.world_size} ranks; allowed: {world.size}, the world's size")


def _check_dist_backend(world: World, dist_backend: str | None) -> None:
    carriers = (world.transport_name, "gloo") if world.transport_name == "torch" else (world.transport_name,)
    if dist_backend is None or dist_backend in carriers:
        return
    raise ValueError(
        f"dist_backend is {dist_backend!r}, and this world runs on {' over '.join(carriers)}; allowed: None, "
        f"{', '.join(map(repr, carriers))}. It is chosen where the world is started: run(main, transport=...), "
        "mpirun, torchrun"
    )


async def _all_hosts(world: World, hostname: str) -> list[str]:
    hosts = await gather_from_all_ranks(lambda: hostname, world=world)
    return await compute_and_broadcast(lambda: hosts or [], world=world)


def _in_words(layout: RankLayout) -> str:
    """Describe a layout in one line for a message, which has a limit: a digest stands for thousands of ranks."""
    text = str(layout).replace("\n", "; ")
    if len(text) <= _WORDS_LENGTH_MAX:
        return text
    return f"{text[:_WORDS_LENGTH_MAX]}... ({hashlib.sha256(text.encode()).hexdigest()})"


def _check_counts(world_size: int, buffer_count: int, group_count: int, coordinator: int | None) -> int:
    """Return the number of training ranks. Raises ValueError for numbers that do not fit."""
    validation.count("world_size", world_size)
    validation.count("num_remote_buffers", buffer_count, least=0)
    validation.count("num_agent_groups", group_count)
    if coordinator is not None and (type(coordinator) is not int or not 0 <= coordinator < world_size):
        validation.refuse("coordinator", coordinator, f"None, or a rank from 0 to {world_size - 1}")
    rank_count = world_size if coordinator is None else world_size - 1
    training_count = rank_count - buffer_count
    besides = "" if coordinator is None else " beside the coordinator"
    if training_count < 1 or buffer_count > training_count:
        raise ValueError(
            f"num_remote_buffers is {buffer_count} with {rank_count} ranks{besides}; allowed: 0 to {rank_count // 2}, "
            "one training rank or more for each buffer, and one at least"
            if rank_count
            else f"the coordinator would be the only one of {world_size} ranks; allowed: one training rank or more"
        )
    if training_count % group_count:
        divisors = [number for number in range(1, training_count + 1) if training_count % number == 0]
        raise ValueError(
            f"num_agent_groups is {group_count} with {training_count} training ranks; "
            f"allowed: {', '.join(map(str, divisors))}"
        )
    return training_count


def _tuple(name: str, values: Any, of: str) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        validation.refuse(name, values, f"a list of {of}", TypeError)
    return tuple(values)


def _choose_buffers(training: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """Take the buffers out of the training ranks of their hosts."""
    buffers: dict[str, list[int]] = {host: [] for host in training}
    for _ in range(count):
        # Of equals the first host; a host that would be left without a client comes last.
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
        if not served:  # nobody else on its host, and all others are served at home
            busiest = max(clients, key=lambda other: len(clients[other]))
            clients[buffer].append(clients[busiest].pop())
    return {buffer: tuple(sorted(served)) for buffer, served in sorted(clients.items())}
