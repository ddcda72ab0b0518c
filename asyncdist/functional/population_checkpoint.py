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

import io
import json
import logging
import math
import os
import random
import re
import shutil
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from asyncdist import validation
from asyncdist._version import __version__
from asyncdist.collectives.groups import Group
from asyncdist.functional.main_process import compute_and_broadcast, gather_from_all_ranks
from asyncdist.runtime.world import World, current_world

logger = logging.getLogger("asyncdist.population_checkpoint")

_FORMAT: Final = "population checkpoint of asyncdist"
_VERSION: Final = 1
_MANIFEST: Final = "manifest.json"
_PREFIX: Final = "checkpoint-"
_PIECE_NBYTES: Final = 1 << 22


class Stateful(Protocol):
    """What has a state to be saved: a policy, a scheduler, a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from it."""


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
    """
    world = world or current_world()
    group = group or world.group
    place = Path(path)

    def begin() -> str:
        if keep is not None:
            validation.count("keep", keep, besides=", or None")
        place.mkdir(parents=True, exist_ok=True)
        folder = place / f"{_PREFIX}{max(_numbers(place), default=0) + 1:06}"
        folder.mkdir()
        return folder.name

    folder = place / await compute_and_broadcast(begin, group=group, world=world)
    index = group.ranks.index(world.rank)

    async def write() -> dict[str, Any]:
        state = _state_of(model, optimizer, policy, extra)
        entry = await world.compute(_write_file, folder / f"rank-{index:05}.pt", state)
        return {**entry, **_metric_entry(metric, state["policy"])}

    entries = await gather_from_all_ranks(write, group=group, world=world)

    def finish() -> None:
        manifest = {"format": _FORMAT, "version": _VERSION, "asyncdist": __version__, "files": entries}
        _write_beside(folder / _MANIFEST, json.dumps(manifest, indent=1).encode())
        if keep is not None:
            _delete_old(place, folder, keep)

    await compute_and_broadcast(finish, group=group, world=world)
    return folder


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
    """
    world = world or current_world()
    group = group or world.group
    index, size = group.ranks.index(world.rank), group.size

    def choose() -> tuple[str, str]:
        folder, manifest = _newest(Path(path))
        plan, saved = _plan(manifest["files"], size), len(manifest["files"])
        if size > saved:
            warnings.warn(f"{folder} holds {saved} ranks: {size - saved} of {size} begin as copies", stacklevel=2)
        return str(folder), json.dumps({"plan": plan, "files": [manifest["files"][source] for source in plan]})

    chosen, told = await compute_and_broadcast(choose, group=group, world=world)
    folder, facts = Path(chosen), json.loads(told)
    source, entry = facts["plan"][index], facts["files"][index]
    is_copy = source in facts["plan"][:index]
    loaded: dict[str, Any] = {}

    async def read() -> None:
        loaded.update(await world.compute(_read_file, folder / f"rank-{source:05}.pt", entry))
        _compare(model, optimizer, loaded)
        if policy is not None and not isinstance(loaded["policy"], Mapping):
            raise ValueError(f"{folder} was saved without a policy")

    await gather_from_all_ranks(read, group=group, world=world)

    def go_on() -> None:
        if policy is not None:
            policy.load_state_dict(_policy_state(loaded["policy"], is_copy=is_copy))

    await gather_from_all_ranks(go_on, group=group, world=world)  # it may be of another class

    def apply() -> None:
        model.load_state_dict(loaded["model"])
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])

    await gather_from_all_ranks(apply, group=group, world=world)
    if not is_copy:
        _set_random_states(loaded["random"])
    return LoadedPopulation(folder, source, is_copy, entry["metric"], loaded["extra"])


# -- one rank's state -------------------------------------------------------------------------------------------------


def _state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, policy: Stateful | None, extra: Any
) -> dict[str, Any]:
    state = {
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else _map_leaves(_plain_number, optimizer.state_dict()),
        "optimizer_class": None if optimizer is None else type(optimizer).__qualname__,
        "policy": None if policy is None else _map_leaves(_plain_number, policy.state_dict()),
        "extra": _map_leaves(_plain_number, extra),
        "random": _random_states(),
    }
    for name, part in state.items():
        _check_loadable(name, part)
    return state


def _map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return plain dictionaries, lists and tuples with all that they hold, keys too, changed."""
    if type(value) in (dict, OrderedDict):
        return type(value)((change(key), _map_leaves(change, each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(change, each) for each in value)
    return change(value)


def _plain_number(value: Any) -> Any:
    """Return a scalar of numpy as Python's: schedules compute learning rates with numpy, and no load takes them."""
    return value.item() if isinstance(value, np.generic) else value


def _check_loadable(name: str, part: Any) -> None:
    """Raise TypeError for what a save would write and no load would take: afterwards only the file is left."""

    def without_contents(value: Any) -> Any:
        return torch.empty(0, device="cpu") if type(value) is torch.Tensor and not value.__dict__ else value

    buffer = io.BytesIO()
    try:
        torch.save(_map_leaves(without_contents, part), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = found[1] if found else lines[0]
        raise TypeError(
            f"{name} holds what torch.load(weights_only=True) refuses; allowed: tensors, numbers, texts, and lists and "
            f"dictionaries of them ({reason:.200})"
        ) from None


def _metric_entry(metric: float | None, policy: Any) -> dict[str, Any]:
    state = policy if isinstance(policy, Mapping) else {}
    value = state.get("metric") if metric is None else float(metric)
    return {"metric": value, "metric_mode": state.get("metric_mode") or "max"}


def _policy_state(state: dict[str, Any], *, is_copy: bool) -> dict[str, Any]:
    """Return what a policy loads: a copy without the random state, or it would draw for ever what its original does."""
    return {**state, "draws": None} if is_copy and "draws" in state else state


def _random_states() -> dict[str, Any]:
    numbers: Any = np.random.get_state()
    name, words, position, has_gauss, gauss = numbers
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(words.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    name, words, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _compare(model: nn.Module, optimizer: torch.optim.Optimizer | None, loaded: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first difference between what is here and what was saved."""
    here, saved = model.state_dict(), loaded["model"]
    for name, value in here.items():
        if name not in saved:
            raise ValueError(f"the checkpoint is of another model: {name!r} exists here and not there")
        other = saved[name]
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            for what in ("shape", "dtype"):
                mine, theirs = getattr(value, what), getattr(other, what)
                if mine != theirs:
                    mine, theirs = (tuple(mine), tuple(theirs)) if what == "shape" else (mine, theirs)
                    raise ValueError(
                        f"the checkpoint is of another model: {name!r} has {what} {mine} here and {theirs} there"
                    )
    for name in saved:
        if name not in here:
            raise ValueError(f"the checkpoint is of another model: {name!r} exists there and not here")
    if optimizer is None:
        return
    if loaded["optimizer"] is None:
        raise ValueError("the checkpoint was saved without an optimizer")
    kind, other = type(optimizer).__qualname__, loaded.get("optimizer_class")
    if other not in (kind, None):  # files of the first days do not name it
        raise ValueError(f"the checkpoint is of another optimizer: {kind} here and {other} there")
    counts, others = (
        [len(group["params"]) for group in state["param_groups"]]
        for state in (optimizer.state_dict(), loaded["optimizer"])
    )
    if counts != others:
        raise ValueError(
            f"the checkpoint is of another optimizer: its parameter groups have {others} parameters, these {counts}"
        )


# -- files ------------------------------------------------------------------------------------------------------------


def _write_file(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    beside = path.with_name(f"{path.name}.part")
    with beside.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    entry = {"nbytes": beside.stat().st_size, "crc32": _crc_of(beside)}
    beside.rename(path)
    return entry


def _read_file(path: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    nbytes = path.stat().st_size
    if nbytes != entry["nbytes"] or _crc_of(path) != entry["crc32"]:
        raise ValueError(f"{path} is torn: {nbytes} bytes, where {entry['nbytes']} were saved, or another content")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_NBYTES):
            crc = zlib.crc32(piece, crc)
    return crc


def _write_beside(path: Path, content: bytes) -> None:
    beside = path.with_name(f"{path.name}.part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _numbers(place: Path) -> list[int]:
    """Return the numbers of all checkpoints below ``place``, whole or not."""
    ends = [entry.name.removeprefix(_PREFIX) for entry in place.glob(f"{_PREFIX}*") if entry.is_dir()]
    return sorted(int(end) for end in ends if end.isdigit())


def _delete_old(place: Path, newest: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` whole checkpoints, and unfinished ones before this one."""
    older = [place / f"{_PREFIX}{number:06}" for number in _numbers(place)]
    older = [folder for folder in older if folder.name < newest.name]
    whole = [folder for folder in older if (folder / _MANIFEST).is_file()]
    for folder in older:
        if folder not in whole[len(whole) - (keep - 1) :]:
            (folder / _MANIFEST).unlink(missing_ok=True)  # first: what is half deleted is not valid
            shutil.rmtree(folder, ignore_errors=True)


def _newest(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest whole checkpoint with its manifest."""
    if (path / _MANIFEST).is_file():
        return path, _read_manifest(path)
    folders = [path / f"{_PREFIX}{number:06}" for number in reversed(_numbers(path))] if path.is_dir() else []
    for folder in folders:
        if (folder / _MANIFEST).is_file():
            return folder, _read_manifest(folder)
        logger.warning("%s was not finished, and is left alone", folder)
    found = f"{len(folders)} unfinished ones" if folders else "nothing of the kind"
    if path.name.startswith(_PREFIX) and path.is_dir():
        found = "one that was not finished"
    raise FileNotFoundError(f"{path} holds no whole population checkpoint, but {found}")


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: Any = json.loads((folder / _MANIFEST).read_bytes())
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(f"{folder / _MANIFEST} is no manifest of a population checkpoint")
    if manifest.get("version") != _VERSION:
        raise ValueError(f"{folder} has version {manifest.get('version')!r:.80}; allowed: {_VERSION}")
    return manifest


def _plan(files: Sequence[Mapping[str, Any]], size: int) -> list[int]:
    """Return for each rank whose file it loads: its own, those of the best, or copies beginning with the best."""
    if size == len(files):
        return list(range(size))

    def quality(source: int) -> tuple[bool, float]:
        value = files[source]["metric"]
        if value is None or not math.isfinite(value):
            return False, 0.0
        return True, -value if files[source]["metric_mode"] == "min" else value

    best_first = sorted(range(len(files)), key=quality, reverse=True)
    if size < len(files):
        if not any(quality(source)[0] for source in best_first):
            warnings.warn(f"no metric was saved: the first {size} of {len(files)} ranks go on", stacklevel=2)
        return sorted(best_first[:size])
    return [*range(len(files)), *(best_first[i % len(files)] for i in range(size - len(files)))]
