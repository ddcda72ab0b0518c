"""Writes the counters of a rank to TensorBoard, Weights & Biases or OpenTelemetry."""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from asyncdist import environment
from asyncdist._version import __version__
from asyncdist.live.counters import EXPORTED, RankCounters, Sample, samples

logger = logging.getLogger("asyncdist.live.writers")

#: OpenTelemetry units, keyed by the last word of a counter's name.
_UNITS: Final = {"bytes": "By", "seconds": "s"}


class Writer(abc.ABC):
    """Receives a rank's counters periodically."""

    _before: RankCounters | None = None

    @abc.abstractmethod
    def write(self, counters: RankCounters) -> None:
        """Write the rank's current counters."""

    @abc.abstractmethod
    def close(self) -> None:
        """Finish writing, and close the output."""

    def _numbers(self, counters: RankCounters) -> Iterator[tuple[str, Sample]]:
        """Yield each number except roles, with a name like a path: ``asyncdist/POLICY/NUMBER``.

        The numbers include the step rate since the previous call.
        """
        for sample in samples(counters, self._before):
            if sample.name != "role":
                policy = sample.labels.get("policy", "")
                yield f"asyncdist/{policy}/{sample.name}" if policy else f"asyncdist/{sample.name}", sample
        self._before = counters


class TensorBoardWriter(Writer):
    """Writes to one folder per rank, such as ``FOLDER/rank00003``. The global step is the policy's number of steps."""

    def __init__(self, folder: str, rank: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(f"{folder}/rank{rank:05d}")

    def write(self, counters: RankCounters) -> None:
        """Write the rank's current counters."""
        for name, sample in self._numbers(counters):
            self._writer.add_scalar(name, sample.value, counters.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbWriter(Writer):
    """Writes one Weights & Biases run per rank, in the job's group. It is offline unless WANDB_MODE is set."""

    def __init__(self, project: str, counters: RankCounters) -> None:
        import wandb

        # The mode is not checked here, because wandb's error lists the allowed modes.
        mode: Any = environment.VARIABLES.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project=project or "asyncdist",
            group=f"asyncdist-{counters.job}",
            name=f"rank {counters.rank}",
            config={"rank": counters.rank, "size": counters.size, "incarnation": counters.incarnation},
            mode=mode,
            reinit="create_new",  # keeps the user's own run open
            settings=wandb.Settings(silent=True),
        )

    def write(self, counters: RankCounters) -> None:
        """Write the rank's current counters."""
        self._run.log({name: sample.value for name, sample in self._numbers(counters)})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class OpenTelemetryWriter(Writer):
    """Records counters with the meter provider that the program or ``opentelemetry-instrument`` has set."""

    def __init__(self) -> None:
        from opentelemetry import metrics

        meter = metrics.get_meter("asyncdist", __version__)
        self._instruments: dict[str, Any] = {}
        for name, (kind, meaning) in EXPORTED.items():
            make = meter.create_counter if kind == "counter" else meter.create_gauge
            unit = _UNITS.get(name.rpartition("_")[2], "1")
            self._instruments[name] = make(f"asyncdist.{name}", unit=unit, description=meaning)
        self._said: dict[tuple[str, str], float] = {}
        self._has_warned = False

    def write(self, counters: RankCounters) -> None:
        """Write the rank's current counters."""
        if not self._has_warned and _flush_of_provider() is None:
            self._has_warned = True
            logger.warning(
                "rank %d exports no counters to opentelemetry until the program has set a meter provider", counters.rank
            )
        for path, sample in self._numbers(counters):
            attributes = {"rank": counters.rank, **sample.labels}
            if not math.isfinite(sample.value):
                continue  # the library rejects NaN and infinities with a warning each time
            if EXPORTED[sample.name][0] == "gauge":
                self._instruments[sample.name].set(sample.value, attributes)
            else:
                before = self._said.get((path, sample.name), 0.0)
                self._instruments[sample.name].add(max(0.0, sample.value - before), attributes)
                self._said[path, sample.name] = sample.value

    def close(self) -> None:
        """Make the provider export all pending counters."""
        flush = _flush_of_provider()
        if flush is not None:
            flush(1000)


def _flush_of_provider() -> Callable[[float], object] | None:
    """Return OpenTelemetry's function for exporting at once, or None if the program has not set a meter provider."""
    from opentelemetry import metrics

    flush: Callable[[float], object] | None = getattr(metrics.get_meter_provider(), "force_flush", None)
    return flush
