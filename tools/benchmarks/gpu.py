"""Measures what a policy costs for models on a GPU: the time of a training loop with and without the policy.

Each rank times blocks of training steps (forward, backward, optimizer) with ``time.perf_counter``, up to the end of
the block's work on the GPU. Training alone alternates with training under a policy whose report is never due. A policy
with two reports per block follows; after each report one of the two ranks takes the other's weights. Loss and metric
stay on the GPU, so that the loop itself never waits for the GPU. The two ranks share one GPU and start each block
together. Without a GPU nothing is measured, and the table says so.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

import torch
from harness import MIB, Results, Row, collect, main, model_of, state_nbytes
from torch import nn

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy

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
    (("1.1 M", 1_100_000, 400), ("20 M", 20_000_000, 200), ("200 M", 200_000_000, 80)), batch_size=256, block_count=7
)
QUICK: Final = Settings((("1.1 M", 1_100_000, 20),), batch_size=8, block_count=1)
_ROUND_COUNT: Final = 2


async def measure(world: ad.World, settings: Settings) -> Results | None:
    """Alternate the first two loops for each model; the third comes after them, since its policy stays open."""
    if not torch.cuda.is_available():
        return {} if world.rank == 0 else None
    torch.cuda.set_device(world.device)
    found: Results = {"gpu": torch.cuda.get_device_name()}
    for name, parameter_count, step_count in settings.models:
        training = Training(model_of(parameter_count).to(world.device), settings.batch_size)
        alone_ms, idle_ms, averaging_ms = [], [], []
        for _ in range(1 + settings.block_count):
            alone_ms.append(await _block(training, step_count, None))
            async with training.policy(_NEVER) as policy:
                idle_ms.append(await _block(training, step_count, policy))
        async with training.policy(step_count // _ROUND_COUNT) as policy:
            averaging_ms.append(await _block(training, step_count, policy))
            warm_count = policy.statistics().replacement_count
            averaging_ms += [await _block(training, step_count, policy) for _ in range(settings.block_count)]
            replacement_count = policy.statistics().replacement_count - warm_count
        figures = {
            "alone_ms": statistics.median(alone_ms[1:]),
            "idle_ms": statistics.median(idle_ms[1:]),
            "averaging_ms": statistics.median(averaging_ms[1:]),
            "idle_ratio": statistics.median(
                idle / alone for idle, alone in zip(idle_ms[1:], alone_ms[1:], strict=True)
            ),
            "replaced_every": settings.block_count * step_count / replacement_count if replacement_count else 0,
            "mib": state_nbytes(training.model) / MIB,
        }
        ranks = await collect(figures)
        if ranks is not None:
            found[name] = {f"rank {rank}": of_rank for rank, of_rank in enumerate(ranks)}
    return found if world.rank == 0 else None


class Training:
    """A model that learns to copy its input."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        weight = next(model.parameters())
        self._inputs = torch.randn(batch_size, weight.shape[1], device=weight.device)

    def step(self) -> torch.Tensor:
        """Return the loss, which is on the GPU."""
        loss: torch.Tensor = (self.model(self._inputs) - self._inputs).square().mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.detach()

    def policy(self, average_every: int) -> AsyncSelectiveAveragingPolicy:
        """Return one for two ranks of which the worse is replaced."""
        return AsyncSelectiveAveragingPolicy(
            self.model, self._optimizer, average_every=average_every, replacement_ratio=0.5, metric_mode="min"
        )


async def _block(training: Training, step_count: int, policy: AsyncSelectiveAveragingPolicy | None) -> float:
    """Train for a block of steps, and return the milliseconds per step."""
    await ad.barrier()
    torch.cuda.synchronize()
    began_at = time.perf_counter()
    for _ in range(step_count):
        loss = training.step()
        if policy is not None:
            await policy.step(loss)
    torch.cuda.synchronize()
    return (time.perf_counter() - began_at) / step_count * 1e3


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    if not results:
        return [Row("nothing", "torch sees no GPU here")]
    table = []
    for name, ranks in results.items():
        for rank, found in ranks.items() if name != "gpu" else ():
            what = f"{rank}, {name} parameters ({found['mib']:.0f} MiB)"
            alone_ms, ratio = found["alone_ms"], found["idle_ratio"]
            table.append(
                Row(
                    f"step, {what}, no report due",
                    f"{found['idle_ms']:.3f} ms (x{ratio:.3f})",
                    f"{alone_ms:.3f} ms (training alone)",
                    f"<= x{TARGET_IDLE:g}",
                    ratio <= TARGET_IDLE,
                )
            )
            every = found["replaced_every"]
            table.append(
                Row(
                    f"step, {what}, " + (f"replaced every {every:.0f} steps" if every else "never replaced"),
                    f"{found['averaging_ms']:.3f} ms (x{found['averaging_ms'] / alone_ms:.3f})",
                    f"{alone_ms:.3f} ms (training alone)",
                )
            )
    return table


if __name__ == "__main__":
    main(measure, full=FULL, quick=QUICK)
