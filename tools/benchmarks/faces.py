"""Measures the overhead of a step in the blocking interface and in each integration, compared with the coroutine.

Both ranks time every step in which nothing happens, with ``time.perf_counter_ns`` before and after it. The training
loop's forward pass, backward pass and ``optimizer.step()`` take milliseconds, and evict the policy's code from the
caches. All interfaces are measured in the same processes, in alternating blocks, on one model:

- coroutine: ``await policy.step(-loss)`` under ``ad.run``.
- blocking: ``policy.step(-loss)`` of ``ad.blocking.policy``.
- plain: ``averaging.step(loss)`` of ``asyncdist.integrations.pytorch``, which Accelerate's integration uses as well.
- torchgfn: the call ``policy(iteration=..., model=..., optimizer=..., local_metric=...)``.
- lightning, transformers: the callback that the ``Trainer`` calls, and the hook that receives the losses. The trainer's
  own time for calling a callback is not included.

Each median is shown with the median time inside the coroutine, which also suffers from the trainer's colder caches.

Each block has its own world, whose opening is not timed. The loss is always a tensor.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from harness import Results, Row, collect, percentile
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import asyncdist as ad
from protocols import AsyncSelectiveAveragingPolicy, SpawnPolicy, StepInfo

RANKS: Final = (2,)
TARGET_US: Final = 30.0
_NEVER: Final = 10**9
_WARM_UP_COUNT: Final = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """``block_count`` blocks of ``step_count`` timed steps for each interface, in alternation."""

    block_count: int
    step_count: int
    width: int = 256


FULL: Final = Settings(block_count=8, step_count=250)
QUICK: Final = Settings(block_count=1, step_count=3, width=8)


class Net(nn.Module):
    """A model that returns its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.mse_loss(self.layers(inputs), labels)}


class Rows(Dataset[Any]):
    """A data set with as many samples as a trainer requests."""

    def __init__(self, width: int, count: int) -> None:
        self._row = {"inputs": torch.ones(width), "labels": torch.zeros(width)}
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._row


BATCH: Final = 32


class Training:
    """A model with a plain training loop, for the interfaces without a trainer."""

    def __init__(self, settings: Settings) -> None:
        self.count = _WARM_UP_COUNT + settings.step_count
        self.model = Net(settings.width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._batch = torch.ones(BATCH, settings.width), torch.zeros(BATCH, settings.width)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(*self._batch)["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss


class Stopwatch:
    """Collects the durations of calls."""

    def __init__(self) -> None:
        self.times_us: list[float] = []
        self._before_us = 0.0

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Time a step, and add the time of the calls made by ``before``."""
        self.times_us.append(self._before_us + _took_us(fn, *args, **kwargs))
        self._before_us = 0.0

    def before(self, fn: Callable[..., Any], *args: Any) -> None:
        """Time a call whose duration belongs to the next step."""
        self._before_us += _took_us(fn, *args)


def _took_us(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    began_at = time.perf_counter_ns()
    fn(*args, **kwargs)
    return (time.perf_counter_ns() - began_at) / 1e3


def inside_us() -> list[float]:
    """Return a list to which each later step of a policy appends the microseconds inside its coroutine."""
    times_us: list[float] = []
    step = SpawnPolicy._guarded_step

    async def timed(policy: SpawnPolicy, metric: Any, is_due: bool | None = None) -> StepInfo:
        began_at = time.perf_counter_ns()
        try:
            return await step(policy, metric, is_due)
        finally:
            times_us.append((time.perf_counter_ns() - began_at) / 1e3)

    SpawnPolicy._guarded_step = timed  # type: ignore[assignment, method-assign]
    return times_us


def coroutine(settings: Settings, times: Stopwatch) -> None:
    async def main(world: ad.World) -> None:
        training = Training(settings)
        policy = AsyncSelectiveAveragingPolicy(training.model, training.optimizer, average_every=_NEVER)
        async with policy:
            for _ in range(training.count):
                loss = training.step()
                began_at = time.perf_counter_ns()
                await policy.step(-loss)
                times.times_us.append((time.perf_counter_ns() - began_at) / 1e3)

    ad.run(main)


def blocking(settings: Settings, times: Stopwatch) -> None:
    training = Training(settings)
    awaited = AsyncSelectiveAveragingPolicy(training.model, training.optimizer, average_every=_NEVER)
    with ad.blocking.open_world(), ad.blocking.policy(awaited) as policy:
        for _ in range(training.count):
            loss = training.step()
            times(lambda loss=loss: policy.step(-loss))


def plain(settings: Settings, times: Stopwatch) -> None:
    from asyncdist.integrations.pytorch import SelectiveAveraging

    training = Training(settings)
    with ad.blocking.open_world(), SelectiveAveraging(training.model, training.optimizer, _NEVER) as averaging:
        for _ in range(training.count):
            loss = training.step()
            times(averaging.step, loss)


def torchgfn(settings: Settings, times: Stopwatch) -> None:
    from asyncdist.integrations.torchgfn import AsyncSelectiveAveragingPolicy as Called

    training = Training(settings)
    model, optimizer = training.model, training.optimizer
    with ad.blocking.open_world():
        policy = Called(model_builder=None, average_every=_NEVER)
        for iteration in range(training.count):
            loss = training.step()
            times(lambda i=iteration, loss=loss: policy(i, model, optimizer, -loss))


def lightning(settings: Settings, times: Stopwatch) -> None:
    import lightning.pytorch as pl

    from asyncdist.integrations.lightning import SelectiveAveraging

    class Timed(SelectiveAveraging):
        def on_train_batch_end(self, *args: Any) -> None:
            times(super().on_train_batch_end, *args)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(settings.width)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    count = _WARM_UP_COUNT + settings.step_count
    data = torch.utils.data.DataLoader(Rows(settings.width, BATCH * count), batch_size=BATCH)
    with ad.blocking.open_world():
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=[Timed(_NEVER)], **quiet)  # type: ignore[arg-type]
        trainer.fit(Module(), data)


def transformers(settings: Settings, times: Stopwatch) -> None:
    from asyncdist.integrations.transformers import SelectiveAveraging  # isort: skip
    from transformers import Trainer, TrainingArguments

    class Timed(SelectiveAveraging):
        def _see(self, *args: Any) -> None:
            times.before(super()._see, *args)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times(super().on_step_end, *args, **kwargs)

    count = _WARM_UP_COUNT + settings.step_count
    with tempfile.TemporaryDirectory() as folder, ad.blocking.open_world():
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=count,
            per_device_train_batch_size=BATCH,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        data = Rows(settings.width, BATCH * count)
        trainer = Trainer(Net(settings.width), arguments, train_dataset=data, callbacks=[Timed(_NEVER)])
        trainer.train()


WAYS: Final[dict[str, Callable[[Settings, Stopwatch], None]]] = {
    way.__name__: way for way in (coroutine, blocking, plain, torchgfn, lightning, transformers)
}


def main() -> None:
    """Run one rank. Rank 0 writes the results to the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    settings = QUICK if options.quick else FULL
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # hides the trainers' advice
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    times_us: dict[str, list[float]] = {name: [] for name in WAYS}
    own_us: dict[str, list[float]] = {name: [] for name in WAYS}
    inside = inside_us()
    for _ in range(settings.block_count):
        for name, way in WAYS.items():
            times = Stopwatch()
            inside.clear()
            way(settings, times)
            assert len(times.times_us) == _WARM_UP_COUNT + settings.step_count, (
                f"{name}: recorded {len(times.times_us)} steps"
            )
            times_us[name] += times.times_us[_WARM_UP_COUNT:]
            own_us[name] += inside[_WARM_UP_COUNT:]
    results = ad.run(_collected, {name: _figures(times_us[name], own_us[name]) for name in WAYS})
    if results is not None:
        options.out.write_text(json.dumps(results))


def _figures(values_us: list[float], own_us: list[float]) -> dict[str, float]:
    return {
        "median_us": statistics.median(values_us),
        "p95_us": percentile(values_us, 95),
        "own_us": statistics.median(own_us),
    }


async def _collected(_: ad.World, figures: Results) -> Results | None:
    ranks = await collect(figures)
    if ranks is None:
        return None
    return {name: {f"rank {rank}": found[name] for rank, found in enumerate(ranks)} for name in WAYS}


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    own = results["coroutine"]
    table = []
    for name, ranks in results.items():
        for rank, figures in ranks.items():
            above_us = figures["median_us"] - own[rank]["median_us"]
            judged = name != "coroutine"
            table.append(
                Row(
                    f"idle step between two of training, {name}, {rank}",
                    f"{figures['median_us']:.0f} us ({figures['own_us']:.0f} in it; p95 {figures['p95_us']:.0f})",
                    f"{above_us:+.0f} us above the coroutine's" if judged else "",
                    f"<= {TARGET_US:g} us above" if judged else "",
                    above_us <= TARGET_US if judged else None,
                )
            )
    return table


if __name__ == "__main__":
    main()
