"""Measures what a policy costs for models on a GPU: the time of a training loop, and of averages.

Each rank times blocks of training steps (forward, backward, optimizer) with ``time.perf_counter``, up to the end of
the block's work on the GPU. Training alone alternates with training under a policy whose report is never due. A policy
with two reports per block follows; after each report one of the two ranks takes the other's weights. DiLoCo with two
rounds per block is last. Loss and metric stay on the GPU, so that the loop itself never waits for the GPU. The two
ranks share one GPU and start each block together.

``average_models`` of each model is compared with a copy of the same bytes to pinned host memory and back, which every
average through the host needs. It has no target yet, because it has not been measured. Rank 0 prints the figures of
each model when they are complete. Without a GPU nothing is measured, and the table says so.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from harness import MIB, Results, Row, collect, main, model_of, state_nbytes
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, DiLoCoPolicy

RANKS: Final = (2,)
_NEVER: Final = 10**9
#: Allowed time of a training step with the policy, as a multiple of the time of training alone.
TARGET_IDLE: Final = 1.02


@dataclass(frozen=True, slots=True)
class Settings:
    """Models by name, their parameters, and the steps of a block; ``block_count`` blocks of each loop, in alternation.

    With averaging a block has two rounds.
    """

    models: tuple[tuple[str, int, int], ...]
    batch_size: int
    block_count: int


FULL: Final = Settings(
    (("1.1 M", 1_100_000, 400), ("20 M", 20_000_000, 200), ("200 M", 200_000_000, 80)), batch_size=256, block_count=3
)
QUICK: Final = Settings((("1.1 M", 1_100_000, 20),), batch_size=8, block_count=1)
_ROUND_COUNT: Final = 2


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Measure each model in turn."""
    if not torch.cuda.is_available():
        return {} if world.rank == 0 else None
    torch.cuda.set_device(world.device)
    found: Results = {"gpu": torch.cuda.get_device_name()}
    for name, parameter_count, step_count in settings.models:
        training = Training(model_of(parameter_count).to(world.device), settings.batch_size)
        figures = await _loops(training, step_count, settings.block_count)
        figures |= await _averages(training.model, settings.block_count)
        ranks = await collect(figures | {"mib": state_nbytes(training.model) / MIB})
        if ranks is not None:
            found[name] = {f"rank {rank}": of_rank for rank, of_rank in enumerate(ranks)}
            print(f"{name} parameters: {found[name]}", flush=True)
    return found if world.rank == 0 else None


class Training:
    """A training task in which a model learns to copy its input."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        weight = next(model.parameters())
        self._inputs = torch.randn(batch_size, weight.shape[1], device=weight.device)

    def step(self) -> torch.Tensor:
        """Return the loss, which is on the GPU."""
        loss: torch.Tensor = (self.model(self._inputs) - self._inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def policy(self, average_every: int) -> AsyncSelectiveAveragingPolicy:
        """Return a policy for two ranks that replaces the worse one."""
        return AsyncSelectiveAveragingPolicy(
            self.model, self.optimizer, average_every=average_every, replacement_ratio=0.5, metric_mode="min"
        )


async def _loops(training: Training, step_count: int, block_count: int) -> dict[str, Any]:
    """Time training alone and under policies, in ms per step.

    The first two loops alternate. The policies with rounds follow, since they stay open over all their blocks.
    """
    block = functools.partial(_block, training, step_count)
    alone_ms, idle_ms, averaging_ms, diloco_ms = [], [], [], []
    for _ in range(1 + block_count):
        alone_ms.append(await block(None))
        async with training.policy(_NEVER) as policy:
            idle_ms.append(await block(policy))
    async with training.policy(step_count // _ROUND_COUNT) as policy:
        averaging_ms.append(await block(policy))
        warm_count = policy.statistics().replacement_count
        averaging_ms += [await block(policy) for _ in range(block_count)]
        replacement_count = policy.statistics().replacement_count - warm_count
    await ad.average_models(training.model)  # DiLoCo begins with equal weights on all ranks
    diloco = DiLoCoPolicy(training.model, training.optimizer, average_every=step_count // _ROUND_COUNT)
    async with diloco:
        diloco_ms = [await block(diloco) for _ in range(1 + block_count)]
    return {
        "alone_ms": statistics.median(alone_ms[1:]),
        "idle_ms": statistics.median(idle_ms[1:]),
        "averaging_ms": statistics.median(averaging_ms[1:]),
        "diloco_ms": statistics.median(diloco_ms[1:]),
        "idle_ratio": statistics.median(idle / alone for idle, alone in zip(idle_ms[1:], alone_ms[1:], strict=True)),
        "replaced_every": block_count * step_count / replacement_count if replacement_count else 0,
        "diloco_every": step_count // _ROUND_COUNT,
    }


async def _block(
    training: Training, step_count: int, policy: AsyncSelectiveAveragingPolicy | DiLoCoPolicy | None
) -> float:
    """Train for a block of steps, and return the milliseconds per step."""
    await ad.barrier()
    _wait_for_device()
    began_at = time.perf_counter()
    for _ in range(step_count):
        loss = training.step()
        if isinstance(policy, DiLoCoPolicy):
            await policy.step()
        elif policy is not None:
            await policy.step(loss)
    _wait_for_device()
    return (time.perf_counter() - began_at) / step_count * 1e3


async def _averages(model: nn.Module, block_count: int) -> dict[str, float]:
    """Time ``average_models`` and a copy of the model's bytes to the host and back, in alternation."""
    source = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    averages_ms: list[float] = []
    copies_ms: list[float] = []
    for _ in range(1 + block_count):
        for times, is_average in ((averages_ms, True), (copies_ms, False)):
            await ad.barrier()
            _wait_for_device()
            began_at = time.perf_counter()
            if is_average:
                await ad.average_models(model)
            else:
                host.copy_(source)
                source.copy_(host)
            _wait_for_device()
            times.append((time.perf_counter() - began_at) * 1e3)
    return {"average_ms": statistics.median(averages_ms[1:]), "copy_ms": statistics.median(copies_ms[1:])}


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    if not results:
        return [Row("nothing", "torch sees no GPU here")]
    return [
        row
        for name, ranks in results.items()
        if name != "gpu"
        for rank, found in ranks.items()
        for row in _rows_of(f"{rank}, {name} parameters ({found['mib']:.0f} MiB)", found)
    ]


def _rows_of(model: str, found: Results) -> list[Row]:
    alone_ms, every = found["alone_ms"], found["replaced_every"]
    alone = f"{alone_ms:.3f} ms (training alone)"
    replaced = f"replaced every {every:.0f} steps" if every else "never replaced"
    average_ratio = found["average_ms"] / found["copy_ms"]
    return [
        Row(
            f"step, {model}, no report due",
            f"{found['idle_ms']:.3f} ms (x{found['idle_ratio']:.3f})",
            alone,
            f"<= x{TARGET_IDLE:g}",
            found["idle_ratio"] <= TARGET_IDLE,
        ),
        Row(
            f"step, {model}, {replaced}",
            f"{found['averaging_ms']:.3f} ms (x{found['averaging_ms'] / alone_ms:.3f})",
            alone,
        ),
        Row(
            f"step, {model}, DiLoCo every {found['diloco_every']} steps",
            f"{found['diloco_ms']:.3f} ms (x{found['diloco_ms'] / alone_ms:.3f})",
            alone,
        ),
        Row(
            f"average_models, {model}",
            f"{found['average_ms']:.2f} ms (x{average_ratio:.1f})",
            f"{found['copy_ms']:.2f} ms (a copy to the host and back)",
        ),
    ]


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
