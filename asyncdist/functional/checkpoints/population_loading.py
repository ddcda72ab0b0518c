"""Loads the training state of all ranks from a checkpoint, on any number of ranks.

:mod:`asyncdist.functional.checkpoints.population_checkpoint` describes a checkpoint's folder.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncdist.collectives.groups import Group
from asyncdist.errors import RankLostError
from asyncdist.functional.checkpoints import checkpoint_files, checkpoint_state, manifests
from asyncdist.functional.checkpoints.checkpoint_state import Stateful
from asyncdist.functional.collectives import resolve_group
from asyncdist.functional.joint_work import SURVIVORS_TIMEOUT_S, JointWork
from asyncdist.functional.main_process import gather_from_all_ranks
from asyncdist.functional.seeding import RestoredNumbers, set_random_states
from asyncdist.runtime.world import World
from asyncdist.tensors.compiled_names import state_for
from asyncdist.tensors.model_cache import TrainedModels
from asyncdist.tensors.optimizers.loading import load_exactly
from asyncdist.tensors.optimizers.weights import AveragedStates, OptimizerWeights

logger = logging.getLogger("asyncdist.population_checkpoint")


@dataclass(frozen=True, slots=True)
class LoadedPopulation:
    """Result of :func:`load_population` on this rank.

    Attributes:
        source: Saved rank whose file was loaded.
        is_copy: Whether another rank continues as ``source``. If so, this rank has kept its own random states.
        metric: Metric of the saved rank, or None.
        extra: Value that the saved rank passed to :func:`save_population` as ``extra``. If that rank had been
            restarted, this is the value of the first rank that was never restarted: a restarted program may count its
            epochs from 0.
    """

    folder: Path
    source: int
    is_copy: bool
    metric: float | None
    extra: Any


async def load_population(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Stateful | None = None,
    group: Group | None = None,
    world: World | None = None,
) -> LoadedPopulation:
    """Load the newest complete checkpoint in ``path``, or the checkpoint ``path`` itself.

    All ranks of ``group`` must call this function. Everything is read and compared before anything is changed. If one
    rank raises an error, all do, and no model has changed. But if a rank is lost, in a job that survives losses, each
    rank loads alone. With as many ranks as were saved, each gets its own state and, if no rank had been restarted,
    continues bitwise identically. With fewer ranks, the saved ranks (or whole replicas of several ranks) with the best
    metrics are chosen, and assigned in rank order. With more ranks, some get copies and keep their own random states,
    and a warning is logged.

    Without ``group``, a restarted rank (``world.incarnation`` above 0) raises FileNotFoundError immediately, because
    the others are already training. The policy that it then enters gives it the state of another rank.

    Args:
        path: Path passed to :func:`save_population`, or returned by it.
        model, optimizer: Model and optimizer with the same layout as the saved model and optimizer, changed in place.
        policy: Policy of the same class, not yet entered with ``async with``.
        group: Ranks that load, by default all.
        world: World of the call, by default the current one.

    Raises:
        FileNotFoundError: There is no complete checkpoint. All members raise this error, so each may catch it and start
            from the beginning. Also raised on a restarted rank without ``group``.
        ValueError: The checkpoint has a different model (the error names the first difference), optimizer, policy or
            version, or a damaged file.
        LocalProtocolError: The policy was already entered.
        RemoteError: Another member raised one of the other errors.
        RankLostError: A member of ``group`` was lost. Without ``group``, a job that survives losses loads without it.

    **Cancellation**: before all ranks have read and compared their files, the others get RemoteError, and no model
    changes. After that, all ranks apply the loaded state, and then the cancellation is raised.
    """
    is_default_group, policy = group is None, checkpoint_state.without_wrapper(policy)
    world, members = resolve_group(world, group)
    if is_default_group and world.incarnation:
        raise FileNotFoundError(
            f"rank {world.rank} was restarted, so it loads no checkpoint from {os.fspath(path)}: the other ranks do "
            "not load one now. Enter a policy to get another rank's state, or pass a group of ranks that load together"
        )
    survives = is_default_group and world.services.survives_loss
    loading: JointWork[LoadedPopulation]

    async def work(own: Group, chosen: Any) -> LoadedPopulation:
        if isinstance(chosen, str):
            raise FileNotFoundError(chosen)
        return await _load(world, own, loading, chosen, model, optimizer, policy, survives=survives)

    is_incomplete = survives and world.peers.attendance.loss_count > 0
    while True:
        async with contextlib.AsyncExitStack() as stack:
            if is_incomplete:
                members = await world.peers.groups.surviving_group(world.group, SURVIVORS_TIMEOUT_S)
                stack.push_async_callback(members.free)
            loading = JointWork(world, members, "load_population")
            try:
                await loading.begin(functools.partial(_choose, Path(path), members), work)
            except RankLostError:  # A rank was lost before all have begun. The others load without it.
                if not survives:
                    raise
                is_incomplete = True
                continue
            return await loading.result_or_abandon()


async def _choose(path: Path, members: Group) -> dict[str, Any] | str:
    """Return the newest checkpoint, and the saved rank and its entry for each loading rank.

    If there is no checkpoint, return the error's text. Only the first member's result is used.
    """
    if members.index:
        return ""
    try:
        folder, manifest = manifests.find_newest(path)
    except FileNotFoundError as error:  # Every rank raises this error, so that all may start anew.
        return str(error)
    files, size = manifest["files"], members.size
    if size > len(files):
        text = "%s has the states of %d ranks, so %d of the %d ranks begin as copies of others"
        logger.warning(text, folder, len(files), size - len(files), size)
    plan = manifests.plan(files, size)
    first = next(entry for entry in files if not entry.get("was_restarted"))
    return {"folder": str(folder), "plan": plan, "files": [files[source] for source in plan], "first": first}


async def _load(
    world: World,
    group: Group,
    loading: JointWork[LoadedPopulation],
    chosen: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    policy: Stateful | None,
    *,
    survives: bool,
) -> LoadedPopulation:
    """Read this rank's file, check that it fits, and apply it.

    All members complete a step before the next one begins. If ``survives`` and a member is lost, the others do the
    remaining steps without waiting for each other, because some of them may already have finished.
    """
    folder, plan, files, first = Path(chosen["folder"]), chosen["plan"], chosen["files"], chosen["first"]
    source, entry = plan[group.index], files[group.index]
    is_copy = source in plan[: group.index]
    sources = dict(zip(group.ranks, map(manifests.saved_rank, files, plan), strict=True))
    loaded: dict[str, Any] = {}

    async def read() -> None:
        loading.check()
        with loading.delayed_cancellation():
            read_rank = functools.partial(checkpoint_files.read_rank, folder, entry)
            loaded.update(await world.do_file_work(read_rank))
            if entry.get("was_restarted"):
                read_extra = functools.partial(checkpoint_files.read_extra, folder, first)
                loaded["extra"] = await world.do_file_work(read_extra)
                text = "rank %d had been restarted when it was saved to %s: load_population returns rank %d's extra"
                logger.warning(text, sources[world.rank], folder, first.get("rank", 0))
        checkpoint_state.compare(model, optimizer, loaded)
        if optimizer is not None and group.index == 0 and loaded.get("optimizer_names") is None:
            logger.warning(
                "%s was saved by an earlier version, without the names of the optimizer's parameters: list them in the "
                "same order as in the program that saved it",
                folder,
            )
        if policy is not None and not isinstance(loaded["policy"], Mapping):
            raise ValueError(
                f"{folder} must have a policy's state, but it was saved without a policy; pass policy=None"
            )
        loading.check()

    def load_policy() -> None:
        loading.check()
        loading.delay_cancellation()  # From now on, all ranks must complete the work.
        if policy is not None:
            policy.load_state_dict(checkpoint_state.policy_state(loaded["policy"], sources, is_copy=is_copy))

    def apply() -> None:
        copies: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if optimizer is not None:
            state = checkpoint_state.arranged_optimizer(model, optimizer, loaded)
            load_exactly(optimizer, checkpoint_state.moved_optimizer(optimizer, state))
            # Weights that the optimizer keeps outside its state_dict would undo the loaded ones in its next step.
            copies = OptimizerWeights(model, optimizer, AveragedStates(model, None)).following(has_new_state=True)
        with copies:
            model.load_state_dict(checkpoint_state.moved_model(model.state_dict(), state_for(model, loaded["model"])))
        world.services.shared(TrainedModels).models.add(model)

    for step in (read, load_policy, apply):
        await _on_all_ranks(step, group, world, survives=survives)  # raises on all ranks if it raises on one
    if not is_copy:
        set_random_states(loaded["random"])
        world.services.shared(RestoredNumbers).note()
    return LoadedPopulation(folder, sources[world.rank], is_copy, entry["metric"], loaded["extra"])


async def _on_all_ranks(
    step: Callable[[], Awaitable[None] | None], group: Group, world: World, *, survives: bool
) -> None:
    """Do a step on all ranks. If ``survives`` and a member is lost, this rank does the step alone."""
    is_done = False

    async def do() -> None:
        nonlocal is_done
        result = step()
        if result is not None:
            await result
        is_done = True

    try:
        await gather_from_all_ranks(do, group=group, world=world)
    except RankLostError:
        if not survives:
            raise
        if not is_done:
            await do()
