"""Tests that members in different collectives are named in the error, each with its line of code."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from support.facts import naming
from support.seeds import seeds

import asyncdist as ad
from asyncdist.collectives.call_checker import CollectiveCall, CollectiveChecker

Call = Callable[[], Coroutine[Any, Any, Any]]
THREE = torch.zeros(3)
CALLS: dict[str, Call] = {
    "broadcast(float32 [3], root=0)": lambda: ad.broadcast(THREE.clone()),
    "broadcast(float32 [3], root=1)": lambda: ad.broadcast(THREE.clone(), 1),
    "gather(float32 [3], root=0)": lambda: ad.gather(THREE),
    "gather(int32 [3], root=0)": lambda: ad.gather(THREE.int()),
    "all_gather(float32 [3])": lambda: ad.all_gather(THREE),
    "all_gather(float32 [3, 1])": lambda: ad.all_gather(THREE[:, None]),
    "all_reduce(sum, float32 [3])": lambda: ad.all_reduce(THREE.clone()),
    "all_reduce(max, float32 [3])": lambda: ad.all_reduce(THREE.clone(), "max"),
    "all_to_all(float32 [1])": lambda: ad.all_to_all(THREE),
    "a helper": lambda: ad.average_models(torch.nn.Linear(2, 2)),
}
NAMES = [*CALLS]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("one", "other"), [(one, NAMES[i - 1]) for i, one in enumerate(NAMES)])
def test_calls_that_differ_are_both_named_with_their_lines(one: str, other: str, seed: int) -> None:
    """Regression: a broadcast on one rank and a gather on another deadlocked, and the report named neither."""

    async def main(world: ad.World) -> None:
        await ad.barrier()
        await ad.all_gather(torch.tensor([world.rank]))
        await CALLS[other if world.rank == 1 else one]()

    report = ad.simulate(main, ranks=3, seed=seed, return_exceptions=True)
    error = next(result for result in report.results if isinstance(result, ad.DisagreementError))
    said = str(error)
    assert 1 in error.ranks
    place = r"\((?!_)\w+ at tests/local/test_calls\.py:\d+\)"  # with the public name of the called function
    assert re.search(rf"rank 1 (calls )?{re.escape(other)} {place}", said), said
    assert re.search(rf"rank [02] (calls )?{re.escape(one)} {place}", said), said
    assert "as collective number 3 of one group" in said


def test_differing_calls_are_reported_alike_wherever_the_file_is(tmp_path: Path) -> None:
    """Peers are sent them, so they are in the digest, and their length is in the count of bytes."""
    source = """
import torch
import asyncdist as ad

async def main(world):
    await (ad.barrier() if world.rank else ad.all_gather(torch.zeros(3)))
"""
    reports = []
    for folder in (tmp_path / "here", tmp_path / "somewhere" / "else"):
        path = folder / "package" / "program.py"
        path.parent.mkdir(parents=True)
        path.write_text(source)
        namespace: dict[str, Any] = {"__name__": "package.program"}
        exec(compile(source, path, "exec"), namespace)
        reports.append(ad.simulate(namespace["main"], ranks=2, return_exceptions=True))
    one, other = reports
    assert all("(barrier at package/program.py:6)" in str(error) for error in one.results)
    assert (one.byte_count, one.trace_digest) == (other.byte_count, other.trace_digest)


@pytest.mark.parametrize("seed", seeds(20))
def test_groups_that_overlap_or_share_a_tag_are_told_apart(seed: int) -> None:
    async def main(world: ad.World) -> None:
        pair = await ad.new_group([world.rank & ~1, world.rank | 1])  # two at once, of one tag
        middle = await ad.new_group([1, 2]) if world.rank in (1, 2) else None
        for _ in range(3):
            if middle is not None:
                await ad.all_reduce(torch.ones(2), group=middle)
            await (ad.gather(THREE, pair.ranks[0], group=pair) if world.rank < 2 else ad.all_gather(THREE, group=pair))
        await ad.barrier()

    ad.simulate(main, ranks=4, seed=seed, strict=True).value()


def test_nothing_is_kept_of_what_all_have_called() -> None:
    book = CollectiveChecker()
    for number in range(50):
        for rank in (4, 2, 7):
            book.note((2, 4, 7), 9000, rank, CollectiveCall("gather", root=number))
        assert not book._open
    book.note((2,), 9000, 2, CollectiveCall("barrier"))
    assert not book._open


def test_a_mistake_of_one_rank_alone_does_not_count() -> None:
    """A call that is refused for its arguments leaves the ranks in step."""

    async def main(world: ad.World) -> None:
        if world.rank == 1:
            with pytest.raises(ad.LocalProtocolError, match=naming("root", 9)):
                await ad.broadcast(THREE.clone(), 9)
            with pytest.raises(ad.LocalProtocolError, match=naming("op", "'mean'")):
                await ad.all_reduce(THREE.clone(), "mean")  # type: ignore[arg-type]
        await ad.broadcast(THREE.clone())
        await ad.all_reduce(THREE.clone())

    ad.simulate(main, ranks=2, strict=True).value()
