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
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncdist import validation
from asyncdist.collectives.groups import Group
from asyncdist.functional import checkpoint_files, checkpoint_state
from asyncdist.functional.checkpoint_state import Stateful
from asyncdist.functional.collectives import place
from asyncdist.functional.joint_work import JointWork
from asyncdist.functional.main_process import compute_and_broadcast, gather_from_all_ranks
from asyncdist.runtime.world import World


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
        group: the ranks of the population; all by default.
        world: the current one by default.

    Returns:
        The folder of this checkpoint, ``path/checkpoint-NNNNNN``.

    Raises:
        TypeError: ``extra``, or the state of model, optimizer or policy, holds something that
            ``torch.load(weights_only=True)`` refuses; a RemoteError on the others.
        OSError: a file cannot be written; a RemoteError on the others.
        ValueError: ``keep`` is not a whole number above 0.

    Where this raises, the checkpoint is not valid, and those before it are untouched.

    **Cancellation**: until this rank's file is whole the others get RemoteError, and the checkpoint is not valid; after
    that they complete it. It is raised when no file is being written.
    """
    world, group = place(world, group)
    saving: JointWork[Path] = JointWork(world, group, "save_population")
    state: dict[str, Any] = {}

    async def prepare() -> str:
        if keep is not None:
            validation.count("keep", keep, besides=", or None")
        state.update(checkpoint_state.state_of(model, optimizer, policy, extra))
        state["entry"] = checkpoint_state.metric_entry(metric, state["policy"])
        return checkpoint_files.new_folder(Path(path)) if group.index == 0 else ""

    async def work(own: Group, name: str) -> Path:
        folder = Path(path) / name

        async def write() -> dict[str, Any]:
            saving.check()
            entry = state.pop("entry")
            with saving.held():
                file = checkpoint_files.rank_file(folder, group.index)
                written = await world.compute(checkpoint_files.write_file, file, state)
            saving.check()
            return {**written, **entry}

        entries = await gather_from_all_ranks(write, group=own, world=world)

        def finish() -> None:
            saving.check()
            checkpoint_files.write_manifest(folder, entries or [])
            if keep is not None:
                checkpoint_files.delete_old(folder, keep)

        await compute_and_broadcast(finish, group=own, world=world)
        return folder

    await saving.begin(prepare, work)
    return await saving.result_or_give_up()


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
        FileNotFoundError: there is no whole checkpoint; what lies there instead is named.
        ValueError: the checkpoint is of another model (the first difference is named), optimizer, policy or version,
            or a file is torn.
        LocalProtocolError: the policy was entered before.
        RemoteError: on the members other than the one that raised.

    **Cancellation**: until all have read and compared their files the others get RemoteError, and no model is touched.
    After that all go on with what was loaded before it is raised.
    """
    world, group = place(world, group)
    loading: JointWork[LoadedPopulation] = JointWork(world, group, "load_population")

    async def prepare() -> tuple[str, str]:
        return _choose(Path(path), group.size) if group.index == 0 else ("", "")

    async def work(own: Group, chosen: tuple[str, str]) -> LoadedPopulation:
        folder, facts = Path(chosen[0]), json.loads(chosen[1])
        source, entry = facts["plan"][group.index], facts["files"][group.index]
        is_copy = source in facts["plan"][: group.index]
        loaded: dict[str, Any] = {}

        async def read() -> None:
            loading.check()
            with loading.held():
                file = checkpoint_files.rank_file(folder, source)
                loaded.update(await world.compute(checkpoint_files.read_file, file, entry))
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
            if optimizer is not None:
                optimizer.load_state_dict(loaded["optimizer"])

        await gather_from_all_ranks(read, group=own, world=world)
        await gather_from_all_ranks(go_on, group=own, world=world)  # the policy may be of another class
        await gather_from_all_ranks(apply, group=own, world=world)
        if not is_copy:
            checkpoint_state.set_random_states(loaded["random"])
        return LoadedPopulation(folder, source, is_copy, entry["metric"], loaded["extra"])

    await loading.begin(prepare, work)
    return await loading.result_or_give_up()


def _choose(path: Path, size: int) -> tuple[str, str]:
    """Return the folder, and in JSON whose file each of ``size`` ranks loads, with its entry in the manifest."""
    folder, manifest = checkpoint_files.find_newest(path)
    plan, saved = checkpoint_files.plan(manifest["files"], size), len(manifest["files"])
    if size > saved:
        warnings.warn(f"{folder} holds {saved} ranks: {size - saved} of {size} begin as copies", stacklevel=2)
    return str(folder), json.dumps({"plan": plan, "files": [manifest["files"][source] for source in plan]})
