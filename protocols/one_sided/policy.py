"""One-sided selective averaging: each rank decides for itself, and reads the snapshots that other ranks publish.

There is no coordinator and there are no common rounds. One replacement on a member:

1. Every ``average_every`` steps, the member publishes its metric and a snapshot of its state, and continues to train.
2. When its age or its metric meets the criterion (``replacement_mode``), the member decides to be replaced.
3. It samples donors, and averages their newest snapshots in rank order.
4. In its next ``step``, the average replaces its weights.

Invariants: Weights are changed and copied only inside ``step``. A snapshot is read completely, with its metric, or not
at all. A replacement that does not complete leaves the weights unchanged and reports the reason.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, Unpack

import torch
from torch import nn

from asyncdist import AsyncdistError, RankLostError, validation
from asyncdist.collectives.one_sided import VersionedWindow, open_versioned_window
from asyncdist.messaging import wire
from asyncdist.messaging.streams import CHUNK_NBYTES
from asyncdist.protocols.applier import Applier, NewWeights
from asyncdist.protocols.declared import among, with_options
from asyncdist.protocols.metric_trend import BlankMetrics, MetricTrend, blank_warning, trend_warning
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.one_sided.reader import DonorReader, Replacement, UnreadableError
from asyncdist.protocols.one_sided.selection import (
    OneSidedRules,
    ReadOptions,
    choose,
    donor_limit,
    is_dying,
    sample_count,
)
from asyncdist.protocols.one_sided.statistics import Durations, OneSidedStatistics
from asyncdist.protocols.options import AveragingOptions, CommonOptions, MeasuredOptions, OneSidedOptions, Timing
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.ported import PortedOneSided
from asyncdist.protocols.step_info import NOTHING, SnapshotTaken, StepInfo, UserEvents
from asyncdist.tensors.byte_layout import Packing
from asyncdist.tensors.flat_state import FlatBuffers, SnapshotPool
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.one_sided.policy")

#: Maximum number of attempts per replacement; an attempt fails if a snapshot is overwritten while it is read.
_ATTEMPT_COUNT: Final = 3
_NEVER: Final = 1 << 62


@with_options(OneSidedOptions, CommonOptions, OneSidedRules, AveragingOptions, ReadOptions)
class OneSidedSelectiveAveragingPolicy(PortedOneSided):
    """Selective averaging without a coordinator, after torchgfn's one-sided policies.

    Each rank publishes a snapshot of its weights and its metric every ``average_every`` steps. A rank that decides to
    be replaced, because of its age or its metric (``replacement_mode``), reads the newest snapshots of donors, and its
    next ``step`` applies their average.

    ::

        async with OneSidedSelectiveAveragingPolicy(model, optimizer, average_every=50, age_range=(200, 600)) as policy:
            for batch in data:
                loss = train_step(model, optimizer, batch)
                info = await policy.step(loss=loss)

    Args:
        model: Model to train; see :class:`SpawnPolicy`. Its floating and complex entries are averaged; integer and
            bool entries (such as BatchNorm's counter) are copied from the best donor.
        optimizer: Optimizer of the model. It keeps its state when weights are replaced, unless
            ``optimizer_state="reset"``.
        average_every, options: The options below. A step that replaces the weights does not publish, since its metric
            belongs to the old weights. In a group of more than 33 ranks, a rank compares itself with a new random
            sample of 32 other ranks each time, or with a larger sample if it needs more donors.

    Raises:
        TypeError, ValueError: An option, the model or the optimizer is invalid.
    """

    @validation.names_options()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        **options: Unpack[OneSidedOptions],
    ) -> None:
        self._averaging = AveragingOptions.of(options)
        super().__init__(
            model,
            optimizer,
            average_every=average_every,
            resets_optimizer=self._averaging.resets_optimizer,
            **among(options, MeasuredOptions),
        )
        rules = self._rules = OneSidedRules.of(options)
        self._limit = "threshold_metric", rules.threshold_metric if rules.replacement_mode == "threshold" else None
        self._own = OwnState(self._flat, self._weights, self._averaging)
        self._read_timeout_s = ReadOptions.of(options).read_timeout_s
        self._timing = Timing(self._averaging.timing)
        self._durations: dict[str, Durations] = {}
        self._packing = Packing(self._flat.entries)
        self._states: dict[int, FlatBuffers] = {}
        self._snapshots = SnapshotPool(self._flat)
        self._events = UserEvents(self._averaging.on_event)
        self._applier = Applier(self._flat, self._own, self._snapshots, self._events)
        self._chunk_nbytes = CHUNK_NBYTES
        self._reader: DonorReader
        self._exposure: VersionedWindow | None = None
        self._is_publishing = False
        self._own_metric: float | None = None
        self._trend = MetricTrend(rules.metric_mode)
        self._blanks = BlankMetrics()
        self._replacement: Replacement | None = None
        self._task: asyncio.Task[None] | None = None
        self._draws: tuple[Any, ...] | None = None  # state of the random generator in a loaded policy
        self._needs_step = False
        self._given_up = NOTHING
        self._step_count = 0
        self._born_at = 0
        self._dies_at = _NEVER
        self._counts: Counter[str] = Counter()
        self._unpublished: Counter[str] = Counter()
        self._abandoned: Counter[str] = Counter()

    # -- the user's calls, beyond SpawnPolicy's ---------------------------------------------------------------------

    def statistics(self) -> OneSidedStatistics:
        """Return this member's counts and durations so far."""
        return OneSidedStatistics(
            total_iterations=self._step_count,
            agents_killed=self._counts["killed"],
            num_replacements=self._counts["replacements"],
            averaging_ranks=self._counts["donors"],
            age=self._step_count - self._born_at,
            version=self._exposure.version if self._exposure is not None else 0,
            unpublished=dict(self._unpublished),
            nonfinite_metric_count=self._counts["nonfinite"],
            torn_read_count=self._counts["torn"],
            lost_read_count=self._counts["lost"],
            abandoned=dict(self._abandoned),
            received_nbytes=self._counts["received"],
            timing=dict(self._durations),
            title=self._journal.title(),
        )

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _options(self) -> Mapping[str, Any]:
        return {
            **asdict(self._rules),
            "average_every": self.average_every,
            **self._averaging.agreed(),
            "chunk_nbytes": self._chunk_nbytes,
        }

    def _takes_means(self) -> bool:
        others = self._group.size - 1
        return self._averaging.takes_means(min(others, donor_limit(self._group.size, self._rules)))

    async def _start(self) -> None:
        world, members = self._world, self._group.ranks
        self._own.begin()
        agreed = await self._agree()
        scope = wire.scope_of(members, f"{type(self).__name__} {self.name or '(none)'}", agreed.time)
        self._random = world.generator(f"policy {scope}")
        if self._draws is not None:
            self._random.setstate(self._draws)
        self._exposure = await open_versioned_window(
            world.services,
            world.agreements,
            self._group,
            self._packing.nbytes,
            scope=scope,
            chunk_nbytes=self._chunk_nbytes,
            timeout_s=self._joint_start.left_s(self._start_timeout_s),
        )
        self._reader = DonorReader(
            world.rank,
            self._group,
            self._exposure,
            self._packing,
            self._flat,
            self._counts,
            chunk_nbytes=self._chunk_nbytes,
        )
        # A loaded policy keeps its lifetime, unless it was saved with a mode that judges by the metric.
        has_life = self._rules.replacement_mode != "age" or self._dies_at != _NEVER
        if self._draws is None or not has_life:
            self._begin_life()
        self._services.leftover_probes.append(self._leftovers)

    async def _stop(self, error: BaseException | None) -> None:
        """Leave the policy. Without ``error``, first wait until no rank reads this rank's snapshots."""
        assert self._exposure is not None, "the policy was stopped before it started"
        replacement = self._replacement
        if replacement is not None:
            if replacement.complete:
                logger.info(
                    "replacement %d: the policy ended before a step applied the average",
                    replacement.number,
                )
            if self._task is not None:
                self._task.cancel()
            self._give_up(replacement, "the policy ended")
        deadline = None
        try:
            if error is None and self._services.engine.failure is None:
                deadline = self._world.time() + self._averaging.drain_timeout_s
                await self._services.engine.until(self._is_quiet, WaitId(WaitKind.OWN_READS), deadline=deadline)
        finally:
            self._task = None  # the task's exception may refer to a donor's memory
            self._states.clear()
            if not self._leftovers():  # the probe would otherwise keep the model and its buffers alive
                self._services.leftover_probes.remove(self._leftovers)
            if not self._is_publishing:  # otherwise _expose closes the window after the copy from the device
                await self._exposure.close(deadline)

    def _is_quiet(self) -> bool:
        is_reading = self._task is not None and not self._task.done()
        return not is_reading and not self._is_publishing and not self._services.slots.discarding_count

    def _leftovers(self) -> list[str]:
        if not self._reader.accumulators.in_use:
            return []
        return [f"{self._reader.accumulators.in_use} accumulators of policy {self.name or type(self).__name__}"]

    def _own_state(self) -> dict[str, Any]:
        draws = self._draws if self._stage == "new" or self.is_alone else self._random.getstate()
        return {
            "step_count": self._step_count,
            "born_at": self._born_at,
            "dies_at": self._dies_at,
            "draws": draws,
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        for name in ("step_count", "born_at", "dies_at"):
            setattr(self, f"_{name}", validation.count(name, state[name], least=0))
        draws = state["draws"]
        # JSON has turned the tuples into lists.
        self._draws = None if draws is None else (draws[0], tuple(draws[1]), draws[2])
        if self._draws is not None:
            random.Random().setstate(self._draws)  # raises an error if the state is damaged

    # -- one step ---------------------------------------------------------------------------------------------------

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        self._step_count += 1
        if self.is_alone:
            if self._is_due():
                self._read_metric(local_metric)
            await self._world.safe_point()
            return NOTHING
        await self._world.progress()
        info = self._act() if self._needs_step else NOTHING
        is_due = self._is_due()
        if (is_due or self._step_count >= self._dies_at) and not info:
            if is_due:
                self._publish(self._read_metric(local_metric))
            if self._replacement is None and self._is_to_be_judged(is_due):
                await self._begin_replacement()
        return info

    def _act(self) -> StepInfo:
        """Apply an average if it is complete. Return the step's result, which may report an abandoned replacement."""
        info, self._given_up = self._given_up, NOTHING
        replacement = self._replacement
        if replacement is not None and replacement.complete:
            info = self._apply(replacement)
        self._needs_step = False  # set last: if `model_builder` raises, the next step tries again
        return info

    def _watch_metric(self, metric: float) -> None:
        """Log a warning, once, if the metric is repeatedly not finite or, on the first member, becomes worse."""
        self._blanks.add((metric,))
        if self._blanks.take_found():
            logger.warning("%s", blank_warning(self._journal.title(), "this rank's metric"))
        if self._group.index == 0:
            self._trend.add((metric,))
            if (wrong := self._trend.take_wrong()) is not None and not self._journal.is_direction_certain:
                logger.warning("%s", trend_warning(self._journal.title(), self._metric_mode, wrong))

    def _publish(self, metric: float) -> None:
        assert self._exposure is not None, "a step outside the policy"
        self._own_metric = metric
        self._watch_metric(metric)
        self._counts["nonfinite"] += not abs(metric) < float("inf")
        if self._is_publishing:
            self._unpublished["a device is still copying the last snapshot"] += 1
            return
        memory = self._exposure.begin()
        if memory is None:
            self._unpublished["a reader still uses the memory of an earlier snapshot"] += 1
            return
        began_at, iteration = self._world.time(), self.iteration
        state = self._states.get(memory.data_ptr())
        if state is None:
            state = self._states[memory.data_ptr()] = self._packing.buffers(memory)
        copy = self._flat.start_snapshot(state)
        if copy is None:
            self._expose(state, iteration, metric, began_at)
            return
        self._is_publishing = True
        what = WaitId(WaitKind.SNAPSHOT)
        self._services.engine.watch(copy, what, lambda _: self._expose(state, iteration, metric, began_at))

    def _expose(self, state: FlatBuffers, iteration: int, metric: float, began_at: float) -> None:
        """Publish a complete snapshot.

        If the snapshot contains NaN, its metric is published as NaN, so that no rank uses it as a donor. This rank also
        uses NaN as its own metric, since a diverged rank should be replaced.
        """
        assert self._exposure is not None, "a step outside the policy"
        self._is_publishing = False
        if self._stage == "closed":
            self._services.spawn_service(self._exposure.close(None), name="closing of this rank's exposed snapshots")
            return
        if not self._own.may_be_given(state):
            self._unpublished["weights are not finite (the metric is published, as NaN)"] += 1
            self._own_metric = metric = float("nan")
        record = self._exposure.publish(iteration, metric)
        self._note_time("publish", began_at)
        if self._events.are_wanted:
            self._events.tell_now(SnapshotTaken(record.version, iteration, state.by_name()))

    def _is_to_be_judged(self, is_due: bool) -> bool:
        mode = self._rules.replacement_mode
        if mode == "age":
            return self._step_count >= self._dies_at
        if mode == "threshold":  # this mode needs only the rank's own metric
            own = self._own_metric
            return is_due and own is not None and is_dying(self._world.rank, {self._world.rank: own}, self._rules)
        return is_due

    async def _begin_replacement(self) -> None:
        """Start a background task that chooses and reads donors, and let it run until its first wait."""
        replacement = self._replacement = Replacement(self._counts["killed"] + 1, self._world.time())
        # If this attempt fails, a rank judged by its age tries again after `average_every` steps.
        self._dies_at = self._step_count + self.average_every if self._dies_at != _NEVER else _NEVER
        self._task = self._services.spawn_service(self._replace(replacement), name=f"replacement {replacement.number}")
        await self._services.engine.let_begin()

    def _begin_life(self) -> None:
        self._born_at = self._step_count
        if self._rules.replacement_mode == "age":
            self._dies_at = self._born_at + self._random.randint(*self._rules.age_range)

    def _apply(self, replacement: Replacement) -> StepInfo:
        began_at = self._world.time()
        new = NewWeights(
            round=replacement.number,
            donors=tuple(replacement.donors),
            weights=tuple(replacement.weights),
            iterations=tuple(replacement.iterations),
            best=replacement.best,
            versions=tuple(replacement.versions),
            average=replacement.average,
            began_at=replacement.judged_at,
            nbytes=replacement.nbytes,
        )
        info = self._applier.apply(new, self.iteration, self._world.time)
        self._reader.release(replacement)
        self._note_time("apply", began_at)
        self._replacement = None
        self._begin_life()
        self._counts["replacements"] += 1
        self._counts["donors"] += len(new.donors)
        self._applier.announce(new, self.iteration, info)
        return info

    # -- a replacement, in the background ---------------------------------------------------------------------------

    async def _replace(self, replacement: Replacement) -> None:
        """Choose and read donors until the average is complete or the replacement is abandoned."""
        deadline = self._world.time() + self._read_timeout_s
        reason = "it was cancelled"
        try:
            for _ in range(_ATTEMPT_COUNT):
                try:
                    reason = await self._attempt(replacement, deadline)
                    break
                except UnreadableError as error:
                    reason = str(error)
        except RankLostError as error:
            self._counts["lost"] += 1
            reason = f"a donor is lost: {error}"
        except (AsyncdistError, TimeoutError) as error:
            reason = f"a donor was not read: {error}"
        finally:
            if reason or self._replacement is not replacement:
                self._reader.release(replacement)
        if reason:
            logger.info("replacement %d: abandoned: %s", replacement.number, reason)
            self._give_up(replacement, reason)
        elif self._replacement is replacement:
            replacement.complete = self._needs_step = True
            self._note_time("read", replacement.judged_at)

    async def _attempt(self, replacement: Replacement, deadline: float) -> str:
        """Read the other ranks' metrics, choose donors, and average the donors' snapshots.

        Returns:
            Reason why the replacement is abandoned; "" if the average is complete or this rank is not replaced.

        Raises:
            UnreadableError: The attempt has failed; another attempt may succeed.
        """
        rank, count_max = self._world.rank, sample_count(self._group.size, self._rules)
        answered_by = min(deadline, self._world.time() + self._read_timeout_s / 4)
        metrics = await self._reader.metrics(self._own_metric, count_max, self._random.sample, answered_by)
        if self._rules.replacement_mode == "worst_ratio" and not is_dying(rank, metrics, self._rules):
            if self._replacement is replacement:
                self._replacement = None  # this rank is not among the worst
            return ""
        self._counts["killed"] = replacement.number
        choice = choose(rank, metrics, self._group.size, self._rules, self._random.sample)
        if choice is None and self._group.size - 1 > count_max:
            raise UnreadableError(f"none of the {count_max} ranks that were drawn can be a donor")
        if choice is None:
            return "no other rank can be a donor"
        mean = await self._reader.read(replacement, choice, deadline)
        if not mean.is_agreed:
            assert replacement.average is not None, "a mean without an accumulator"
            entry = self._own.unsound_entry(replacement.average)
            return f"the donors differ in infinite values: in {entry!r}"
        return ""

    def _give_up(self, replacement: Replacement, reason: str) -> None:
        """Abandon a replacement; the next step reports the reason to the user."""
        if self._replacement is not replacement:
            return
        self._replacement = None
        if replacement.complete:
            self._reader.release(replacement)
        kind = reason.partition(":")[0]
        self._abandoned[kind] += 1
        self._given_up = StepInfo(round=replacement.number, abandoned=reason, nbytes=replacement.nbytes)
        self._needs_step = True

    def _note_time(self, name: str, began_at: float) -> None:
        duration_s = self._world.time() - began_at
        self._timing.add(name, duration_s)
        self._durations[name] = self._durations.get(name, Durations()).plus(duration_s)
