"""Tests the memory use of simulations of many ranks."""

from __future__ import annotations

import gc
import mmap
import random
import sys
import weakref

import pytest

import asyncdist as ad
from asyncdist.simulation import simulate
from asyncdist.simulation.processes import memory
from asyncdist.simulation.scheduler import Scheduler


class Kept:
    """An object that only a full garbage collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_a_simulation_of_many_ranks_frees_its_objects_at_its_end() -> None:
    left: list[weakref.ref[Kept]] = []

    async def main(world: ad.World) -> None:
        if not world.rank:
            kept = Kept()
            gc.collect()  # the object is now in the oldest generation
            left.append(weakref.ref(kept))

    simulate(main, ranks=memory.MANY_RANKS)
    assert left[0]() is None


def test_thresholds_of_the_collector_are_the_users_again() -> None:
    before = gc.get_threshold()
    with memory.collecting_at_fixed_points(2):
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before


def test_long_simulations_are_told_of_ever_more_rarely() -> None:
    told = []
    scheduler = Scheduler(random.Random(1), lambda: told.append(scheduler.event_count))

    def again() -> None:
        if scheduler.event_count < 400_000:
            scheduler.at(scheduler.now + 1.0, again)

    scheduler.at(0.0, again)
    scheduler.run()
    assert told == [40_000, 80_000, 160_000, 320_000]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone is asked for huge pages")
def test_what_is_in_memory_stays_as_it_is_in_huge_pages() -> None:
    with mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        content = random.Random(1).randbytes(1 << 20) * 16
        region[:] = content
        regions = list(memory._anonymous_regions())
        assert sum(end - begin for begin, end in regions) >= 16 << 20
        memory.use_huge_pages()
        assert region[:] == content
