"""Base class of one-sided policies, whose ranks read other ranks' published snapshots without waiting for any rank.

Each rank publishes snapshots of its state. For a *replacement* of its weights, a background task reads snapshots of
other ranks (the donors), and averages them in rank order. Meanwhile, the rank continues to train. The next ``step``
after the last read applies the average.

Invariants: Weights are changed and copied only inside ``step``. A snapshot is used only if it was read completely, with
its metric. If a replacement fails, the weights stay unchanged and the reason is reported.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, Unpack

import torch
from torch import nn

from asyncdist import AsyncdistError, RankLostError
from asyncdist.collectives.agreement.messages import Agreed
from asyncdist.collectives.one_sided import StreamedWindow, VersionedWindow, maps_windows, open_versioned_window
from asyncdist.messaging import wire
from asyncdist.messaging.streams import CHUNK_NBYTES
from asyncdist.protocols.joining.membership import Membership
from asyncdist.protocols.joining.policy import JoinablePolicy
from asyncdist.protocols.joining.scopes import PolicyScopes
from asyncdist.protocols.metrics import MetricSource
from asyncdist.protocols.one_sided.reader import DonorReader, Replacement, UnreadableError
from asyncdist.protocols.one_sided.selection import Choice
from asyncdist.protocols.one_sided.statistics import Durations
from asyncdist.protocols.options import AveragingOptions, MeasuredOptions
from asyncdist.protocols.own_state import OwnState
from asyncdist.protocols.step_info import NOTHING, SnapshotTaken, StepInfo
from asyncdist.tensors.byte_layout import Packing
from asyncdist.tensors.flat_state import FlatBuffers
from asyncdist.waits import WaitId, WaitKind

logger = logging.getLogger("protocols.one_sided.policy")

#: Maximum number of attempts to average other ranks' snapshots. An attempt fails if a snapshot is overwritten while it
#: is read.
_ATTEMPT_COUNT: Final = 3


class OneSidedPolicy(JoinablePolicy):
    """Base class of policies whose ranks publish snapshots, and read other ranks' snapshots in the background.

    Args:
        averaging: Options for replacing the weights and for reporting.
        read_timeout_s: Maximum number of seconds to read all snapshots for one average.
        options: Options of :class:`SpawnPolicy`.
    """

    takes_metric = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        average_every: int,
        averaging: AveragingOptions,
        read_timeout_s: float,
        **options: Unpack[MeasuredOptions],
    ) -> None:
        self._averaging = averaging
        super().__init__(
            model, optimizer, average_every=average_every, resets_optimizer=averaging.resets_optimizer, **options
        )
        self._own = OwnState(self._flat, self._weights, averaging)
        self._read_timeout_s = read_timeout_s
        self._durations: dict[str, Durations] = {}
        self._packing = Packing(self._flat.entries)
        self._states: dict[int, FlatBuffers] = {}
        self._snapshots, self._events = self._own.snapshots, self._own.events
        self._chunk_nbytes = CHUNK_NBYTES
        self._reader: DonorReader
        self._exposure: VersionedWindow | None = None
        self._membership: Membership | None = None
        self._is_publishing = False
        self._own_metric: float | None = None
        self._replacement: Replacement | None = None
        self._task: asyncio.Task[None] | None = None
        self._draws: tuple[Any, ...] | None = None  # loaded state of the random generator
        self._needs_step = False
        self._abandoned_info = NOTHING
        self._counts: Counter[str] = Counter()
        self._unpublished: Counter[str] = Counter()
        self._abandoned: Counter[str] = Counter()

    # -- for subclasses ---------------------------------------------------------------------------------------------

    def _may_be_due(self) -> bool:
        """Return whether a snapshot or a replacement may be due in this step.

        If not, :meth:`_train_on` is not called.
        """
        return self._is_due

    @abc.abstractmethod
    async def _train_on(self, local_metric: MetricSource, info: StepInfo) -> None:
        """Publish a snapshot and start replacing this rank's weights, each if it is due in this step.

        Args:
            info: The step's result, which reports a replacement that the step has applied or abandoned.
        """

    @abc.abstractmethod
    async def _attempt(self, replacement: Replacement, deadline: float) -> str:
        """Choose donors, and average their snapshots with :meth:`_read`.

        Returns:
            Reason why the replacement was abandoned. Empty if the average is complete or this rank keeps its weights.

        Raises:
            UnreadableError: The attempt has failed, but another attempt may succeed.
        """

    def _momentum(self) -> float | None:
        """Return the fraction of this rank's weights that a replacement keeps, or None for the ``momentum`` option."""
        return None

    # -- starting and leaving ---------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        super()._prepare()
        self._own.begin()
        self.admits_restarted = not maps_windows(self._services)

    async def _agree(self) -> Agreed:
        agreed = await super()._agree()
        self._seed_random(self._scope(agreed))
        return agreed

    def _scope(self, agreed: Agreed) -> int:
        return wire.scope_of(self._group.ranks, f"{type(self).__name__} {self.name or '(none)'}", agreed.time)

    def _seed_random(self, scope: int) -> None:
        """Create the generator of this rank's random choices, or restore its saved state."""
        incarnation = self._world.incarnation
        self._random = self._world.generator(f"policy {scope}" + (f" restart {incarnation}" if incarnation else ""))
        if self._draws is not None:
            self._random.setstate(self._draws)

    async def _start(self) -> None:
        """Agree with the other members on the options, and open the window through which members publish snapshots."""
        if self.admits_restarted:
            await super()._start()
            return
        agreed, world = await self._agree(), self._world
        window = await open_versioned_window(
            world.services,
            world.agreements,
            self._group,
            self._packing.nbytes,
            scope=self._scope(agreed),
            chunk_nbytes=self._chunk_nbytes,
            timeout_s=self._joint_start.left_s(self._start_timeout_s),
        )
        self._open_window(window)

    def _open(self, membership: Membership, scopes: PolicyScopes) -> None:
        window = StreamedWindow(
            self._services,
            self._group.ranks,
            self._packing.nbytes,
            scope=scopes.policy,
            chunk_nbytes=self._chunk_nbytes,
            is_followed=True,
            is_newcomer=membership.is_joining,
        )
        self._open_window(window)
        if membership.is_joining:
            self._seed_random(scopes.policy)
        self._membership = membership
        membership.open(_WindowFollower(membership, window))
        self._admission = self._new_admission(membership, scopes)

    def _open_window(self, window: VersionedWindow) -> None:
        self._exposure = window
        others = [member for member in self._group.ranks if member != self._world.rank]
        self._reader = DonorReader(
            others, window, self._packing, self._flat, self._counts, chunk_nbytes=self._chunk_nbytes
        )
        self._services.leftover_probes.append(self._leftovers)

    def _whole_state(self) -> dict[str, Any]:
        state = super()._whole_state()
        return {**state, "policy": {**state["policy"], "draws": None}}  # a restarted rank uses its own random generator

    def _finish_loading(self) -> None:
        self._own_metric = None

    def _begin_joined(self) -> None:
        assert self._membership is not None, "a newcomer has a membership"
        self._membership.complete_joining()

    async def _stop(self, error: BaseException | None) -> None:
        """Leave the policy. If there is no ``error``, first wait until no rank is reading this rank's snapshots."""
        assert self._exposure is not None, "the policy was stopped before it started"
        replacement = self._replacement
        if replacement is not None:
            if replacement.complete:
                logger.info("replacement %d: the policy ended before a step applied the average", replacement.round)
            if self._task is not None:
                self._task.cancel()
            self._abandon(replacement, "the policy ended")
        deadline = None
        try:
            if error is None and self._services.engine.failure is None:
                deadline = self._world.time() + self._averaging.drain_timeout_s
                await self._services.engine.until(self._is_quiet, WaitId(WaitKind.OWN_READS), deadline=deadline)
        finally:
            self._task = None  # the task's exception may keep a donor's memory alive
            self._states.clear()
            if not self._leftovers():  # drop the leak check, because it would keep the model and its buffers alive
                self._services.leftover_probes.remove(self._leftovers)
            if self._membership is not None and self._admission is not None:
                self._membership.leave()
                self._admission.close()
            if not self._is_publishing:  # otherwise _publish_copy closes the window after the pending copy
                await self._exposure.close(deadline)

    def _is_quiet(self) -> bool:
        is_reading = self._task is not None and not self._task.done()
        return not is_reading and not self._is_publishing and not self._services.slots.discarding_count

    def _leftovers(self) -> list[str]:
        if not self._reader.accumulators.in_use:
            return []
        return [f"{self._reader.accumulators.in_use} accumulators of policy {self.name or type(self).__name__}"]

    def _own_state(self) -> dict[str, Any]:
        is_started = self._stage != "new" and not self.is_alone
        return {"draws": self._random.getstate() if is_started else self._draws}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        draws = state["draws"]
        # JSON has converted the tuples of the generator's state to lists.
        self._draws = None if draws is None else (draws[0], tuple(draws[1]), draws[2])
        if self._draws is not None:
            random.Random().setstate(self._draws)

    @property
    def _published_count(self) -> int:
        return self._exposure.version - self._exposure.first if self._exposure is not None else 0

    # -- one step ---------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        if self.is_alone:
            return False
        is_asked = self._admission is not None and self._admission.is_asked
        return self._needs_step or is_asked or self._may_be_due()

    async def _step(self, local_metric: MetricSource) -> StepInfo:
        if self.is_alone:
            await self._world.safe_point()
            return NOTHING
        await self._world.progress()
        info = self._act() if self._needs_step else NOTHING
        if self._may_be_due():  # a step with nothing due is faster without the coroutine
            await self._train_on(local_metric, info)
        if self._admission is not None and self._admission.is_asked:
            self._admission.admit(self._whole_state)
        return info

    def _act(self) -> StepInfo:
        """Apply the average if it is complete. Return the step's result, which may report an abandoned replacement."""
        info, self._abandoned_info = self._abandoned_info, NOTHING
        replacement = self._replacement
        if replacement is not None and replacement.complete:
            info = self._apply(replacement)
        self._needs_step = False  # set last, so that the next step tries again if `model_builder` raises
        return info

    def _publish(self, metric: float) -> None:
        """Publish a snapshot with this metric, unless an earlier snapshot still uses the memory."""
        assert self._exposure is not None, "a step outside the policy"
        self._own_metric = metric
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
            self._publish_copy(state, iteration, metric, began_at)
            return
        self._is_publishing = True
        what = WaitId(WaitKind.SNAPSHOT)
        self._services.engine.watch(copy, what, lambda _: self._publish_copy(state, iteration, metric, began_at))

    def _publish_copy(self, state: FlatBuffers, iteration: int, metric: float, began_at: float) -> None:
        """Publish a snapshot whose copy is complete.

        If the snapshot contains NaN, its metric is published as NaN, so that no rank chooses this rank as a donor. This
        rank also uses NaN as its own metric, because a diverged rank should be replaced.
        """
        assert self._exposure is not None, "a step outside the policy"
        self._is_publishing = False
        if self._stage == "closed":
            self._services.spawn_service(self._exposure.close(None), name="closing of this rank's exposed snapshots")
            return
        if not self._own.can_be_sent(state):
            self._unpublished["weights are not finite (the metric is published, as NaN)"] += 1
            self._own_metric = metric = float("nan")
        record = self._exposure.publish(iteration, metric)
        self._note_time("publish", began_at)
        if self._events.has_callback:
            self._events.deliver_now(SnapshotTaken(record.version, iteration, state.by_name()))

    async def _begin_replacement(self, number: int) -> None:
        """Start a background task that chooses donors and reads their snapshots. Return when the task first waits."""
        replacement = self._replacement = Replacement(round=number, began_at=self._world.time())
        self._task = self._services.spawn_service(self._replace(replacement), name=f"replacement {number}")
        await self._services.engine.let_begin()

    def _apply(self, replacement: Replacement) -> StepInfo:
        began_at = self._world.time()
        info = self._own.apply(replacement, self.iteration, self._services, momentum=self._momentum())
        self._reader.release(replacement)
        self._note_time("apply", began_at)
        self._replacement = None
        self._note_applied()
        self._counts["replacements"] += 1
        self._counts["donors"] += len(replacement.donors)
        self._own.announce(replacement, self.iteration, info)
        return info

    def _note_applied(self) -> None:
        """React to an applied average. Called before the user is notified."""

    # -- a replacement, in the background ---------------------------------------------------------------------------

    async def _replace(self, replacement: Replacement) -> None:
        """Choose donors and read their snapshots, until the average is complete or the replacement is abandoned."""
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
            logger.info("replacement %d: abandoned: %s", replacement.round, reason)
            self._abandon(replacement, reason)
        elif self._replacement is replacement:
            replacement.complete = self._needs_step = True
            self._note_time("read", replacement.began_at)

    async def _read(self, replacement: Replacement, choice: Choice, deadline: float) -> str:
        """Average the chosen donors' snapshots. Return the reason why the average cannot be used, or ""."""
        mean = await self._reader.read(replacement, choice, deadline)
        if not mean.is_agreed:
            assert replacement.average is not None, "a mean without an accumulator"
            entry = self._own.unsound_entry(replacement.average)
            return f"the donors differ in infinite values: in {entry!r}"
        return ""

    def _abandon(self, replacement: Replacement, reason: str) -> None:
        """Abandon a replacement. The next step reports the reason to the user."""
        if self._replacement is not replacement:
            return
        self._replacement = None
        if replacement.complete:
            self._reader.release(replacement)
        kind = reason.partition(":")[0]
        self._abandoned[kind] += 1
        self._abandoned_info = StepInfo(round=replacement.round, abandoned=reason, nbytes=replacement.nbytes)
        self._needs_step = True

    def _common_statistics(self) -> dict[str, Any]:
        """Return the fields that the statistics of all one-sided policies have."""
        return {
            "unpublished": dict(self._unpublished),
            "torn_read_count": self._counts["torn"],
            "lost_read_count": self._counts["lost"],
            "abandoned": dict(self._abandoned),
            "received_nbytes": self._counts["received"],
            "timing": dict(self._durations),
            "title": self._journal.title(),
        }

    def _note_time(self, name: str, began_at: float) -> None:
        duration_s = self._world.time() - began_at
        self._own.note_time(name, duration_s)
        self._durations[name] = self._durations.get(name, Durations()).plus(duration_s)


class _WindowFollower:
    """Stops reading snapshots of members that leave or are lost, and starts reading those of admitted members."""

    def __init__(self, membership: Membership, window: StreamedWindow) -> None:
        self._membership = membership
        self._window = window

    def may_admit(self) -> bool:
        """Return True, because a restarted rank can continue from the leader's state after each step."""
        return True

    def on_lost(self, rank: int) -> None:
        """Stop reading snapshots of a rank that is lost or has left."""
        self._window.retire(rank)

    def on_new_leader(self) -> None:
        """Stop reading snapshots of the former leader, and of all other ranks that are not living members."""
        for rank in self._membership.known - self._membership.living:
            self._window.retire(rank)

    def on_reachable(self, rank: int) -> None:
        """Start reading snapshots of a restarted member, and let that member read this rank's snapshots."""
        self._window.admit(rank)

    def on_admitted(self, rank: int) -> None:
        """Do nothing, because :meth:`on_reachable` has already handled the restarted rank."""

    def on_settling(self) -> None:
        """Do nothing, because members of a one-sided policy do not wait for each other."""
