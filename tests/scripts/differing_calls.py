"""Rank 1 calls a different function than the others: all are notified and continue. Runs in four worlds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from support.mpi import report

import asyncdist as ad
from asyncdist.errors import DisagreementError, RemoteError

NOT_A_FUNCTION: Any = 5


def pairs(world: ad.World) -> list[tuple[str, Callable[[], Awaitable[Any]], Callable[[], Awaitable[Any]]]]:
    """Return, for each case, the facts that each error must contain, the call of rank 1, and the call of the others."""
    model = torch.nn.Linear(3, 3)

    async def only(root: int) -> None:
        async with ad.zero_only(root=root):
            pass

    async def first() -> None:
        async with ad.zero_first(world.rank != 1):
            pass

    gather, reduce = ad.gather_from_all_ranks, ad.reduce_and_broadcast
    return [
        ("root=0, root=1", lambda: ad.compute_and_broadcast(int, root=1), lambda: ad.compute_and_broadcast(int)),
        ("root=0, root=1", lambda: gather(int, root=1), lambda: gather(int)),
        (
            "root=0, root=1",
            lambda: reduce(int, sum, root=1),
            lambda: reduce(int, sum),
        ),
        ("root=0, root=1", lambda: only(1), lambda: only(0)),
        ("average_gradients, average_models", lambda: ad.average_models(model), lambda: ad.average_gradients(model)),
        (
            "best_of_population, save_population",
            lambda: ad.save_population("never-written", model),
            lambda: ad.best_of_population(model, loss=lambda _: 1.0),
        ),
        ("barrier, compute_and_broadcast", lambda: ad.compute_and_broadcast(int), lambda: ad.barrier()),
        ("zero_first, gather_distributed_data", lambda: ad.gather_distributed_data([]), first),
        ("RemoteError", lambda: gather(NOT_A_FUNCTION), lambda: gather(int)),
        ("RemoteError", lambda: gather(int, 7), lambda: gather(int)),
        ("RemoteError", lambda: ad.compute_and_broadcast(NOT_A_FUNCTION), lambda: ad.compute_and_broadcast(int)),
        ("RemoteError", lambda: ad.gather_distributed_data([], 7), lambda: ad.gather_distributed_data([])),
    ]


async def main(world: ad.World) -> list[tuple[str, str]]:
    """Return each case's facts and the kind of its error: "silence" for no error, or one that lacks some facts."""
    found = []
    for words, odd, others in pairs(world):
        kind = "silence"
        try:
            await (odd() if world.rank == 1 else others())
        except (DisagreementError, RemoteError) as error:
            if words == "RemoteError" or all(word in str(error) for word in words.split(", ")):
                kind = type(error).__name__
        except (TypeError, ValueError) as error:
            says = "allowed" in str(error) or "must be" in str(error)
            kind = "itself" if world.rank == 1 and says else "silence"
        found.append((words, kind))
    assert await ad.compute_and_broadcast(lambda: 7) == 7  # the ranks are in step
    return found


def check(results: Mapping[int, Any] | Sequence[Any]) -> None:
    for rank in range(3):
        of_wrong_argument = "itself" if rank == 1 else "RemoteError"
        for words, kind in results[rank]:
            assert kind == (of_wrong_argument if words == "RemoteError" else "DisagreementError"), (rank, words)


async def reporting(world: ad.World) -> None:
    report(world.rank, await main(world))


if __name__ == "__main__":
    ad.run(reporting, strict=True)
