"""Finds the weights that an optimizer keeps besides the model's own, and makes them follow weights that were replaced.

An average replaces the model's tensors. An optimizer that keeps weights of its own would bring the old ones back at its
next step. There are five kinds:

- **the z of schedule-free optimizers**, the point that takes the gradient steps. It is averaged with the weights:
  :class:`AveragedStates` makes it a part of the flat state. (Setting z to the averaged weights instead loses the
  progress that z is ahead of them: with an average every 10 steps, the loss of schedule-free SGD ended at 0.084 instead
  of 0.020.)
- **mirrors**, equal to the weights after each step: float32 masters of a bfloat16 model, a list or a flat tensor of
  them. They are recognised by their values. They become the new weights, and keep what the weights' dtype rounds away:
  without that, updates smaller than one unit of the weights' last place would be lost at each average.
- **slow weights** of Lookahead, an average or a shadow of the weights that acts on them. They become the new weights.
- **origins**, from which the weights are computed anew (MADGRAD, D-Adaptation). They move by as much as the weights do.
- **compensations** of Kahan summation, what rounding has taken from the old weights. They become zero.

Anything else that follows the weights is reported once, and stays. Moments stay, as the caller decides.

Nothing here sends or waits. An optimizer's state is filled at its first step, so everything but the layout of
:class:`AveragedStates` is looked up when it is needed.
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

#: How many times as long as a step the way to the old weights is at least, if the optimizer has put them back.
_LENGTH_RATIO: Final = 4.0

logger = logging.getLogger("asyncdist.optimizers")


class AveragedStates:
    """Finds the states that are averaged together with the weights: the z of a schedule-free optimizer.

    Args:
        model: The model.
        optimizer: Its optimizer; of any other kind it has no such states.

    Attributes:
        names: A name per tensor, for messages and fingerprints.
        parameters: The parameter that each tensor belongs to.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        """Find the places of the states; the optimizer makes them at its first step."""
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

        For a state that the optimizer has not made it is a copy of the parameter, as the state will be.
        """
        found = []
        for parameter in self.parameters:
            z = self._source.state.get(parameter, {}).get("z")
            found.append(local_part(parameter).detach().clone() if z is None else local_part(z))
        return found

    def change(self, model: nn.Module, optimizer: Any) -> None:
        """Read the states of another optimizer from now on. Raises ValueError if it does not have the same ones."""
        other = AveragedStates(model, optimizer)
        if other.names != self.names:
            raise ValueError(
                "one of the two optimizers is schedule-free and the other is not, or it trains other parameters; "
                "allowed: an optimizer of the same kind. Leave the policy, and enter a new one"
            )
        self.parameters, self._source = other.parameters, other._source


class OptimizerWeights:
    """Makes the weights in an optimizer follow the model's weights when these are replaced.

    Args:
        model: The model.
        optimizer: Its optimizer, or one of a part of it.
        states: The states that are replaced together with the weights.
        is_reset: Whether the optimizer's state is cleared afterwards.

    Attributes:
        optimizer: The present optimizer.
        is_watching: Whether weights have been replaced, and :meth:`check_kept` has not seen yet whether they stay.
    """

    def __init__(self, model: nn.Module, optimizer: Any, states: AveragedStates, *, is_reset: bool = False) -> None:
        """Hold the optimizer; nothing is looked at before the first replacement."""
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
        """Watch the steps of the optimizer, if its state is to be cleared: another one may train the model later."""
        if self._is_reset:
            self._replaced = self._replaced or _Replaced(self._model)
            self._hooks = [
                each.register_step_post_hook(self._note_step)
                for each in wrapped_optimizers(self.optimizer)
                if hasattr(each, "_optimizer_step_post_hooks")
            ]

    def end(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note_step(self, *_: object) -> None:
        self._has_stepped = True

    def change(self, optimizer: Any) -> None:
        """Take another optimizer, which trains the model from now on.

        Raises:
            ValueError: One of the two is schedule-free, and its states are averaged; the other one is not.
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
        """Take another model of the same layout, and its optimizer, from now on. Raises ValueError as ``change``."""
        is_watched = bool(self._hooks)
        self.end()
        self._model, self._replaced, self.is_watching = model, None, False
        self.change(optimizer)
        if is_watched:
            self.begin()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Replace the model's weights in the body; then the weights in the optimizer are made to fit the new ones."""
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
        """Report, once, weights in the optimizer's state that do not follow. Before its first step it has none."""
        if not self._has_looked and any(each.state for each in wrapped_optimizers(self.optimizer)):
            self._has_looked = True
            self._warn_of_evaluation()
            self._copies()

    def check_kept(self) -> None:
        """Report, once, that the optimizer's step has put the old weights back. Call it at each step while watching."""
        verdict = self._replaced.judge() if self._replaced is not None else "kept"
        self.is_watching = verdict == "unknown"
        if verdict == "undone":
            self._report(
                "undone",
                "the step of %s after an average put the old weights back: it keeps weights that were not recognised. "
                'Such an optimizer needs optimizer_state="reset", or none of an own copy of the weights',
                type(self.optimizer).__name__,
            )

    def _copies(self) -> list[Copy]:
        """Return the copies that are to follow; report others."""
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
                    "%s follows the weights and was not recognised: an average will not reach it, and may be bent or "
                    'undone by it. Pass optimizer_state="reset" to the policy, which clears it at each average',
                    label,
                )
        return copies

    def _warn_of_evaluation(self) -> None:
        if self._states.names and _is_evaluating(self.optimizer):
            self._report(
                "evaluation",
                "step() of the policy while the schedule-free optimizer is in eval() mode: other ranks may average "
                "these weights with weights of train() mode. Call optimizer.train() before step()",
            )

    def _warn_of_another(self) -> None:
        """Report, once, that the weights have changed without a step of the optimizer."""
        is_still = not self._hooks or self._has_stepped or self._replaced is None
        if not is_still and self._replaced is not None and self._replaced.have_changed_since():
            self._report(
                "another",
                "the %s that this policy resets has made no step since the last average, though the weights have "
                "changed: another optimizer trains the model, and its state is not reset. Assign it: "
                "policy.optimizer = new_optimizer",
                type(self.optimizer).__name__,
            )

    def _report(self, what: str, text: str, *values: object) -> None:
        if what not in self._reported:
            self._reported.add(what)
            logger.warning(text, *values)


class _Replaced:
    """Samples the model's weights before and after they are replaced, to see whether a step undoes that."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._old = self._sample()
        self._new = self._old
        self._back: Tensor | None = None  # the weights at the step that found the old ones back

    def note_new(self) -> None:
        """Note the weights that are in place now."""
        self._new = self._sample()

    def have_changed_since(self) -> bool:
        """Tell whether the weights are others than those that were put in place."""
        return not torch.equal(self._sample(), self._new)

    def judge(self) -> Verdict:
        """Tell whether the optimizer keeps the new weights; call it after each of its steps until that is known.

        Old weights that are back prove nothing if a step is as long as the way to them: where ranks train alike, it
        leads from the weights of a rank that is a step behind to those that this rank had. The next step shows how
        long a step is.
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
        """Tell whether nearly all weights are back where they were."""
        moved = (self._new - self._old).abs()
        is_seen = moved > 1e-3 * torch.maximum(self._new.abs(), self._old.abs())
        is_back = (now - self._old).abs() < 0.05 * moved
        return int(is_seen.sum()) >= PROOF_COUNT and float((is_back & is_seen).sum()) > 0.9 * float(is_seen.sum())

    def _sample(self) -> Tensor:
        return sample_of([local_part(each) for each in self._parameters])


def _follow(copy: Copy, before: Tensor | None) -> None:
    """Make a copy fit the parameter, which has been replaced."""
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
    """Return the schedule-free optimizer among an optimizer and those that it wraps; None if there is none."""
    return next((each for each in wrapped_optimizers(optimizer) if _is_schedule_free(each)), None)


def _is_schedule_free(optimizer: Any) -> bool:
    """Tell whether an optimizer keeps z, and is no reference implementation, which keeps x and y besides.

    Class names are those of schedulefree, pytorch-optimizer and their offspring. Others have `train_mode`.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if any("Reference" in name for name in names):
        return False
    return any("ScheduleFree" in name for name in names) or (
        callable(getattr(optimizer, "eval", None))
        and any("train_mode" in group for group in getattr(optimizer, "param_groups", ()))
    )


def _is_evaluating(optimizer: Any) -> bool:
    """Tell whether a schedule-free optimizer has put its averaged weights in place, to be evaluated."""
    for each in wrapped_optimizers(optimizer):
        if callable(getattr(each, "eval", None)) and each.state:
            modes = [group["train_mode"] for group in each.param_groups if "train_mode" in group]
            if not all(modes) or getattr(each, "train_mode", True) is False:
                return True
    return False
