"""Measures the tensors that the runtime holds in addition to the model, on donors and replacers with 2 and 6 peers.

Memory is counted, not estimated. A torch dispatch mode sees every operator of the rank's thread while the policy is
created, starts and makes several rounds, and follows each new storage until it is freed. ``peak_nbytes`` therefore
includes temporaries, and ``held_nbytes`` is the memory in the pools after the last step. The metric determines the
roles: with p peers, one donor serves p replacers, and then p donors serve one replacer. (A rank that is a donor in one
round and a replacer in another keeps both pools.)

The promise is that a donor needs one flat state, for any number of peers. A replacer needs one accumulator, a window of
chunks, and a small buffer into which it reads the memory of donors on its host. There is nothing to compare with: the
promise is the minimum for this protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import MIB, Results, Row, collect, main, model_of, optimizer_of, state_nbytes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import asyncdist as ad
from asyncdist.messaging.streams import CHUNK_NBYTES, WINDOW_COUNT
from protocols import AsyncSelectiveAveragingPolicy
from protocols.parameter_stream.receiver import READ_NBYTES

RANKS: Final = (3, 7)
_AVERAGE_EVERY: Final = 20
#: Bytes allowed for scalars and strings of collectives and checks; they do not count as held.
_SMALL_NBYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Settings:
    """Size of the float32 model in MiB, and the number of rounds to count."""

    model_mib: int
    round_count: int


FULL: Final = Settings(model_mib=32, round_count=3)
QUICK: Final = Settings(model_mib=1, round_count=1)


@dataclass(frozen=True, slots=True)
class Stop:
    """A replacer's notice that it has applied its rounds."""


class TensorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the storages of the tensors that this thread's operators return.

    Attributes:
        peak_nbytes: Largest total size in bytes of storages that existed at the same time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_nbytes = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict(keep_vars=True).values()}
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:  # a meta tensor has no memory
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() and storage.data_ptr() not in self._known and storage._cdata not in self._living:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._living[storage._cdata] = (reference, storage.nbytes())
            self.peak_nbytes = max(self.peak_nbytes, sum(self.held()))

    def held(self) -> list[int]:
        """Return the size of each storage that has not been freed."""
        living = self._living.items()
        self._living = {key: entry for key, entry in living if not entry[0].expired()}  # type: ignore[no-untyped-call]
        return [nbytes for _, nbytes in self._living.values()]


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Measure one donor that serves all other ranks, and then one replacer served by all others."""
    model = model_of(settings.model_mib * MIB // 4)
    stops = world.channel(Stop, tag=100)
    peer_count = world.size - 1
    results = {}
    for role, replacer_count in (("donor", peer_count), ("replacer", 1)):
        counted = await _count(world, stops, model, replacer_count, settings.round_count)
        found = await collect(counted)
        if found is not None:
            # The first ranks are replaced and the last ranks donate, so a single donor is last, and a single replacer
            # first.
            results[role] = found[-1 if role == "donor" else 0]
    if world.rank != 0:
        return None
    buffers_nbytes = WINDOW_COUNT * CHUNK_NBYTES + READ_NBYTES
    promised = {"donor": state_nbytes(model), "replacer": state_nbytes(model) + buffers_nbytes}
    return {
        f"{peer_count} peers": {
            role: {**figures, "promised_nbytes": promised[role]} for role, figures in results.items()
        }
    }


async def _count(
    world: ad.World, stops: ad.Channel[Stop], model: nn.Module, replacer_count: int, round_count: int
) -> dict[str, Any]:
    """Step until each replacer has applied its rounds, and return this rank's tensor memory meanwhile."""

    async def all_stopped() -> None:
        for _ in range(replacer_count):
            await stops.receive()

    is_replacer = world.rank < replacer_count
    counter = TensorCounter(model)
    await ad.barrier()
    with counter:
        policy = AsyncSelectiveAveragingPolicy(
            model,
            optimizer_of(model),
            average_every=_AVERAGE_EVERY,
            replacement_ratio=replacer_count / world.size,
            grace_s=3600.0,  # waits for every report, so that the metric alone decides the roles
            route="direct",  # a rank that reduces holds one more state
            start_timeout_s=600.0,  # a dispatch mode imports sympy first, which takes long if many ranks share a core
        )
        async with policy:
            stopped = world.spawn(all_stopped())
            applied_count = 0
            while not stopped.done():
                if await policy.step(0.0 if is_replacer else 1.0):
                    applied_count += 1
                    if applied_count == round_count:
                        for rank in range(world.size):
                            await stops.send(Stop(), rank)
            held = [nbytes for nbytes in counter.held() if nbytes > _SMALL_NBYTES]
    return {"held_count": len(held), "held_nbytes": sum(held), "peak_nbytes": counter.peak_nbytes}


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    table = []
    for peers, roles in results.items():
        for role, figures in roles.items():
            promised, peak = figures["promised_nbytes"], figures["peak_nbytes"]
            table.append(
                Row(
                    f"tensors above the model, {role} with {peers}",
                    f"{_mib(figures['held_nbytes'])} in {figures['held_count']}, at most {_mib(peak)}",
                    target=f"<= {_mib(promised)}",
                    met=peak <= promised + _SMALL_NBYTES,
                )
            )
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.4g} MiB"


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
