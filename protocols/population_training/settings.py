"""Reads and writes hyperparameters in an optimizer's parameter groups and learning rate scheduler."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from asyncdist.protocols.population_training.hyperparameters import is_number
from asyncdist.tensors.optimizers.loading import load_exactly, load_group_state, torch_part, with_groups

#: Settings proportional to the base learning rate, in a scheduler's attributes and in each parameter group.
_SCHEDULED: Final = ("base_lrs", "max_lrs")
_SCHEDULED_IN_GROUP: Final = ("initial_lr", "max_lr", "min_lr")


class OptimizerSettings:
    """Reads and writes the hyperparameters of one optimizer.

    Groups with different initial values keep their ratios to the first value that is not 0. A group with the value 0,
    such as a group without weight decay, keeps 0. A group that is added to the optimizer later keeps the ratio that it
    has at the next change. If there is a scheduler, such a group has no base learning rate, and ``"lr"`` does not
    change it.

    Args:
        names: Names of hyperparameters, such as ``"lr"``, or ``"betas[0]"`` for one number of a tuple.
        lr_scheduler: Scheduler whose base learning rate is the hyperparameter ``"lr"``, or None.

    Raises:
        TypeError, ValueError: The optimizer does not have a hyperparameter, its state has no parameter groups, or its
            scheduler is unknown.
    """

    def __init__(self, optimizer: Any, names: Iterable[str], lr_scheduler: Any) -> None:
        if not torch_part(optimizer.state_dict()):
            raise ValueError(
                "the state_dict() of optimizer, or of the optimizer that it wraps, must contain 'state' and "
                f"'param_groups', got {type(optimizer).__name__}: without them, a rank that copies another rank's "
                "state cannot keep its own settings"
            )
        self._optimizer = optimizer
        self._scheduler = _unwrapped(lr_scheduler)
        self._schedulers = _schedulers_in(lr_scheduler)
        known = _numbers_of(optimizer)
        for name in names:
            if name not in known:
                raise ValueError(
                    f"hyperparameters must name settings of {type(optimizer).__name__}, got {name!r}; allowed: "
                    f"{', '.join(known)}. Pass hyperparameters of the training loop as custom_hyperparameters"
                )
        self._check_scheduler("lr" in names, lr_scheduler)
        self._ratios = {name: _ratios(self._values(name)) for name in names}

    def _check_scheduler(self, tunes_lr: bool, lr_scheduler: Any) -> None:
        is_scheduled = any("initial_lr" in group for group in self._optimizer.param_groups)
        if tunes_lr and is_scheduled and not self._schedulers:
            raise ValueError(
                "lr_scheduler must be the scheduler of the optimizer's learning rate, got None: without it, the "
                "scheduler would undo the policy's changes of 'lr'. A trainer makes its scheduler later, so make it "
                "yourself, and also pass Trainer(optimizers=(optimizer, scheduler)) of transformers, or return both "
                "from Lightning's configure_optimizers"
            )
        for each in self._schedulers:
            if not hasattr(each, "base_lrs") or not _is_schedule_of(each, self._optimizer):
                raise TypeError(
                    "lr_scheduler must be a scheduler of torch.optim.lr_scheduler with base_lrs, for the policy's "
                    f"optimizer, got {lr_scheduler!r:.80}. A scheduler without base_lrs, such as ReduceLROnPlateau, "
                    "changes the current learning rate as the policy does: do not pass it"
                )

    def write(self, values: Mapping[str, Any]) -> None:
        """Write values of hyperparameters into all groups. With a scheduler, ``lr`` is the base learning rate."""
        for name, ratios in self._ratios.items():
            if name in values:
                ratios += _ratios(self._values(name))[len(ratios) :]
                for place, (group, ratio) in enumerate(zip(self._groups(name), ratios, strict=True)):
                    new = values[name] if ratio == 1.0 else values[name] * ratio
                    if name == "lr" and self._schedulers:
                        self._write_base(place, group, new)
                    else:
                        _put(group, name, new)

    def _write_base(self, place: int, group: dict[str, Any], new: float) -> None:
        """Set a group's base learning rate, and scale its current learning rate by the change of the scheduled rate.

        If the old scheduled rate was 0, the current learning rate becomes the new scheduled rate.
        """
        old = float(group["initial_lr"])
        if not old and not new:
            return
        current, before = float(group["lr"]), self._scheduled(place, old)
        for name in _SCHEDULED_IN_GROUP:
            if name in group and (old or name == "initial_lr"):
                _put(group, name, new if name == "initial_lr" else float(group[name]) * (new / old))
        for scheduler in self._schedulers:
            was = float(scheduler.base_lrs[place])
            for name in _SCHEDULED:
                found = getattr(scheduler, name, None)
                if isinstance(found, list) and (was or name == "base_lrs"):
                    found[place] = new if name == "base_lrs" else found[place] * (new / was)
        after = self._scheduled(place, new)
        _put(group, "lr", current * (after / before) if before and current != before else after)

    def _scheduled(self, place: int, base: float) -> float:
        """Return a group's scheduled learning rate at the current step, or ``base`` if it cannot be computed."""
        active = self._scheduler
        while (milestones := getattr(active, "_milestones", None)) is not None:  # the current part of a SequentialLR
            active = active._schedulers[bisect_right(milestones, active.last_epoch)]
        of_all = getattr(active, "_get_closed_form_lr", None)
        return base if of_all is None else float(of_all()[place])

    def scheduled(self) -> list[dict[str, float]]:
        """Return the values in each group that schedulers write, such as the current learning rate."""
        names = ("lr", *_SCHEDULED_IN_GROUP) if self._schedulers and "lr" in self._ratios else ()
        return [{name: float(group[name]) for name in names if name in group} for group in self._optimizer.param_groups]

    def put_scheduled(self, found: Iterable[Mapping[str, float]]) -> None:
        """Restore the result of :meth:`scheduled`. Schedulers compute the next values from these values."""
        for group, values in zip(self._optimizer.param_groups, found, strict=True):
            for name, value in values.items():
                _put(group, name, value)

    def _groups(self, name: str) -> list[dict[str, Any]]:
        key, _ = _split(self._key(name))
        return [group for group in self._optimizer.param_groups if key in group]

    def _values(self, name: str) -> list[float]:
        return [_number_in(group, self._key(name)) for group in self._groups(name)]

    def _key(self, name: str) -> str:
        return "initial_lr" if name == "lr" and self._schedulers else name


def schedules(scheduler: Any, optimizer: Any) -> bool:
    """Return whether a scheduler, or a scheduler that it contains, changes the learning rates of an optimizer."""
    return any(_is_schedule_of(each, optimizer) for each in _schedulers_in(scheduler))


def _is_schedule_of(scheduler: Any, optimizer: Any) -> bool:
    # Accelerate and Fabric wrap optimizers, but a wrapper has the parameter groups of its optimizer.
    scheduled = getattr(scheduler, "optimizer", None)
    return scheduled is not None and scheduled.param_groups is optimizer.param_groups


def _unwrapped(scheduler: Any) -> Any:
    """Return the scheduler inside a scheduler that Accelerate has prepared; other schedulers unchanged."""
    while not hasattr(scheduler, "base_lrs") and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler
    return scheduler


def _schedulers_in(scheduler: Any) -> list[Any]:
    """Return those of a scheduler and its inner schedulers (as in SequentialLR) that have a base learning rate."""
    if scheduler is None:
        return []
    scheduler = _unwrapped(scheduler)
    inner = [each for part in getattr(scheduler, "_schedulers", ()) for each in _schedulers_in(part)]
    has_base = hasattr(scheduler, "base_lrs") or not inner
    return [*([scheduler] if has_base else []), *inner]


def _numbers_of(optimizer: Any) -> list[str]:
    """Return the names of all numbers in an optimizer's groups that can be hyperparameters."""
    found: dict[str, None] = {}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name in ("params", *_SCHEDULED_IN_GROUP):
                continue
            if _is_number(value):
                found[name] = None
            elif isinstance(value, tuple | list) and value and all(map(_is_number, value)):
                found.update({f"{name}[{place}]": None for place in range(len(value))})
    return list(found)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return is_number(value)


def _number_in(group: Mapping[str, Any], name: str) -> float:
    key, place = _split(name)
    return float(group[key] if place is None else group[key][place])


def _split(name: str) -> tuple[str, int | None]:
    """Return a hyperparameter's key in a parameter group, and its index in a tuple there, or None without a tuple."""
    key, bracket, place = name.partition("[")
    return key, int(place[:-1]) if bracket else None


def _put(group: dict[str, Any], name: str, new: float) -> None:
    """Write a number into a group. A tensor is changed in place, because a CUDA graph may read its memory."""
    key, place = _split(name)
    old = group[key] if place is None else group[key][place]
    if isinstance(old, torch.Tensor):
        old.fill_(new)
    elif place is None:
        group[key] = type(old)(new) if isinstance(old, float) else new
    else:
        changed = list(group[key])
        changed[place] = new
        group[key] = type(group[key])(changed)


def _ratios(values: list[float]) -> list[float]:
    first = next((value for value in values if value), 0.0)
    return [value / first if first else 1.0 for value in values]


def load_moments(optimizer: Any, state: Mapping[str, Any], names: Iterable[str] = ()) -> None:
    """Load another rank's optimizer state, such as moments and step counts. The settings of groups are kept.

    Args:
        state: ``state_dict()`` of an optimizer of the same class, in the order of this optimizer's parameters.
        names: Names of hyperparameters, which are settings.
    """
    groups = list(optimizer.param_groups)
    own = torch_part(optimizer.state_dict())["param_groups"]
    load_exactly(optimizer, with_groups(state, own))
    for place, group in enumerate(groups):  # keeps the groups' tensors, which a CUDA graph may read
        optimizer.param_groups[place] = group
    load_group_state(optimizer, torch_part(state)["param_groups"], [_split(name)[0] for name in names])
