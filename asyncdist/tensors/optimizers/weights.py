"""Finds the weights that an optimizer keeps, and updates them when the model's weights are replaced.

An average replaces the model's tensors. An optimizer that keeps weights of its own would restore the old ones at its
next step. There are five kinds:

- **The z of schedule-free optimizers**, the point that takes the gradient steps. It is averaged with the weights:
  :class:`AveragedStates` makes it a part of the flat state. (Setting z to the averaged weights would lose its lead over
  them: with an average every 10 steps, the loss of schedule-free SGD ended at 0.084 instead of 0.020.)
- **Mirrors**, equal to the weights after each step, such as float32 masters of a bfloat16 model. They are recognised by
  their values. They become the new weights but keep their extra precision; otherwise each average would lose updates
  smaller than the last place of the weights.
- **Slow weights** of Lookahead: an average or a copy of the weights that is written back to them. They become the new
  weights.
- **Origins**, from which the weights are recomputed (MADGRAD, D-Adaptation). They are shifted by the change of the
  weights.
- **Compensations** of Kahan summation, the rounding errors of the old weights. They become zero.

Any other tensor that follows the weights is logged once and left unchanged. Moments stay unless the caller resets them.

Nothing here sends or waits. An optimizer fills its state at its first step, so everything except the layout of
:class:`AveragedStates` is looked up when needed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from asyncdist.tensors.model_tensors import local_part
from asyncdist.tensors.optimizers.copies import PROOF_COUNT, Copy, follows_unknown, held_by, kind_of, sample_of
from asyncdist.tensors.optimizers.wrapped import wrapped_optimizers

Verdict: TypeAlias = Literal["kept", "undone", "unknown"]

#: Least ratio of the distance between old and new weights to the length of a step that proves restored old weights.
_LENGTH_RATIO: Final = 4.0

logger = logging.getLogger("asyncdist.optimizers")


class AveragedStates:
    """Finds the optimizer states that are averaged with the weights: the z of a schedule-free optimizer.

    Args:
        model: The model.
        optimizer: The model's optimizer. Only a schedule-free one has such states.

    Attributes:
        names: Name of each tensor, for messages and fingerprints.
        parameters: Parameter of each tensor.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        """Find the parameters that will have a state; the optimizer makes the states at its first step."""
        source = _schedule_free_of(optimizer)
        named: list[tuple[str, Tensor]] = []
        if source is not None:
            own = {id(each) for group in source.param_groups for each in group["params"]}
            named = [(name, each) for name, each in model.named_parameters() if id(each) in own]
            named = [(name, each) for name, each in named if each.requires_grad and each.is_floating_point()]
        self.names = tuple(f"optimizer's z of {name}" for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self._source = source

    def tensors(self) -> list[Tensor]:
        """Return the tensors, in the order of the names.

        A state that does not exist yet is represented by a copy of its parameter, which is its initial value.
        """
        found = []
        for parameter in self.parameters:
            z = self._source.state.get(parameter, {}).get("z")
            found.append(local_part(parameter).detach().clone() if z is None else local_part(z))
        return found

    def change(self, model: nn.Module, optimizer: Any) -> None:
        """Use the states of another optimizer from now on. Raise ValueError if it has other states."""
        other = AveragedStates(model, optimizer)
        if other.names != self.names:
            raise ValueError(
                "the new optimizer must train the same parameters as the old one, and be schedule-free if the old one "
                "is. For another optimizer, leave the policy and enter a new one"
            )
        self.parameters, self._source = other.parameters, other._source


class OptimizerWeights:
    """Updates the weights in an optimizer when the model's weights are replaced.

    Args:
        model: The model.
        optimizer: Optimizer of the model or of a part of it.
        states: Optimizer states that are replaced together with the weights.
        is_reset: Whether the optimizer's state is cleared afterwards.

    Attributes:
        optimizer: The current optimizer.
        is_watching: Whether :meth:`check_kept` has yet to find out if replaced weights stay.
    """

    def __init__(self, model: nn.Module, optimizer: Any, states: AveragedStates, *, is_reset: bool = False) -> None:
        """Store the optimizer, without inspecting it before the first replacement."""
        self.optimizer = optimizer
        self.is_watching = False
        self._model = model
        self._states = states
        self._is_reset = is_reset
        self._reported: set[str] = set()
        self._replaced: _Replaced | None = None
        self._has_looked = False
        self._has_stepped = False
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """Watch the optimizer's steps if it is to be reset, since another optimizer may train the model later."""
        if self._is_reset:
            self._replaced = self._replaced or _Replaced(self._model)
            self._hooks = [
                each.register_step_post_hook(self._note_step)
                for each in wrapped_optimizers(self.optimizer)
                if hasattr(each, "_optimizer_step_post_hooks")
            ]

    def end(self) -> None:
        """Stop watching the optimizer's steps."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note_step(self, *_: object) -> None:
        self._has_stepped = True

    def change(self, optimizer: Any) -> None:
        """Use another optimizer, which trains the model from now on.

        Raises:
            ValueError: Only one of the two optimizers is schedule-free, and its states are averaged.
        """
        if not self._is_reset:
            self._states.change(self._model, optimizer)
        is_watched = bool(self._hooks)
        self.end()
        self.optimizer = optimizer
        self._has_looked = False
        if is_watched:
            self.begin()

    def follow(self, model: nn.Module, optimizer: Any) -> None:
        """Use another model of the same layout and its optimizer from now on. Raise ValueError as ``change`` does."""
        is_watched = bool(self._hooks)
        self.end()
        self._model, self._replaced, self.is_watching = model, None, False
        self.change(optimizer)
        if is_watched:
            self.begin()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Return a context in which to replace the model's weights; on exit, update the weights in the optimizer."""
        self._warn_of_evaluation()
        self._warn_of_another()
        copies = self._copies()
        before = {
            id(copy.parameter): local_part(copy.parameter).detach().clone() for copy in copies if copy.kind == "origin"
        }
        replaced = _Replaced(self._model)
        yield
        with torch.no_grad():
            for copy in copies:
                _follow(copy, before.get(id(copy.parameter)))
        replaced.note_new()
        self._replaced, self.is_watching = replaced, True
        self._has_stepped = False

    def look(self) -> None:
        """Warn once of weights in the optimizer's state that cannot be updated. Do nothing before its first step."""
        if not self._has_looked and any(each.state for each in wrapped_optimizers(self.optimizer)):
            self._has_looked = True
            self._warn_of_evaluation()
            self._copies()

    def check_kept(self) -> None:
        """Warn once if the optimizer's step has restored the old weights. Call it at each step while watching."""
        verdict = self._replaced.judge() if self._replaced is not None else "kept"
        self.is_watching = verdict == "unknown"
        if verdict == "undone":
            self._report(
                "undone",
                "the step of %s after an average restored the old weights: it keeps a copy of the weights that was not "
                'recognised. Pass optimizer_state="reset", or use an optimizer without a copy of the weights',
                type(self.optimizer).__name__,
            )

    def _copies(self) -> list[Copy]:
        """Return the copies to update; warn of tensors that follow the weights in an unknown way."""
        copies = []
        for label, key, held in held_by(self.optimizer, self._model):
            if key == "z" and self._states.names:
                continue
            kind = kind_of(key, held)
            if kind is not None:
                copies += [Copy(each.parameter, each.tensor, kind) for each in held]
            elif not self._is_reset and follows_unknown(key, held):
                self._report(
                    label,
                    "%s follows the weights but was not recognised: averages do not update it, and it may distort or "
                    'undo them. Pass optimizer_state="reset" to the policy, which clears it at each average',
                    label,
                )
        return copies

    def _warn_of_evaluation(self) -> None:
        if self._states.names and _is_evaluating(self.optimizer):
            self._report(
                "evaluation",
                "policy.step() was called while the schedule-free optimizer is in eval() mode: other ranks may average "
                "these weights with weights of train() mode. Call optimizer.train() before step()",
            )

    def _warn_of_another(self) -> None:
        """Warn once if the weights have changed without a step of the optimizer."""
        is_still = not self._hooks or self._has_stepped or self._replaced is None
        if not is_still and self._replaced is not None and self._replaced.have_changed_since():
            self._report(
                "another",
                "the %s that this policy resets has made no step since the last average, but the weights have changed: "
                "another optimizer trains the model, and its state is not reset. Assign it: "
                "policy.optimizer = new_optimizer",
                type(self.optimizer).__name__,
            )

    def _report(self, what: str, text: str, *values: object) -> None:
        if what not in self._reported:
            self._reported.add(what)
            logger.warning(text, *values)


class _Replaced:
    """Samples the model's weights before and after a replacement, to detect an optimizer step that undoes it."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._old = self._sample()
        self._new = self._old
        self._back: Tensor | None = None  # the weights after the step that seemed to restore the old ones

    def note_new(self) -> None:
        """Sample the weights after the replacement."""
        self._new = self._sample()

    def have_changed_since(self) -> bool:
        """Return whether the weights have changed since :meth:`note_new`."""
        return not torch.equal(self._sample(), self._new)

    def judge(self) -> Verdict:
        """Return whether the optimizer keeps the new weights; call it after each step until the result is known.

        Weights that are back at the old values prove nothing if one step is as long as the distance to them: if ranks
        train alike, a step from the weights of a rank one step behind leads to this rank's old weights. The next step
        shows how long a step is.
        """
        now, back = self._sample(), self._back
        if back is None:
            self._back = now if self._are_back(now) else None
            return "kept" if self._back is None else "unknown"
        step = float((now - back).norm())
        if step == 0.0:  # gradients are accumulated
            return "unknown"
        return "undone" if float((self._new - self._old).norm()) > _LENGTH_RATIO * step else "kept"

    def _are_back(self, now: Tensor) -> bool:
        """Return whether nearly all weights are back at their old values."""
        moved = (self._new - self._old).abs()
        is_seen = moved > 1e-3 * torch.maximum(self._new.abs(), self._old.abs())
        is_back = (now - self._old).abs() < 0.05 * moved
        return int(is_seen.sum()) >= PROOF_COUNT and float((is_back & is_seen).sum()) > 0.9 * float(is_seen.sum())

    def _sample(self) -> Tensor:
        return sample_of([local_part(each) for each in self._parameters])


def _follow(copy: Copy, before: Tensor | None) -> None:
    """Update a copy after its parameter was replaced; ``before`` is the parameter's old value."""
    tensor, new = copy.tensor, local_part(copy.parameter).detach()
    if copy.kind == "origin":
        assert before is not None, "the weights before were not noted"
        tensor.add_((new - before).to(tensor))
    elif copy.kind == "compensation":
        tensor.zero_()
    elif copy.kind == "slow" or tensor.dtype == new.dtype:
        tensor.copy_(new)
    else:
        wide = new.to(tensor)
        finer = wide + (tensor - tensor.to(new.dtype).to(tensor.dtype))
        tensor.copy_(torch.where(finer.to(new.dtype) == wide.to(new.dtype), finer, wide))


def _schedule_free_of(optimizer: Any) -> Any:
    """Return the schedule-free optimizer among an optimizer and those it wraps; None if there is none."""
    return next((each for each in wrapped_optimizers(optimizer) if _is_schedule_free(each)), None)


def _is_schedule_free(optimizer: Any) -> bool:
    """Return whether an optimizer is schedule-free, except reference implementations, which also keep x and y.

    Recognises the class names of schedulefree, pytorch-optimizer and subclasses, and `train_mode` in a group.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if any("Reference" in name for name in names):
        return False
    return any("ScheduleFree" in name for name in names) or (
        callable(getattr(optimizer, "eval", None))
        and any("train_mode" in group for group in getattr(optimizer, "param_groups", ()))
    )


def _is_evaluating(optimizer: Any) -> bool:
    """Return whether a schedule-free optimizer is in eval() mode, with its averaged weights in the model."""
    for each in wrapped_optimizers(optimizer):
        if callable(getattr(each, "eval", None)) and each.state:
            modes = [group["train_mode"] for group in each.param_groups if "train_mode" in group]
            if not all(modes) or getattr(each, "train_mode", True) is False:
                return True
    return False
