"""Records a policy's actions on one rank as events and counters, and formats tables of counts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from asyncdist.live.counters import PolicyCounters
from asyncdist.messaging.services import Services
from asyncdist.protocols.exchange.counts import AverageCounts
from asyncdist.protocols.step_info import NOTHING, Contributed, StepInfo
from asyncdist.recording.events import COUNT_MAX, EventLog, Field
from asyncdist.tensors.byte_views import flat_bytes, oddity_of
from asyncdist.tensors.model_tensors import local_part
from asyncdist.wording import aligned

#: Largest size, in bytes, of weights whose checksum is computed. This takes about a second per gigabyte.
_CHECKED_NBYTES_MAX: Final = 1 << 30


def checksum_of(model: nn.Module) -> int | None:
    """Return a CRC-32 of this rank's dense parameters and buffers, or None if they are larger than 1 GiB."""
    tensors = [local_part(tensor) for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]
    tensors = [tensor for tensor in tensors if oddity_of(tensor) is None]
    if sum(tensor.nbytes for tensor in tensors) > _CHECKED_NBYTES_MAX:
        return None
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(flat_bytes(tensor).numpy().data, checksum)
    return checksum


def format_table(title: str, rows: Sequence[tuple[str, object]]) -> str:
    """Return a two-column table under an optional title."""
    return "\n".join([*([title] if title else []), *([aligned(rows)] if rows else [])])


class Journal:
    """Records one policy's actions on this rank as events and counters.

    Attributes:
        metric: Latest metric; None before the first metric.
        step_count: Iteration of the policy's next step.
        is_direction_named: Whether the latest step was called with ``loss=`` or ``score=``.
    """

    def __init__(self, name: str, class_name: str = "") -> None:
        self.metric: float | None = None
        self.is_direction_named = False
        self._name, self._class_name = name, class_name
        self._rank: int | None = None
        self._number = -1
        self._group = 0  # lowest rank of the policy's group
        self.step_count = 0
        self.averages = AverageCounts()
        self._replacement_count = self._abandoned_count = 0
        self._role, self._round = "", None  # type: str, int | None
        self._coordinator: int | None = None
        self._latest: StepInfo = NOTHING  # result of the latest step that changed weights
        self._joined: tuple[int, int, int] | None = None
        self._events: EventLog | None = None
        self._part: Journal | None = None
        self._whole: Journal | None = None  # journal of the policy that contains this policy

    def include(self, part: Journal) -> None:
        """Report the actions of a contained policy as actions of this policy."""
        self._part, part._whole = part, self

    @property
    def is_direction_certain(self) -> bool:
        """True if ``step`` was called with a loss or a score, which shows the direction of the metric."""
        return (self._whole or self).is_direction_named

    def begin(self, services: Services, class_name: str, average_every: int, nbytes: int, ranks: Sequence[int]) -> None:
        """Record that the policy has started on ``ranks``, with ``nbytes`` of weights on each rank."""
        self._events, self._rank, self._group = services.events, services.rank, min(ranks)
        if self._whole is not None:
            self._whole._number = self._number = services.events.number_policy()
            return
        if self._number < 0:  # otherwise, a contained policy has assigned the number
            self._number = services.events.number_policy()
        # average_every may be sys.maxsize, for "never"
        self.add("policy", class_name, self._name, min(average_every, COUNT_MAX), nbytes, len(ranks))
        if self._joined is not None:
            self.add("joined", *self._joined)
        services.progress_probes.append(self.progress)

    def begin_reserved(self, services: Services) -> None:
        """Start recording the decisions of a reserved coordinator, a rank that coordinates without training."""
        self._events, self._rank = services.events, services.rank
        self._number = services.events.number_policy()

    def note_joined(self, round: int, iteration: int, donor: int) -> None:
        """Record that this restarted rank has received a member's state. Call this before :meth:`begin`."""
        self._joined = round, iteration, donor

    def end(self, services: Services, model: nn.Module) -> None:
        """Record the end of the policy, with a checksum of the model's weights."""
        if self._whole is not None:
            return
        if services.events.sink is not None:
            self.record("weights", checksum_of(model))
        self.add("closed", self.step_count)
        services.progress_probes.remove(self.progress)
        services.last_progress = self.progress()

    def title(self) -> str:
        """Return the policy's class, name and rank as text."""
        name = f" {self._name!r}" if self._name else ""
        where = "not started" if self._rank is None else f"rank {self._rank}"
        return f"{self._class_name}{name}, {where}"

    def describe(self, iteration: int) -> str:
        """Return the policy's class, name, rank, iteration and current role as text."""
        member = self._part or self
        role = "" if member._round is None or member._role == "idle" else f", {member._role} in round {member._round}"
        return f"{self.title()}, iteration {iteration}{role}"

    def add(self, kind: str, *fields: Field) -> None:
        """Add an event to the log and the recording. See :data:`asyncdist.recording.events.KINDS`."""
        if self._events is not None:
            self._events.add(kind, self._number, *fields)

    def record(self, kind: str, *fields: Field) -> None:
        """Add an event to the recording only."""
        if self._events is not None:
            self._events.record(kind, self._number, *fields)

    def now(self) -> float:
        """Return the time in seconds if steps are recorded, else 0."""
        return 0.0 if self._events is None or self._events.sink is None else self._events.now()

    def note_metric(self, iteration: int, value: float) -> None:
        """Record the metric of an iteration."""
        self.metric = value
        if self._whole is None:
            self.add("metric", iteration, value)

    def note_step(self, iteration: int, info: StepInfo, began_at: float) -> None:
        """Record the result of a step that began at ``began_at``, a time from :meth:`now`."""
        self.step_count = iteration + 1
        if self._whole is not None:  # the containing policy records the step
            for part in info.parts or (info,) if info.fragment >= 0 else ():
                self.averages.note_applied(part)
            return
        if info is not NOTHING:
            if info:
                self._latest = info
                for part in info.parts or (info,):
                    self._note_applied(iteration, part)
                if info.hyperparameters:
                    self.note_hyperparameters(
                        info.round, iteration, info.donors[0], info.inherited, info.hyperparameters
                    )
            elif info.abandoned:
                self._abandoned_count += 1
                self.add("abandoned", info.round, iteration, info.abandoned)
        if began_at and self._events is not None:
            self._events.record("step", self._number, iteration, self._events.now() - began_at)

    def _note_applied(self, iteration: int, info: StepInfo) -> None:
        self._replacement_count += 1
        of_average: tuple[Field, ...] = ()
        if info.fragment >= 0:
            self.averages.note_applied(info)
            of_average = (
                *(info.fragment, info.version, info.staleness_versions, info.left_out, info.gains),
                *(info.wire_nbytes, info.unencoded_nbytes, info.outer_norm, info.cosine, info.waited_s),
            )
        self.add(
            *("applied", info.round, iteration, info.donors, info.weights, info.staleness_steps),
            *(info.seconds, info.nbytes, info.coordinator, info.route, *of_average),
        )

    def note_hyperparameters(
        self, round: int, iteration: int, donor: int, inherited: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        """Record this rank's new hyperparameters.

        Args:
            donor: Rank whose hyperparameters were copied; -1 if ``values`` are this rank's initial hyperparameters.
            inherited: The donor's hyperparameters, from which ``values`` were made.
        """
        self.add("hyperparameters", round, iteration, donor, json.dumps(dict(inherited)), json.dumps(dict(values)))

    def note_contributed(self, event: Contributed) -> None:
        """Record that this rank has contributed to an averaging round."""
        self.averages.note_contributed(event)
        self._round = event.round
        self.add(
            *("contributed", event.round, event.fragment, event.iteration, event.version),
            *(event.weight, event.norm, event.wire_nbytes, event.unencoded_nbytes, self._group),
        )

    def note_role(self, round: int, state: str) -> None:
        """Record this rank's new role in a round."""
        self._round, self._role = round or None, state
        self.add("role", round, state)

    def note_coordinator(self, epoch: int, rank: int) -> None:
        """Record that ``rank`` is the coordinator with number ``epoch``, which grows with each new coordinator."""
        self._coordinator = rank
        self.add("coordinator", epoch, rank)

    def progress(self) -> PolicyCounters:
        """Return the policy's counters. This method changes nothing, because another thread may call it."""
        latest, member = self._latest, self._part or self
        return PolicyCounters(
            policy=self._name,
            step=self.step_count,
            metric=self.metric,
            role=member._role,
            round=member._round,
            replacement_count=self._replacement_count,
            abandoned_count=self._abandoned_count,
            staleness_steps=latest.staleness_steps if latest else None,
            coordinator=member._coordinator,
            latest=str(latest) if latest else "",
            **member.averages.counters(),
        )
