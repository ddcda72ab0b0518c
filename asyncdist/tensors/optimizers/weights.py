"""Updates the weights that an optimizer stores when an average replaces the model's weights.

An optimizer that has its own copy of the weights would undo an average at its next step.
:mod:`asyncdist.tensors.optimizers.recognition` finds the copies, of which there are six kinds:

- **The z of schedule-free optimizers**, the point from which gradient steps are taken. It is averaged with the weights,
  as a part of the flat state. (If z were set to the averaged weights, it would lose its lead over them. In an
  experiment with an average every 10 steps, the loss of schedule-free SGD then ended at 0.084 instead of 0.020.)
- **Mirrors**, which equal the weights after each step, such as the float32 master weights of a bfloat16 model. They are
  set to the new weights but keep their additional precision, so that averages do not lose small updates.
- **Slow weights** of Lookahead. They are set to the new weights.
- **Origins**, from which the weights are recomputed (MADGRAD, D-Adaptation). They are shifted by the change of the
  weights.
- **Compensations** of Kahan summation, the rounding errors of the old weights. They are set to zero.
- **The z of FTRL**, from which each step computes the weights. It is set to the z that gives the new weights.

Any other tensor that seems to follow the weights is logged once and left unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from asyncdist.tensors.model_tensors import local_part
from asyncdist.tensors.optimizers import recognition
from asyncdist.tensors.optimizers.wrapped import wrapped_optimizers

#: Prefix that precedes the parameter's name in the name of an averaged state.
STATE_PREFIX: Final = "optimizer's z of "
#: Options of parameter groups that, together with the states z and n, identify an FTRL optimizer.
_OF_FTRL: Final = ("lr", "beta", "lambda_1", "lambda_2", "lr_power")
#: Log-likelihood ratio at which an optimizer is considered to undo averages.
_PROOF: Final = 20.0
#: If the projection of the first step on the change is above this value, the optimizer has clearly kept the average.
_KEPT: Final = -0.25
#: Minimum ratio of the change to the weights. Smaller changes may be rounding errors.
_ROUNDING: Final = 1e-5

logger = logging.getLogger("asyncdist.optimizers")


class AveragedStates:
    """Finds the optimizer states that are averaged with the weights: the z of a schedule-free optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        """Find the parameters for which the optimizer will create a state in its first step."""
        source: Any = next(filter(_is_schedule_free, wrapped_optimizers(optimizer)), None)
        named: list[tuple[str, Tensor]] = []
        if source is not None:
            own = {id(each) for group in source.param_groups for each in group["params"]}
            named = [(name, each) for name, each in model.named_parameters() if id(each) in own]
            named = [(name, each) for name, each in named if each.requires_grad and each.is_floating_point()]
        self.names = tuple(f"{STATE_PREFIX}{name}" for name, _ in named)
        self.parameters = tuple(parameter for _, parameter in named)
        self._source = source

    def tensors(self) -> list[Tensor]:
        """Return the states in the order of ``names``. A state that does not exist yet is a copy of its parameter."""
        found = []
        for parameter in self.parameters:
            z = self._source.state.get(parameter, {}).get("z")
            found.append(local_part(parameter).detach().clone() if z is None else local_part(z))
        return found

    def change(self, model: nn.Module, optimizer: Any) -> None:
        """Switch to the states of a different optimizer. Raise ValueError if their names differ."""
        other = AveragedStates(model, optimizer)
        if other.names != self.names:
            raise ValueError(
                "the new optimizer must train the same parameters as the old one, and be schedule-free if the old one "
                "is. For another optimizer, leave the policy and enter a new one"
            )
        self.parameters, self._source = other.parameters, other._source


class _Replaced:
    """Samples the weights around a replacement by an average, to detect whether the optimizer undoes the average.

    The optimizer may keep a copy of the weights that no search finds. A sample is taken before and after the
    replacement, and after each of the optimizer's next two steps.

    If the optimizer keeps the average, its next step starts at the average. If it undoes the average, its next step
    starts at the old weights, so the weights first go back by the whole change. The step differs by exactly this change
    in the two cases, even if a step is longer than the change. The test therefore projects steps on the change. The
    second step shows how far an ordinary step leads in this direction.

    A first step that leads nearly exactly to the old weights is ambiguous, because they may be the minimum of the
    rank's own loss. An example is a quadratic loss with LBFGS, or with SGD at a suitable learning rate. torch's own
    optimizers, which hide no weights, are therefore not tested.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._old = self._sample()
        self._new = self._old
        self._next: Tensor | None = None  # weights after the first step, if this may have undone the average

    def note_new(self) -> None:
        """Sample the weights after they were replaced by the average."""
        self._new = self._sample()

    def have_changed_since(self) -> bool:
        """Return whether the weights have changed since they were replaced (:meth:`note_new`)."""
        return not torch.equal(self._sample(), self._new)

    def evidence(self) -> float | None:
        """Return how strongly the steps since :meth:`note_new` suggest that the optimizer undoes averages.

        Must be called after each step until the result is a number.

        Returns:
            Log-likelihood ratio (negative if the average was probably kept), or None if another step is necessary.
        """
        now = self._sample()
        change = self._new - self._old
        seen = change != 0.0
        change = change[seen]
        length = float(change.norm())
        if int(seen.sum()) < recognition.PROOF_COUNT or not length > _ROUNDING * float(self._new[seen].norm()):
            return 0.0
        first = (now if self._next is None else self._next)[seen] - self._new[seen]
        projection = float(first @ change) / length**2
        if self._next is None:
            if not projection < _KEPT:  # also true if the weights are not finite
                return -_PROOF
            self._next = now
            return None
        second = (now - self._next)[seen]
        step = max(float(second.norm()), float((first - projection * change).norm()))
        if not second.any():  # gradients are being accumulated
            return None
        excess = projection - float(second @ change) / length**2
        # The excess is the first step's movement along the change, minus an ordinary step's, in units of the change. It
        # is -1 if the optimizer has undone the average, and otherwise 0, plus the normally distributed noise of an
        # ordinary step.
        ratio = (0.5 - abs(excess + 1.0)) * length**2 / (2.0 * step**2)
        return max(-_PROOF, min(_PROOF, ratio)) if ratio == ratio else 0.0

    def _sample(self) -> Tensor:
        return recognition.sample_of([local_part(each) for each in self._parameters])


class OptimizerWeights:
    """Updates the weights inside an optimizer when the model's weights are replaced.

    Args:
        states: Optimizer states that are replaced together with the weights.
        is_reset: Whether the optimizer's state is cleared afterwards.

    Attributes:
        is_watching: Whether :meth:`check_kept` has yet to find out whether the optimizer keeps the new weights.
    """

    def __init__(self, model: nn.Module, optimizer: Any, states: AveragedStates, *, is_reset: bool = False) -> None:
        self.optimizer = optimizer
        self.is_watching = False
        self._model = model
        self._states = states
        self._is_reset = is_reset
        self._reported: set[str] = set()
        self._replaced: _Replaced | None = None
        self._evidence = 0.0  # evidence that the optimizer undoes averages
        self._has_looked = False
        self._has_stepped = False
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """If the optimizer is reset at averages, watch its steps, to detect that another optimizer trains the model."""
        if self._is_reset:
            self._replaced = self._replaced or self._sampled()
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
        """Replace the optimizer. Raise ValueError if exactly one of the old and the new optimizer is schedule-free."""
        if not self._is_reset:
            self._states.change(self._model, optimizer)
        is_watched = bool(self._hooks)
        self.end()
        self.optimizer = optimizer
        self._has_looked = False
        self._evidence = 0.0
        if is_watched:
            self.begin()

    def follow(self, model: nn.Module, optimizer: Any) -> None:
        """Switch to a different model of the same layout, and its optimizer."""
        self._model, self._replaced, self.is_watching = model, None, False
        self.change(optimizer)

    @contextlib.contextmanager
    def following(self, *, has_new_state: bool = False) -> Iterator[None]:
        """Update the weights inside the optimizer after the ``with`` block has replaced the model's weights.

        Args:
            has_new_state: Whether the optimizer's ``state_dict`` was already replaced by one that belongs to the new
                weights. In that case, only copies of the weights that it does not contain are updated.
        """
        self._warn_of_evaluation()
        self._warn_of_another()
        copies = self._copies(reports_unknown=not has_new_state)
        if has_new_state:
            copies = recognition.not_contained(copies, self.optimizer)
        before = {
            id(copy.parameter): local_part(copy.parameter).detach().clone() for copy in copies if copy.kind == "origin"
        }
        replaced = self._sampled()
        yield
        with torch.no_grad():
            for copy in copies:
                _follow(copy, before.get(id(copy.parameter)))
            if not has_new_state:
                _follow_leader(self.optimizer)
        replaced.note_new()
        self._replaced = replaced
        self.is_watching = "undone" not in self._reported and not _is_of_torch(self.optimizer)
        self._has_stepped = False

    def look(self) -> None:
        """Warn once about unknown copies of the weights in the optimizer's state. Do nothing before its first step."""
        if not self._has_looked and any(each.state for each in wrapped_optimizers(self.optimizer)):
            self._has_looked = True
            self._warn_of_evaluation()
            self._copies()

    def check_kept(self) -> None:
        """Warn once if the optimizer undoes averages. Must be called at each step if ``is_watching``."""
        found = 0.0 if self._replaced is None else self._replaced.evidence()
        self.is_watching = found is None
        if found is None:
            return
        self._evidence = max(0.0, self._evidence + found)
        if self._evidence >= _PROOF:
            self._report(
                "undone",
                "the steps of %s after averages restored the old weights: it keeps a copy of the weights that was not "
                'recognised. Pass optimizer_state="reset", or use an optimizer without a copy of the weights',
                type(self.optimizer).__name__,
            )

    def _sampled(self) -> _Replaced:
        return _Replaced([each for each in self._model.parameters() if each.requires_grad])

    def _copies(self, *, reports_unknown: bool = True) -> list[recognition.StoredTensor]:
        """Return the copies of the weights to update. Warn about other tensors that seem to follow the weights.

        If ``reports_unknown`` is false, do not warn: a new state belongs to weights that the model does not have yet.
        """
        copies = []
        for label, key, stored in recognition.stored_tensors(self.optimizer, self._model):
            if key == "z" and self._states.names:
                continue
            kind = recognition.kind_of(key, stored)
            if kind is not None:
                copies += [dataclasses.replace(each, kind=kind) for each in stored]
            elif reports_unknown and not self._is_reset and recognition.follows_unknown(key, stored):
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
        """Warn once if the weights have changed without a step of this optimizer."""
        replaced = self._replaced if self._hooks and not self._has_stepped else None
        if replaced is not None and replaced.have_changed_since():
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


def _follow(copy: recognition.StoredTensor, before: Tensor | None) -> None:
    """Update a copy after its parameter was replaced. ``before`` is the parameter's old value."""
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


def _follow_leader(optimizer: Any) -> None:
    """Update the z of FTRL, from which each step computes the weights, so that z gives the current weights."""
    for each in wrapped_optimizers(optimizer):
        for group in each.param_groups:
            if not all(name in group for name in _OF_FTRL):
                continue
            limit = group["lambda_1"]
            for parameter in group["params"]:
                state = each.state.get(parameter, {})
                if "z" in state and "n" in state:
                    weights, z, n = map(local_part, (parameter, state["z"], state["n"]))
                    scale = (n.sqrt() + group["beta"]) / group["lr"] + group["lambda_2"]
                    z.copy_(
                        torch.where(weights == 0, z.clamp(-limit, limit), -weights * scale - weights.sign() * limit)
                    )


def _is_of_torch(optimizer: Any) -> bool:
    """Return whether an optimizer and all that it wraps are torch's own. These optimizers hide no weights."""
    return all(type(each).__module__.startswith("torch.optim.") for each in wrapped_optimizers(optimizer))


def _is_schedule_free(optimizer: Any) -> bool:
    """Return whether an optimizer's class names or parameter groups show that it is schedule-free.

    Reference implementations are excluded, because they also store x and y.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if any("Reference" in name for name in names):
        return False
    return any("ScheduleFree" in name for name in names) or (
        callable(getattr(optimizer, "eval", None))
        and any("train_mode" in group for group in getattr(optimizer, "param_groups", ()))
    )


@contextlib.contextmanager
def kept_mode(optimizer: Any) -> Iterator[None]:
    """Restore the train() or eval() mode of schedule-free optimizers after the block, but not their weights."""
    wrapped = wrapped_optimizers(optimizer)
    groups = [group for each in wrapped for group in getattr(each, "param_groups", ()) if "train_mode" in group]
    modes = [group["train_mode"] for group in groups]
    wrappers = [(each, each.train_mode) for each in wrapped if isinstance(getattr(each, "train_mode", None), bool)]
    try:
        yield
    finally:
        for group, mode in zip(groups, modes, strict=True):
            group["train_mode"] = mode
        for each, mode in wrappers:
            each.train_mode = mode


def _is_evaluating(optimizer: Any) -> bool:
    """Return whether a schedule-free optimizer is in eval() mode, in which the model has the averaged weights."""
    for each in wrapped_optimizers(optimizer):
        if callable(getattr(each, "eval", None)) and each.state:
            modes = [group["train_mode"] for group in each.param_groups if "train_mode" in group]
            if not all(modes) or getattr(each, "train_mode", True) is False:
                return True
    return False
