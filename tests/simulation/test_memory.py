"""Tests the memory use of simulations of many ranks."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from pathlib import Path

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


def test_with_many_ranks_survivors_of_a_collection_are_frozen() -> None:
    scheduler = Scheduler(random.Random(1), memory.MANY_RANKS)

    def again() -> None:
        if scheduler.event_count < 100_000:
            scheduler.at(scheduler.now + 1.0, again)

    with memory._frozen():
        before = gc.get_freeze_count()
        kept = [[number] for number in range(1000)]
        scheduler.at(0.0, again)
        scheduler.run()
        assert gc.get_freeze_count() >= before + len(kept)
    assert kept[-1] == [999]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone is asked for huge pages")
@pytest.mark.skipif(memory.__file__.endswith(".py"), reason="only the compiled module asks for huge pages")
def test_new_objects_are_allocated_in_huge_pages() -> None:
    with memory._huge_pages():
        kept = [bytes([number % 256]) * 400 for number in range(20_000)]
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("VmFlags:") and " hg" in line for line in mappings)
    assert all(each == bytes([number % 256]) * 400 for number, each in enumerate(kept))
