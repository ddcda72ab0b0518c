"""Tests random numbers and row orders of ranks whose programs use the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from asyncdist.integrations import joining
from asyncdist.integrations.joining import warn_of_common_rows
from asyncdist.integrations.random_numbers import seed_by_number, seed_workers_by_number, shuffle_by_number

ROWS = range(16)


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    """Preserve the random states of the test session."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def drawn(number: int) -> tuple[float, float, float]:
    """Seed all generators equally, as each rank does, and return the next number of each."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    seed_by_number(number)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_ranks_that_are_seeded_alike_draw_other_numbers() -> None:
    ranks = [drawn(number) for number in range(8)]
    for numbers in zip(*ranks, strict=True):
        assert len(set(numbers)) == 8
    assert ranks == [drawn(number) for number in range(8)], "seeded numbers must be repeatable"


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "random": lambda: RandomSampler(ROWS, generator=seeded()),
    "subset": lambda: SubsetRandomSampler(ROWS, generator=seeded()),
    "weighted": lambda: WeightedRandomSampler([1.0] * len(ROWS), len(ROWS), generator=seeded()),
    "of no division": lambda: DistributedSampler(ROWS, num_replicas=1, rank=0),  # type: ignore[arg-type]
}


def order(sampler: Sampler[int], number: int, **options: Any) -> list[int]:
    """Return the rows that the rank or replica with this number reads."""
    loader: DataLoader[int] = DataLoader(ROWS, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    shuffle_by_number(loader, number, **options)
    return [int(row) for batch in loader for row in batch]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_with_a_seed_shuffles_otherwise_on_each_rank(kind: str) -> None:
    orders = [order(SAMPLERS[kind](), number) for number in range(4)]
    assert len({tuple(each) for each in orders}) == 4
    assert orders == [order(SAMPLERS[kind](), number) for number in range(4)]


def test_a_sampler_inside_a_batch_sampler_is_found() -> None:
    def rows(number: int) -> list[int]:
        batches = BatchSampler(RandomSampler(ROWS, generator=seeded()), 2, drop_last=False)
        loader: DataLoader[int] = DataLoader(ROWS, batch_sampler=batches)  # type: ignore[arg-type]
        shuffle_by_number(loader, number)
        return [int(row) for batch in loader for row in batch]

    assert rows(0) != rows(1)


def of_package(package: str, base: type[Sampler[Any]]) -> Any:
    """Return a subclass of a sampler that belongs to a package, which need not be installed."""
    return type("PackagedSampler", (base,), {"__module__": f"{package}.samplers"})


@pytest.mark.parametrize("shuffles", [True, False])
def test_workers_of_a_seeded_loader_draw_other_numbers(shuffles: bool) -> None:
    """Regression: a loader's generator that no sampler used gave the workers of all ranks the same seed."""

    def seed_of_workers(number: int) -> int:  # as a loader does when an epoch begins
        sampler = RandomSampler(ROWS) if shuffles else SequentialSampler(ROWS)
        loader: DataLoader[int] = DataLoader(ROWS, sampler=sampler, generator=seeded())  # type: ignore[arg-type]
        shuffle_by_number(loader, number)
        return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))

    assert len({seed_of_workers(number) for number in range(4)}) == 4
    assert seed_of_workers(1) == seed_of_workers(1)


def test_a_generator_that_the_users_sampler_has_too_is_unchanged() -> None:
    class Divides(SequentialSampler):
        def __init__(self, generator: torch.Generator) -> None:
            super().__init__(ROWS)
            self.drawing = generator

    generator = seeded()
    sampler: Any = Divides(generator)
    shuffle_by_number(DataLoader(ROWS, sampler=sampler, generator=generator), 1)  # type: ignore[arg-type]
    assert generator.initial_seed() == 3


@pytest.mark.parametrize(
    "options", [{"sampler": [3, 1]}, {"sampler": range(4)}, {"batch_sampler": [[0, 1], [2]]}], ids=str
)
def test_samplers_may_be_lists_and_ranges(options: dict[str, Any]) -> None:
    """Regression: a loader with a seeded generator and such a sampler raised TypeError on every rank."""
    loader: DataLoader[int] = DataLoader(ROWS, generator=seeded(), **options)  # type: ignore[arg-type]
    shuffle_by_number(loader, 1)
    assert loader.generator is not None and loader.generator.initial_seed() != 3


@pytest.mark.parametrize("package", ["torchdata", "trl", "sentence_transformers"])
def test_the_samplers_of_other_libraries_shuffle_apart(package: str) -> None:
    """Regression: all ranks read the same rows in the same order, with StatefulDataLoader and in GRPO."""
    kind = of_package(package, RandomSampler)
    orders = [order(kind(ROWS, generator=seeded()), number) for number in range(4)]
    assert len({tuple(each) for each in orders}) == 4


def test_samplers_of_several_data_sets_are_found() -> None:
    """Regression: sentence_transformers has a batch sampler for each data set, which seeds itself in each epoch."""

    def seed_of(number: int) -> int:
        both = of_package("sentence_transformers", BatchSampler)(RandomSampler(ROWS), 2, drop_last=False)
        both.batch_samplers = [of_package("sentence_transformers", BatchSampler)(RandomSampler(ROWS), 2, False)]
        both.batch_samplers[0].seed = 0
        shuffle_by_number(DataLoader(ROWS, batch_sampler=both), number)  # type: ignore[arg-type]
        return int(both.batch_samplers[0].seed)

    assert len({0, seed_of(0), seed_of(1)}) == 3


def test_a_sampler_without_a_seed_gets_one_on_request() -> None:
    assert RandomSampler(ROWS).generator is None
    assert order(RandomSampler(ROWS), 0, seed=5) == order(RandomSampler(ROWS), 0, seed=5)
    assert order(RandomSampler(ROWS), 0, seed=5) != order(RandomSampler(ROWS), 1, seed=5)
    left = RandomSampler(ROWS)
    order(left, 1)
    assert left.generator is None, "the layer must draw from the global generator"


def divided(size: int, rank: int, number: int, of: int) -> list[int]:
    sampler: Sampler[int] = DistributedSampler(ROWS, num_replicas=size, rank=rank)  # type: ignore[arg-type]
    return order(sampler, number, size=of)


def test_ranks_of_a_replica_divide_an_order_of_its_own() -> None:
    replicas = [[divided(2, place, number, 2) for place in range(2)] for number in range(2)]
    for first, second in replicas:
        assert sorted(first + second) == list(ROWS)
    assert replicas[0] != replicas[1]


@pytest.mark.parametrize("size", [1, 2])
def test_rows_that_are_divided_among_all_ranks_stay_so(size: int) -> None:
    """With another seed on each rank, two ranks could read the same row, and no rank another row."""
    rows = [divided(4, rank, rank // size, size) for rank in range(4)]
    assert sorted(chain.from_iterable(rows)) == list(ROWS)


def test_a_sampler_that_the_user_has_written_stays_unchanged() -> None:
    class Divides(Sampler[int]):
        """A sampler that gives each rank every fourth row of one order."""

        def __init__(self, rank: int) -> None:
            self.rank, self.seed, self.generator = rank, 3, seeded()
            self.sampler = RandomSampler(ROWS, generator=seeded())

        def __iter__(self) -> Iterator[int]:
            return iter(list(self.sampler)[self.rank :: 4])

        def __len__(self) -> int:
            return len(ROWS) // 4

    assert sorted(chain.from_iterable(order(Divides(rank), rank) for rank in range(4))) == list(ROWS)


class Numbers(IterableDataset[int]):
    """A data set with the same rows on all ranks, unless ``_distributed`` is set, as by split_dataset_by_node."""

    def __init__(self, distributed: object = None) -> None:
        self._distributed = distributed

    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)


@pytest.mark.parametrize("kind", ["iterable", "in order", "in order, wrapped", "in order, divided in replicas"])
def test_data_that_are_equal_on_all_ranks_are_warned_of_once(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: all ranks trained on the same rows, and no warning said so, if a loader did not shuffle."""

    def told(rank: int, size: int, *loaders: Any) -> list[str]:
        monkeypatch.setattr(joining, "_logged", set())
        caplog.clear()
        for loader in loaders:
            warn_of_common_rows(loader, SimpleNamespace(rank=rank, size=size))  # type: ignore[arg-type]
        return [record.message for record in caplog.records]

    data: Any = Numbers() if kind == "iterable" else ROWS
    loader: Any = DataLoader(data, batch_size=2)
    if kind == "in order, wrapped":
        loader = SimpleNamespace(dataset=ROWS, batch_sampler=SimpleNamespace(batch_sampler=loader.batch_sampler))
    elif kind == "in order, divided in replicas":
        loader = DataLoader(ROWS, sampler=DistributedSampler(ROWS, 2, 0, shuffle=False))  # type: ignore[arg-type]
    assert [message.count(type(data).__name__) for message in told(0, 4, loader, loader)] == [1]
    assert told(1, 4, loader) == told(0, 1, loader) == [], "only rank 0 of several warns"


@pytest.mark.parametrize("size", [2, 4])
def test_data_that_may_differ_between_ranks_are_not_warned_of(size: int, caplog: pytest.LogCaptureFixture) -> None:
    loaders: list[Any] = [
        DataLoader(Numbers(1)),
        DataLoader(ROWS, shuffle=True),  # type: ignore[arg-type]
        DataLoader(ROWS, sampler=DistributedSampler(ROWS, size, 0, shuffle=False)),  # type: ignore[arg-type]
        DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 2, False)),  # type: ignore[arg-type]
        None,  # Accelerate iterates over no prepared loader
    ]
    for loader in loaders:
        warn_of_common_rows(loader, SimpleNamespace(rank=0, size=size))  # type: ignore[arg-type]
    assert not caplog.records


@pytest.mark.filterwarnings("ignore")  # torchdata calls a deprecated function of torch
def test_workers_of_a_loaded_state_draw_other_numbers() -> None:
    """Regression: the workers of all ranks drew equal numbers if the ranks had loaded the state of one rank."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful_dataloader")
    names = stateful._StatefulMultiProcessingDataLoaderIter

    def seed(number: int) -> int:
        loader: Any = stateful.StatefulDataLoader(ROWS, num_workers=1)
        loader.load_state_dict({names._SNAPSHOT: {names._MAIN_SNAPSHOT: {names._BASE_SEED: 3}, "rows": [4]}})
        seed_workers_by_number(loader, number)
        assert loader.next_iter_state[names._SNAPSHOT]["rows"] == [4]
        return int(loader.next_iter_state[names._SNAPSHOT][names._MAIN_SNAPSHOT][names._BASE_SEED])

    assert seed(0) == seed(0) != seed(1)
