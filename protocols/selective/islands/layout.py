"""Divides ranks into islands of equal size (groups that average separately), and defines the options for islands.

The ranks are first grouped by host, so that each island spans few hosts and little of its traffic is between hosts. A
rank's island is computed from the rank's position, so no rank stores a list of all islands.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from asyncdist import StartTimeoutError, validation
from asyncdist.protocols.declared import Options, integer, one_of, option, or_none

#: How to choose the island to which an island's best rank sends its weights.
MigrationRoute: TypeAlias = Literal["ring", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandOptions(Options):
    """Options that divide the ranks into islands: groups that average their weights separately.

    Raises:
        ValueError: An option is out of range, both ``islands`` and ``island_size`` are given, or a migration option is
            given without islands.
    """

    islands: int | None = option(
        "Number of islands, populations of equal size with separate coordinators, into which the ranks are divided.",
        or_none(integer(1, " or None")),
        default=None,
        group="islands",
    )
    island_size: int | None = option(
        "Number of ranks in each island, at least 2, instead of `islands`. A few dozen work best.",
        or_none(integer(2, " or None")),
        default=None,
        group="islands",
    )
    migrate_every: int | None = option(
        "Number of decisions after which an island's best rank becomes an additional donor (a migrant) in a round of "
        "another island; 10 by default.",
        or_none(integer(1, " or None")),
        default=None,
        group="islands",
    )
    migration: MigrationRoute | None = option(
        'Island that receives the migrant: the next island (`"ring"`, the default) or a random island (`"random"`).',
        or_none(one_of(MigrationRoute)),
        default=None,
        group="islands",
    )

    def __post_init__(self) -> None:
        """Check the options as far as possible without the number of ranks, and fill in the defaults."""
        Options.__post_init__(self)
        for name, default in (("migrate_every", 10), ("migration", "ring")):
            value = getattr(self, name)
            if value is not None and not self.are_on:
                validation.refuse(name, value, "None unless islands or island_size is set")
            object.__setattr__(self, name, default if value is None and self.are_on else value)
        if self.islands is not None and self.island_size is not None:
            raise ValueError(
                f"only one of islands and island_size may be set, got islands={self.islands} and "
                f"island_size={self.island_size}"
            )

    @property
    def are_on(self) -> bool:
        """True if the ranks are divided into islands."""
        return self.islands is not None or self.island_size is not None

    def check_combination(self, averaging_strategy: str, **ranks: object) -> None:
        """Raise ValueError if another option of the policy cannot be used with islands."""
        if not self.are_on:
            return
        for name, value in ranks.items():
            if value not in (None, (), []):
                validation.refuse(name, value, "None with islands (each island chooses its own coordinator)")
        if averaging_strategy == "reset_weights":
            validation.refuse(
                "averaging_strategy", averaging_strategy, "'mean', 'weighted_mean' or 'best_only' with islands"
            )

    @contextlib.contextmanager
    def hinting_at_islands(self) -> Iterator[None]:
        """Add a hint to a StartTimeoutError raised in the body: all ranks must have the same island option."""
        try:
            yield
        except StartTimeoutError as error:
            if not self.are_on:
                raise
            name, value = ("islands", self.islands) if self.island_size is None else ("island_size", self.island_size)
            hint = f"all ranks must have the same {name}, which is {value} on this rank"
            raise StartTimeoutError(f"{error.message}; {hint}", **error.facts) from None

    def agreed(self) -> dict[str, Any]:
        """Return the island options, which the members compare when the policy starts. Empty without islands."""
        return asdict(self) if self.are_on else {}

    def island_of(self, rank: int, population: Sequence[int], hosts: Sequence[int] | None = None) -> "Island | None":
        """Return the island of a rank, or None if there are no islands or the rank is alone.

        Args:
            population: Ranks of all islands, in their original order.
            hosts: Number that identifies the host of each rank of the world, or None if unknown.

        Raises:
            ValueError: The ranks cannot be divided as the options require. The error lists the allowed numbers or sizes
                of islands.
        """
        count = len(population)
        if not self.are_on or count < 2:
            return None
        sizes = [size for size in range(2, count + 1) if count % size == 0]
        size = self.island_size if self.islands is None else count // self.islands
        if size not in sizes or (self.islands is not None and size * self.islands != count):
            is_count = self.islands is not None
            allowed = [count // size for size in reversed(sizes)] if is_count else sizes
            validation.refuse(
                "islands" if is_count else "island_size",
                self.islands if is_count else self.island_size,
                f"{validation.one_of(allowed)} to divide {count} ranks into equal islands of 2 or more ranks",
            )
        grouped = by_host(population, hosts)
        return Island(grouped.index(rank) // size, size, grouped)


def by_host(population: Sequence[int], hosts: Sequence[int] | None) -> Sequence[int]:
    """Return the ranks grouped by host. Hosts, and the ranks of each host, remain in their original order.

    Args:
        hosts: Number that identifies the host of each rank of the world. None if all ranks are on one host or the hosts
            are unknown.

    Returns:
        The grouped ranks, or ``population`` itself (a `range` for a whole world) if its ranks are already grouped.
    """
    if hosts is None:
        return population
    firsts: dict[int, int] = {}
    for place, rank in enumerate(population):
        firsts.setdefault(hosts[rank], place)
    found = sorted(population, key=lambda rank: firsts[hosts[rank]])
    return population if found == list(population) else tuple(found)


@dataclass(frozen=True, slots=True)
class Island:
    """A group of ranks with a separate policy, and its position among the other islands.

    Attributes:
        population: Ranks of all islands, ordered by island. For the whole world, a `range` to save memory.
    """

    index: int
    size: int
    population: Sequence[int]

    def index_of(self, rank: int) -> int:
        """Return the number of the island that contains ``rank``."""
        return self.population.index(rank) // self.size

    @property
    def count(self) -> int:
        """Number of islands."""
        return len(self.population) // self.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of this island."""
        return self.ranks_of(self.index)

    def ranks_of(self, index: int) -> tuple[int, ...]:
        """Return the ranks of island number ``index``."""
        return tuple(self.population[index * self.size : (index + 1) * self.size])

    def is_in_other_island(self, rank: int) -> bool:
        """Return whether ``rank`` is in another island."""
        return rank in self.population and rank not in self.ranks
