"""Divides the ranks of a population into islands of equal size, by arithmetic: no rank holds a list of all islands.

Where the ranks of a host do not follow each other, they are put together before that, so that an island has ranks of as
few hosts as possible: what its members send each other seldom leaves one.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, TypeAlias

from asyncdist import StartTimeoutError, validation
from asyncdist.protocols.declared import Options, one_of, option, or_none, whole

#: How the island is chosen that an emigrant goes to.
MigrationRoute: TypeAlias = Literal["ring", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandOptions(Options):
    """Holds the options for islands.

    Raises:
        ValueError: An option is out of range, both numbers are given, or neither is and something is said of migration.
    """

    islands: int | None = option(
        "Divides the ranks, host by host, into this number of populations of equal size, with a coordinator each.",
        or_none(whole(1, ", or None")),
        default=None,
        group="islands",
    )
    island_size: int | None = option(
        "Instead of `islands`: the number of ranks in each population, at least 2; some dozens are best.",
        or_none(whole(2, ", or None")),
        default=None,
        group="islands",
    )
    migrate_every: int | None = option(
        "Decisions of an island from one migrant to the next: its best rank becomes one more donor of a round in "
        "another island. 10 by default, with islands.",
        or_none(whole(1)),
        default=None,
        group="islands",
    )
    migration: MigrationRoute | None = option(
        'Which island that is: the next one (`"ring"`, the default with islands), or one drawn at random (`"random"`).',
        or_none(one_of(MigrationRoute)),
        default=None,
        group="islands",
    )

    def __post_init__(self) -> None:
        """Refuse wrong values on any number of ranks."""
        Options.__post_init__(self)
        for name, default in (("migrate_every", 10), ("migration", "ring")):
            value = getattr(self, name)
            if value is not None and not self.are_on:
                validation.refuse(name, value, "none without islands or island_size, as there is nowhere to migrate to")
            object.__setattr__(self, name, default if value is None and self.are_on else value)
        if self.islands is not None and self.island_size is not None:
            raise ValueError(
                f"islands is {self.islands} and island_size is {self.island_size}; allowed: one of them, "
                "since the other one follows"
            )

    @property
    def are_on(self) -> bool:
        """Whether there are islands."""
        return self.islands is not None or self.island_size is not None

    def check_beside(self, averaging_strategy: str, **ranks: object) -> None:
        """Refuse what has no meaning beside islands. Raises ValueError.

        Args:
            averaging_strategy: The policy's.
            ranks: Options that name ranks for one coordinator.
        """
        if not self.are_on:
            return
        for name, value in ranks.items():
            if value not in (None, (), []):
                validation.refuse(name, value, "none beside islands, each of which has a coordinator among its ranks")
        if averaging_strategy == "reset_weights":
            validation.refuse(
                "averaging_strategy", averaging_strategy, "one with donors beside islands, which exchange them"
            )

    @contextlib.contextmanager
    def told_where_others_miss(self) -> Iterator[None]:
        """Say what may be wrong where the body waits in vain for ranks of this island: they may be in another one."""
        try:
            yield
        except StartTimeoutError as error:
            if not self.are_on:
                raise
            name, value = ("islands", self.islands) if self.island_size is None else ("island_size", self.island_size)
            hint = f"here {name}={value}: whoever has another number waits elsewhere"
            raise StartTimeoutError(f"{error.message}; {hint}", **error.facts) from None

    def agreed(self) -> dict[str, Any]:
        """Return what must be equal on all members, as JSON values; nothing without islands."""
        return asdict(self) if self.are_on else {}

    def island_of(self, rank: int, population: Sequence[int], hosts: Sequence[int] | None = None) -> "Island | None":
        """Return the island of a rank; None without islands, and for a rank that is alone.

        Args:
            rank: One of `population`.
            population: The ranks in their order; `by_host` puts those of a host together.
            hosts: As `by_host` takes them.

        Raises:
            ValueError: They cannot be divided so; the numbers that are allowed are named.
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
                f"{', '.join(map(str, allowed))}, which divide {count} ranks into equal islands of 2 or more",
            )
        return Island.at(rank, size, by_host(population, hosts))


def by_host(population: Sequence[int], hosts: Sequence[int] | None) -> Sequence[int]:
    """Return the ranks with those of each host together, hosts and the ranks of each in their order.

    Args:
        population: The ranks.
        hosts: For each rank of the world something that the ranks of its host have in common; None where all are on one
            host, or that is not known.

    Returns:
        `population` itself where that is its order: of a whole world it is a `range`, which takes no memory.
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
    """Says which ranks one island has, and which islands there are beside it.

    Attributes:
        index: Its number, from 0.
        size: Its ranks, and those of every other island.
        population: All ranks, in the order of the islands; of a whole world a `range`, which takes no memory.
    """

    index: int
    size: int
    population: Sequence[int]

    @classmethod
    def at(cls, rank: int, size: int, population: Sequence[int]) -> Self:
        """Return the island that a rank is in."""
        return cls(population.index(rank) // size, size, population)

    def index_of(self, rank: int) -> int:
        """Return the number of the island that a rank is in."""
        return self.population.index(rank) // self.size

    @property
    def count(self) -> int:
        """The number of islands."""
        return len(self.population) // self.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this island."""
        return self.ranks_of(self.index)

    def ranks_of(self, index: int) -> tuple[int, ...]:
        """Return the ranks of an island."""
        return tuple(self.population[index * self.size : (index + 1) * self.size])

    def is_elsewhere(self, rank: int) -> bool:
        """Return whether a rank is in another island."""
        return rank in self.population and rank not in self.ranks
