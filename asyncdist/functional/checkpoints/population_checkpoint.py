"""Saves the training state of all ranks to files, and continues from them on any number of ranks.

Each rank writes a separate file. When all files exist, the manifest that lists them is written, which makes the
checkpoint valid atomically. If a save is killed, it leaves a folder without a manifest, which loading ignores.

A folder looks like this::

    checkpoints/
        checkpoint-000003/
            manifest.json       number of ranks; size, CRC-32 and metric for each rank's file
            rank-00000.pt       a file for torch.load(..., weights_only=True): a dictionary with "model",
            rank-00001.pt       "optimizer", "optimizer_class", "optimizer_names",
                                "policy", "extra" and "random"
            restarted-rank-00002/   the state of a restarted rank, see
                                    :mod:`asyncdist.functional.checkpoints.restarted_ranks`

With ``format="safetensors"``, the weights are in ``rank-00000.safetensors``. "model" then has only the entries that
this format does not support, and "tied" maps names to tensors that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from asyncdist import validation
from asyncdist.collectives.error_exchange import LocalResult, attempt
from asyncdist.collectives.groups import Group
from asyncdist.errors import RankLostError
from asyncdist.functional.checkpoints import checkpoint_files, checkpoint_state, restarted_ranks
from asyncdist.functional.checkpoints.checkpoint_files import ModelFormat
from asyncdist.functional.checkpoints.checkpoint_state import HasState
from asyncdist.functional.checkpoints.manifests import Moment
from asyncdist.functional.collectives import resolve_group
from asyncdist.functional.joint_work import SURVIVORS_TIMEOUT_S, JointWork
from asyncdist.functional.main_process import compute_and_broadcast, gather_from_all_ranks
from asyncdist.messaging.engine import yield_to_loop
from asyncdist.runtime.world import World
from asyncdist.waits import WaitId, WaitKind

T = TypeVar("T")

logger = logging.getLogger("asyncdist.population_checkpoint")

#: How a rank saves: as a member of its group; or, after a restart, alone because all ranks were restarted and it is the
#: first of them, by adding itself to a checkpoint of others, or not at all.
_Role: TypeAlias = Literal["member", "alone", "adds itself", "nothing"]


async def save_population(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: HasState | None = None,
    extra: Any = None,
    metric: float | None = None,
    keep: int | None = None,
    format: ModelFormat = "torch",
    group: Group | None = None,
    world: World | None = None,
) -> Path:
    """Save the state that each rank needs to continue: model, optimizer, policy, random states and ``extra``.

    All ranks of ``group`` must call this function. A thread writes the files, while this rank continues to send weights
    to other ranks. Model and optimizer must not change before the call returns. If the call raises an error on a
    rank that was never restarted, the checkpoint is not valid.

    Args:
        path: Folder for all checkpoints, accessible to all ranks. It is created if it does not exist.
        policy: Policy, ``Averaging`` of plain PyTorch, Accelerate or Lightning, or another object with a
            ``state_dict``.
        extra: Further state: tensors, numbers, strings, and lists and dictionaries of these. NumPy numbers become
            Python numbers.
        metric: Metric by which :func:`load_population` chooses ranks, by default the policy's newest metric. Larger is
            better, unless ``policy`` has ``metric_mode="min"``.
        keep: Number of newest checkpoints to keep, including this one, or None for all. A simulation or a replay
            deletes only checkpoints that simulations in the same process have written.
        format: ``"torch"``, or ``"safetensors"`` for a separate weights file per rank, which
            ``safetensors.torch.load_file`` opens. Requires ``pip install 'asyncdist[safetensors]'``.
        group: Ranks to save, by default all ranks. By default, no rank waits for a restarted rank: its state is added
            to the others' checkpoint with the same ``policy.iteration``, sooner or later. In the following cases, its
            state is not saved, and a warning is logged: there is no policy; the replica has several ranks; the others
            have a later checkpoint but none of this iteration; or four earlier states of the rank are still waiting for
            a checkpoint.
        world: World of the call, by default the current one.

    Returns:
        Folder of this checkpoint, ``path/checkpoint-NNNNNN``. On a restarted rank, ``path`` itself if there is no such
        checkpoint yet. Also ``path`` itself, after a warning, if a rank is lost while files are written, in a job that
        survives losses.

    Raises:
        TypeError: ``extra``, or the state of model, optimizer or policy, has a value that
            ``torch.load(weights_only=True)`` refuses. The other ranks get RemoteError.
        OSError: A file cannot be written. The other ranks get RemoteError.
        RankLostError: A rank was lost, in a job that does not survive losses, or ``group`` was passed.
        ValueError, ModuleNotFoundError: ``keep`` or ``format`` is invalid, or the package safetensors is missing.

    **Cancellation**: before this rank's file is complete, the others get RemoteError, and the checkpoint is not valid.
    After that, or if this rank was restarted, the others complete the checkpoint. The cancellation is raised once this
    rank is no longer writing a file.
    """
    policy = checkpoint_state.without_wrapper(policy)
    take_state = functools.partial(checkpoint_state.state_of, model, optimizer, policy, extra, metric)
    save = _Save(path, model, keep, format, group, world, policy)
    if await save.start(take_state) is None:
        return Path(path)
    return await save.joint.result_or_abandon()


async def async_save_population(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: HasState | None = None,
    extra: Any = None,
    metric: float | None = None,
    keep: int | None = None,
    format: ModelFormat = "torch",
    group: Group | None = None,
    world: World | None = None,
) -> PendingSave:
    """Copy the state of each rank, and save it while training continues, like torch's ``async_save``.

    All ranks of ``group`` must call this function. It returns when all of them have copied model and optimizer to CPU
    memory. Training may then continue, while a thread writes the files. Await the result to get the folder::

        save = await ad.async_save_population("checkpoints", model, optimizer, policy=policy, keep=3)
        ...  # training continues
        folder = await save

    A second save by the group begins when the first has ended. A rank whose ``main`` returns completes the save before
    it ends. If the rank or the job fails, the save is abandoned with a warning.

    The arguments are the same as for :func:`save_population`.

    Raises:
        TypeError, ValueError, OSError: The errors of :func:`save_population`. An error in writing a file is logged, and
            raised when the save is awaited.

    **Cancellation**: unless the save is completed, the others get RemoteError, from this call or when they await the
    save.
    """
    policy = checkpoint_state.without_wrapper(policy)
    take_state = functools.partial(checkpoint_state.state_of, model, optimizer, policy, extra, metric)
    save = _Save(path, model, keep, format, group, world, policy, in_thread=True)
    name = await save.start(take_state)
    return PendingSave(Path(path) / (name or ""), None if name is None else save.joint)


class PendingSave:
    """A save in progress, returned by :func:`async_save_population`. Await it to get the checkpoint's folder.

    In blocking code, call :meth:`wait` instead. The object may be awaited several times, or never. Until the save has
    ended, ``folder`` is incomplete, or, on a restarted rank, the folder of all checkpoints.

    **Cancellation**: the save continues.
    """

    def __init__(self, folder: Path, joint: JointWork[Path] | None) -> None:
        self.folder = folder
        self._joint = joint

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self._joint is None or self._joint.is_over

    def __await__(self) -> Generator[Any, None, Path]:
        return self.wait().__await__()

    async def wait(self) -> Path:
        """Wait until the save has ended, and return the checkpoint's folder, or raise the save's error."""
        if self._joint is not None:
            self.folder = await self._joint.result()
        return self.folder

    def __repr__(self) -> str:
        return f"<PendingSave {self.folder}{' done' if self.done() else ''}>"


class _Save:
    """Saves this rank's state once. If ``in_thread``, a thread writes a copy of the state while training continues."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        keep: int | None,
        format: ModelFormat,
        group: Group | None,
        world: World | None,
        policy: HasState | None,
        *,
        in_thread: bool = False,
    ) -> None:
        self._world, self._group = resolve_group(world, group)
        self._is_default_group = group is None
        self._policy: Any = policy
        self._moment: Moment | None = None
        self._role: _Role = "member"
        self._path = path
        self._model = model
        self._keep = keep
        self._format: ModelFormat = format
        self._in_thread = in_thread
        self._arrival = LocalResult()
        self._state: dict[str, Any] = {}
        self._lock = contextlib.ExitStack()
        self._is_writing = False
        self.joint: JointWork[Path] = JointWork(self._world, self._group, "save_population")

    async def _raise_error_of_arrival(self) -> None:
        if self._arrival.error is not None:
            raise self._arrival.error

    async def _settle_and_choose_role(self) -> None:
        """Let the policy receive the data in transit, so that its state can be saved, and choose how this rank saves.

        If it saves nothing, log the reason as a warning.
        """
        settle = getattr(self._policy, "settle", None)
        if settle is not None:
            await settle()
        if not self._is_default_group:
            return
        self._moment = restarted_ranks.moment_of(self._world, self._policy, Path(self._path))
        if self._world.incarnation:
            replica_size = checkpoint_state.replica_size_of(self._policy)
            role_of = functools.partial(self._role_of_restarted, replica_size)
            self._role, reason = await self._world.do_file_work(role_of)
            text = "rank %d was restarted, and its state is not saved to %s, because %s; pass group= to save it"
            if reason:
                logger.warning(text, self._world.rank, os.fspath(self._path), reason)

    def _role_of_restarted(self, replica_size: int) -> tuple[_Role, str]:
        """Return the role of this restarted rank, and the reason if it saves nothing. May block on disk I/O."""
        place, moment = Path(self._path), self._moment
        checkpoint, is_late = (None, False) if moment is None else restarted_ranks.find(place, moment)
        if replica_size != 1:
            return "nothing", "its replica has several ranks"
        if not is_late and self._is_first_and_all_were_restarted():
            return "alone", ""
        if moment is None:
            return "nothing", "without a policy, it is not known to which checkpoint of the other ranks it belongs"
        if is_late and checkpoint is None:
            text = "the other ranks have saved later, and have no checkpoint"
            return "nothing", f"{text} of policy.iteration {moment.iteration} with the same completed rounds"
        count = restarted_ranks.waiting_count(place, self._world.rank, moment)
        if not is_late and count >= restarted_ranks.WAITING_COUNT_MAX:
            return "nothing", f"{count} of its earlier states still wait for checkpoints of the other ranks"
        return "adds itself", ""

    def _is_first_and_all_were_restarted(self) -> bool:
        """Return whether this rank must save, because each rank that could have saved was lost and restarted.

        This rank is then the first of the living ranks. A rank that was never lost excludes this even if it is not
        among them: it may have saved before it left, or may not be connected to this rank yet.
        """
        services = self._world.services
        others = [rank for rank in range(self._world.size) if rank != services.rank]
        has_left = any(not services.restarted.get(rank) for rank in services.left_world())
        if has_left or any(map(services.is_unmet, others)):
            return False
        living = [rank for rank in others if rank not in services.gone]
        return all(rank > services.rank and services.restarted.get(rank) for rank in living)

    async def start(self, take_state: Callable[[], dict[str, Any]]) -> str | None:
        """Take this rank's state, begin the save when all ranks have joined, and return the folder's name.

        Return None if this rank saves nothing. By default, only the ranks that were never lost save. A rank that has
        not yet been notified of a loss begins in the group of all ranks, gets RankLostError, and then joins the
        remaining ranks.
        """
        world = self._world
        self._arrival = await attempt(self._settle_and_choose_role)
        error = self._arrival.error
        if error is not None and self._is_default_group and world.incarnation:  # this rank saves alone
            raise error
        if self._role == "nothing":
            return None
        if self._role != "member" or (self._is_default_group and world.peers.attendance.loss_count):
            if error is not None:  # it is raised without waiting for the other survivors
                if not isinstance(error, GeneratorExit):
                    world.services.spawn_service(self._report_error_to_survivors(), name="save_population")
                    # This rank's later starts must follow the start of the survivors' group.
                    await yield_to_loop()
                raise error
            await self._move_to_survivors()
        while True:
            try:
                return await self._begin_in_group(take_state)
            except RankLostError:
                await self._free_survivors()
                if error is not None or not self._survives_loss():
                    raise
                await self._move_to_survivors()
            except BaseException:
                await self._free_survivors()
                raise

    async def _move_to_survivors(self) -> None:
        """Use the group of the ranks that were never lost, or of this rank if it was restarted.

        The save still waits for earlier saves of the group of all ranks.
        """
        everyone = self._world.group
        groups = self._world.peers.groups
        if self._role != "member":
            self._group = await groups.new_group([self._world.rank], SURVIVORS_TIMEOUT_S)
        else:
            self._group = await groups.surviving_group(everyone, SURVIVORS_TIMEOUT_S)
        self.joint = JointWork(self._world, self._group, "save_population")
        # A later save in a new group of survivors must wait for this save.
        self._group.lease.joint_work, everyone.lease.joint_work = everyone.lease.joint_work, self.joint

    async def _report_error_to_survivors(self) -> None:
        """Notify the other never-lost ranks, if they save, of the error that prevents this rank from saving."""
        fail = self._raise_error_of_arrival
        try:
            await self._move_to_survivors()
            await attempt(lambda: self.joint.begin(fail, self._work, arrive=fail))
            what = WaitId(WaitKind.EARLIER_WORK, name="save_population")
            await self._world.services.engine.until(lambda: self.joint.is_over, what)
        finally:
            await self._free_survivors()

    async def _free_survivors(self) -> None:
        if self._is_default_group and self._group is not self._world.group:
            await self._group.free()

    async def _begin_in_group(self, take_state: Callable[[], dict[str, Any]]) -> str:
        # The state of some policies may change between two steps, but not while the ranks copy their states.
        is_freezable = all(hasattr(self._policy, name) for name in ("freeze_state", "unfreeze_state"))

        async def prepare() -> str:
            if self._keep is not None:
                validation.count("keep", self._keep, besides=" or None")
            checkpoint_files.check_format(self._format)
            if is_freezable:
                await self._policy.freeze_state()
                self.joint.check()
            self._state = take_state()
            if self._in_thread:
                copy = functools.partial(checkpoint_state.copy_of, self._state)
                self._state = await self._world.do_file_work(copy, model=self._model)
                self.joint.check()
            if self._group.index or self._role == "adds itself":
                return ""
            folder = checkpoint_files.new_folder(Path(self._path), is_simulated=self._world.is_simulated)
            self._lock.enter_context(checkpoint_files.locked(folder))
            return folder.name

        try:
            name: str = await self.joint.begin(prepare, self._work, arrive=self._raise_error_of_arrival)
        except BaseException:
            if not self._is_writing:  # If only the caller is cancelled, the save may still begin.
                self._lock.close()
            raise
        finally:
            if is_freezable:
                self._policy.unfreeze_state()
        return name

    async def _work(self, own: Group, name: str) -> Path:
        folder, world = Path(self._path) / name, self._world
        self._is_writing = True
        try:
            if self._role == "adds itself":
                return await self._add_itself(folder)
            entries = await gather_from_all_ranks(lambda: self._write(folder), group=own, world=world)
            finish = functools.partial(self._finish, folder, entries or [])
            await compute_and_broadcast(lambda: self._do(finish), group=own, world=world)
        except asyncio.CancelledError:
            if self._in_thread:
                logger.warning("rank %d: the save of %s was abandoned", world.rank, folder)
            raise
        except Exception as error:
            if isinstance(error, RankLostError) and self._survives_loss():
                self._warn_of_loss(error, folder)
                return Path(self._path)
            if self._in_thread:
                logger.error("rank %d: %s was not saved: %r", world.rank, folder, error)
            raise
        finally:
            self._state = {}
            self._lock.close()
            await self._free_survivors()
        return folder

    def _survives_loss(self) -> bool:
        """Return whether this rank continues after a loss during the save. Others may have completed the save.

        The save is not repeated, because ranks that have completed it would not take part.
        """
        return self._is_default_group and self._world.services.survives_loss

    def _warn_of_loss(self, error: RankLostError, folder: Path) -> None:
        world = self._world
        if world.rank == next(rank for rank in self._group.ranks if rank not in world.services.gone):
            text = "%s may be incomplete, and is then ignored, because rank %s was lost during the save"
            logger.warning(text, folder, error.rank)

    async def _write(self, folder: Path) -> dict[str, Any]:
        entry = {**self._state.pop("entry"), "rank": self._world.rank}
        write = functools.partial(checkpoint_files.write_rank, folder, self._group.index, self._state, self._format)
        files = await self._do(write)
        self.joint.check()
        return {**files, **entry}

    async def _add_itself(self, place: Path) -> Path:
        assert self._moment is not None, "it was known before the save began"
        entry = {**self._state.pop("entry"), "rank": self._world.rank}
        write = functools.partial(checkpoint_files.write_rank, index=0, state=self._state, format=self._format)
        checkpoint = await self._do(functools.partial(restarted_ranks.save, place, self._moment, entry, write))
        self.joint.check()
        return checkpoint or place

    def _finish(self, folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
        checkpoint_files.finish(folder, entries, self._keep, self._moment)
        if self._moment is not None:
            deletes_others = self._keep is not None and not checkpoint_files.is_simulated(folder)
            restarted_ranks.collect_states(folder, self._moment, deletes_others=deletes_others)

    async def _do(self, work: Callable[[], T]) -> T:
        """Call a function that reads the state and writes files, unless the caller was cancelled.

        A later cancellation waits for the function, so that a checkpoint is complete on all ranks or on none.
        """
        self.joint.check()
        if self._in_thread:
            return await self._world.do_file_work(work)
        with self.joint.delayed_cancellation():
            return await self._world.do_file_work(work, model=self._model)
