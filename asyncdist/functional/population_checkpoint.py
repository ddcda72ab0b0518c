"""Saves a whole population to files, and goes on from them, on as many ranks or on others.

Each rank writes a file of its own, under another name first. When all of them lie there, the manifest that lists them
is written in the same way: it makes the whole valid in one step. A save that was killed leaves a folder without a
manifest, which no load looks at, and the checkpoints before it as they were.

A folder looks like this::

    checkpoints/
        checkpoint-000003/
            manifest.json       number of ranks, and of each rank's file the size, the CRC-32 and the metric
            rank-00000.pt       what torch.load(..., weights_only=True) opens: a dictionary with "model", "optimizer",
            rank-00001.pt       "optimizer_class", "policy", "extra" and "random"

With ``format="safetensors"`` the weights lie beside it in ``rank-00000.safetensors``. "model" then has only what that
format does not hold, and "tied" says which names share a tensor.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncdist import validation
from asyncdist.collectives.groups import Group
from asyncdist.functional import checkpoint_files, checkpoint_state
from asyncdist.functional.checkpoint_files import ModelFormat
from asyncdist.functional.checkpoint_state import Stateful
from asyncdist.functional.collectives import place
from asyncdist.functional.joint_work import JointWork
from asyncdist.functional.main_process import compute_and_broadcast, gather_from_all_ranks
from asyncdist.runtime.world import World
from asyncdist.tensors.trained_models import TrainedModels

logger = logging.getLogger("asyncdist.population_checkpoint")


@dataclass(frozen=True, slots=True)
class LoadedPopulation:
    """What :func:`load_population` has loaded on this rank.

    Attributes:
        folder: of the checkpoint.
        source: the rank whose file it was.
        is_copy: whether another rank has loaded the same file, and goes on as that rank: this one has drawn no random
            state from it.
        metric: that rank's metric; None if it was not known.
        extra: what was given to :func:`save_population` on that rank.
    """

    folder: Path
    source: int
    is_copy: bool
    metric: float | None
    extra: Any


async def save_population(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Stateful | None = None,
    extra: Any = None,
    metric: float | None = None,
    keep: int | None = None,
    format: ModelFormat = "torch",
    group: Group | None = None,
    world: World | None = None,
) -> Path:
    """Save what each rank needs to go on: model, optimizer, policy, random states and what else is given.

    Collective among the ranks of ``group``. Files are written beside the event loop, so this rank's snapshots go on
    being sent meanwhile; model and optimizer must not change before this returns.

    Args:
        path: the folder for all checkpoints, which all ranks see. It is made if it is not there.
        model, optimizer: of this rank; any module and optimizer of torch.
        policy: this rank's, of the package ``protocols``; or something else with a ``state_dict``.
        extra: what else this rank wants back: tensors, numbers, texts, and lists and dictionaries of them. Numbers of
            numpy come back as Python's.
        metric: by which :func:`load_population` chooses ranks; by default the newest one that the policy was given.
            Larger is better, unless ``policy`` has ``metric_mode="min"``.
        keep: how many checkpoints to keep, this one included; the oldest ones are deleted. None keeps all.
        format: ``"torch"``, or ``"safetensors"``: then the weights of each rank are a file of their own, which
            ``safetensors.torch.load_file`` opens. It needs that package (``pip install 'asyncdist[safetensors]'``).
        group: the ranks of the population; all by default.
        world: the current one by default.

    Returns:
        The folder of this checkpoint, ``path/checkpoint-NNNNNN``.

    Raises:
        TypeError: ``extra``, or the state of model, optimizer or policy, holds something that
            ``torch.load(weights_only=True)`` refuses; a RemoteError on the others.
        OSError: a file cannot be written; a RemoteError on the others.
        ValueError: ``keep`` is not a whole number above 0, or ``format`` is not known.
        ModuleNotFoundError: the package safetensors is missing.

    Where this raises, the checkpoint is not valid, and those before it are untouched.

    **Cancellation**: until this rank's file is whole the others get RemoteError, and the checkpoint is not valid; after
    that they complete it. It is raised when no file is being written.
    """
    save = _Save(path, model, keep, format, group, world)
    await save.begin(functools.partial(checkpoint_state.state_of, model, optimizer, policy, extra, metric))
    return await save.joint.result_or_give_up()


async def async_save_population(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Stateful | None = None,
    extra: Any = None,
    metric: float | None = None,
    keep: int | None = None,
    format: ModelFormat = "torch",
    group: Group | None = None,
    world: World | None = None,
) -> PendingSave:
    """Copy what each rank needs to go on, and save it while training goes on, as ``async_save`` of torch does.

    Collective among the ranks of ``group``. It returns when all of them have copied their state to CPU memory, once for
    model and optimizer, and nothing has been written: training may change them from then on. A thread writes the files.
    At the end the ranks exchange a few bytes in a group of their own. ``await`` what is returned for the folder::

        save = await ad.async_save_population("checkpoints", model, optimizer, policy=policy, keep=3)
        ...  # training goes on
        folder = await save

    A second save of the group waits, before it copies anything, until the first one has ended. So does the end of the
    rank: when ``main`` has returned the files are written first. Where the rank or the job fails the save is given up,
    which a warning says.

    Args: as of :func:`save_population`.

    Raises:
        TypeError, ValueError, OSError: as of :func:`save_population`. A file that cannot be written is logged, and the
            error is raised where the save is awaited.

    **Cancellation**: the others get RemoteError, here or where they await the save, unless it is completed.
    """
    save = _Save(path, model, keep, format, group, world, is_beside=True)
    name = await save.begin(functools.partial(checkpoint_state.state_of, model, optimizer, policy, extra, metric))
    return PendingSave(Path(path) / name, save.joint)


class PendingSave:
    """Represents a save that :func:`async_save_population` has begun; ``await`` it for the folder of the checkpoint.

    It may be awaited several times, or not at all. **Cancellation**: the save goes on.

    Attributes:
        folder: of the checkpoint, which is not valid before the save has ended.
    """

    def __init__(self, folder: Path, joint: JointWork[Path]) -> None:
        self.folder = folder
        self._joint = joint

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._joint.is_over

    def __await__(self) -> Generator[Any, None, Path]:
        return self._joint.result().__await__()

    def __repr__(self) -> str:
        return f"<PendingSave {self.folder}{' done' if self.done() else ''}>"


class _Save:
    """Carries out one save of this rank.

    Args:
        path, model, keep, format, group, world: of the call.
        is_beside: whether training goes on meanwhile: then a copy of the state is written, by a thread of its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        keep: int | None,
        format: ModelFormat,
        group: Group | None,
        world: World | None,
        *,
        is_beside: bool = False,
    ) -> None:
        self._world, self._group = place(world, group)
        self._path = path
        self._model = model
        self._keep = keep
        self._format: ModelFormat = format
        self._is_beside = is_beside
        self._state: dict[str, Any] = {}
        self.joint: JointWork[Path] = JointWork(self._world, self._group, "save_population")

    async def begin(self, take_state: Callable[[], dict[str, Any]]) -> str:
        """Take the state, and begin when all ranks have come. Returns the name of the folder."""

        async def prepare() -> str:
            if self._keep is not None:
                validation.count("keep", self._keep, besides=", or None")
            checkpoint_files.check_format(self._format)
            self._state = take_state()
            if self._is_beside:
                copy = functools.partial(checkpoint_state.copy_of, self._state)
                self._state = await self._world.do_file_work(copy, model=self._model)
            return checkpoint_files.new_folder(Path(self._path)) if self._group.index == 0 else ""

        name: str = await self.joint.begin(prepare, self._work)
        return name

    async def _work(self, own: Group, name: str) -> Path:
        folder, world = Path(self._path) / name, self._world
        try:
            entries = await gather_from_all_ranks(lambda: self._write(folder), group=own, world=world)
            await compute_and_broadcast(lambda: self._finish(folder, entries or []), group=own, world=world)
        except asyncio.CancelledError:
            if self._is_beside:
                logger.warning("rank %d: the save of %s was given up", world.rank, folder)
            raise
        except Exception as error:
            if self._is_beside:
                logger.error("rank %d: %s was not saved: %r", world.rank, folder, error)
            raise
        finally:
            self._state = {}
        return folder

    async def _write(self, folder: Path) -> dict[str, Any]:
        self.joint.check()
        entry = self._state.pop("entry")
        write = functools.partial(checkpoint_files.write_rank, folder, self._group.index, self._state, self._format)
        if self._is_beside:
            written = await self._world.do_file_work(write)
        else:
            with self.joint.held():
                written = await self._world.do_file_work(write, model=self._model)
        self.joint.check()
        return {**written, **entry}

    async def _finish(self, folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
        self.joint.check()
        finish = functools.partial(checkpoint_files.finish, folder, entries, self._keep)
        if self._is_beside:
            await self._world.do_file_work(finish)
        else:
            finish()


async def load_population(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Stateful | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> LoadedPopulation:
    """Go on from the newest whole checkpoint below ``path``, or from the one that ``path`` is.

    Collective among the ranks of ``group``. Everything is read and compared before anything is changed: where one rank
    raises, all do, and no model has been touched. With as many ranks as were saved each one gets its own state, and
    goes on to the bit. With fewer ranks those with the best metrics are chosen, and go on in the order of their ranks.
    With more ranks some get copies, and keep their own random states; a warning says so.

    Args:
        path: what :func:`save_population` was given, or has returned.
        model, optimizer: of the same layout as those that were saved; they are changed in place.
        policy: of the same class; it is loaded before ``async with``.
        group: the ranks of the population; all by default.
        world: the current one by default.

    Raises:
        FileNotFoundError: there is no whole checkpoint; what lies there instead is named. On all members, so each may
            catch it and begin anew.
        ValueError: the checkpoint is of another model (the first difference is named), optimizer, policy or version,
            or a file is torn.
        LocalProtocolError: the policy was entered before.
        RemoteError: on the members other than the one that raised another error than that.

    **Cancellation**: until all have read and compared their files the others get RemoteError, and no model is touched.
    After that all go on with what was loaded before it is raised.
    """
    world, group = place(world, group)
    loading: JointWork[LoadedPopulation] = JointWork(world, group, "load_population")

    async def prepare() -> tuple[str, str]:
        try:
            return _choose(Path(path), group.size) if group.index == 0 else ("", "")
        except FileNotFoundError as error:  # no mistake of this rank: all may catch it, and begin anew
            return "", str(error)

    async def work(own: Group, chosen: tuple[str, str]) -> LoadedPopulation:
        if not chosen[0]:
            raise FileNotFoundError(chosen[1])
        return await _load(world, own, loading, chosen, model, optimizer, policy)

    await loading.begin(prepare, work)
    return await loading.result_or_give_up()


async def _load(
    world: World,
    group: Group,
    loading: JointWork[LoadedPopulation],
    chosen: tuple[str, str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    policy: Stateful | None,
) -> LoadedPopulation:
    """Read this rank's file, compare it, and apply it; every member finishes each of the three before the next."""
    folder, facts = Path(chosen[0]), json.loads(chosen[1])
    source, entry = facts["plan"][group.index], facts["files"][group.index]
    is_copy = source in facts["plan"][: group.index]
    loaded: dict[str, Any] = {}

    async def read() -> None:
        loading.check()
        with loading.held():
            read_rank = functools.partial(checkpoint_files.read_rank, folder, source, entry)
            loaded.update(await world.do_file_work(read_rank))
        checkpoint_state.compare(model, optimizer, loaded)
        if policy is not None and not isinstance(loaded["policy"], Mapping):
            raise ValueError(f"{folder} was saved without a policy")
        loading.check()

    def go_on() -> None:
        loading.check()
        loading.hold()  # from here on this rank counts on the others, and they on it
        if policy is not None:
            policy.load_state_dict(checkpoint_state.policy_state(loaded["policy"], is_copy=is_copy))

    def apply() -> None:
        model.load_state_dict(loaded["model"])
        world.services.shared(TrainedModels).models.add(model)
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])

    await gather_from_all_ranks(read, group=group, world=world)
    await gather_from_all_ranks(go_on, group=group, world=world)  # the policy may be of another class
    await gather_from_all_ranks(apply, group=group, world=world)
    if not is_copy:
        checkpoint_state.set_random_states(loaded["random"])
    return LoadedPopulation(folder, source, is_copy, entry["metric"], loaded["extra"])


def _choose(path: Path, size: int) -> tuple[str, str]:
    """Return the folder, and in JSON whose file each of ``size`` ranks loads, with its entry in the manifest."""
    folder, manifest = checkpoint_files.find_newest(path)
    plan, saved = checkpoint_files.plan(manifest["files"], size), len(manifest["files"])
    if size > saved:
        warnings.warn(f"{folder} holds {saved} ranks: {size - saved} of {size} begin as copies", stacklevel=2)
    return str(folder), json.dumps({"plan": plan, "files": [manifest["files"][source] for source in plan]})
