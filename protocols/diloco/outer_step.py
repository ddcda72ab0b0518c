"""Moves one fragment's anchor with an outer optimizer, after the ranks' differences have been averaged.

An outer optimizer is an ordinary ``torch.optim.Optimizer``. Its parameters are the anchor's flat tensors, and its
gradient is the mean difference D = anchor - mean of the ranks' weights.

- The anchors are updated in place, in the caller's memory.
- Each parameter is a piece of an anchor, so the optimizer should be elementwise, as SGD and Adam are.
- D is the gradient only during :meth:`OuterStep.step`. The optimizer must not change it or keep a reference to it.
- Equal anchors, states and differences give equal bits on ranks with the same torch and the same kind of processor.
  torch computes ``a - lr * d`` with one rounding if the processor has FMA, and with two otherwise.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from asyncdist import validation
from asyncdist.protocols.joining.state_transfer import cloned
from asyncdist.tensors.optimizers.wrapped import needs_closure

#: Function that returns an optimizer of the given flat parameters, such as a partial of an optimizer class.
OuterFactory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_PIECE_COUNT: Final = 1 << 18  # maximum number of elements of one parameter of the optimizer
_MOMENTA: Final = ("momentum_buffer", "exp_avg", "m")  # names of the first moment in an optimizer's state
_ALLOWED: Final = "a factory for the outer parameters such as functools.partial(torch.optim.SGD, lr=0.7)"


class OuterStep:
    """Keeps the common weights (anchor) of one model fragment, and the outer optimizer that moves them.

    Args:
        factory: Function that builds the optimizer; called once, with the pieces of the anchors as parameters.
        anchors: 1-D float32 or float64 tensors, made outside inference mode, whose memory the parameters share. The
            list and each tensor may be empty.

    Attributes:
        anchors: The given tensors, which :meth:`step` changes in place.

    Raises:
        TypeError: The factory returns an object that is not an optimizer.
        ValueError: The optimizer has other parameters, decays the weights, maximises, or needs a closure.
    """

    def __init__(self, factory: OuterFactory, anchors: Sequence[Tensor]) -> None:
        assert all(anchor.ndim == 1 for anchor in anchors), "anchors are flat"
        assert all(anchor.dtype in (torch.float32, torch.float64) for anchor in anchors), "states are at least float32"
        self.anchors: tuple[Tensor, ...] = tuple(anchors)
        with torch.inference_mode(False):  # the parameters outlive the caller's inference mode
            self._parameters = [nn.Parameter(piece) for piece in _pieces(anchors)]
            # torch refuses an optimizer without parameters, so a fragment without anchors gets an empty parameter.
            parameters = self._parameters or [nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))]
            self._optimizer = factory(list(parameters))
        _check_optimizer(self._optimizer, parameters)
        _use_fast_kernels(self._optimizer)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, differences: Sequence[Tensor]) -> None:
        """Move the anchors by one step of the outer optimizer.

        Args:
            differences: Anchor - mean of the ranks' weights, for all anchors in turn, with their dtypes and device.
                Each difference may be divided into consecutive parts.
        """
        counts = sum(map(len, differences)), sum(map(len, self.anchors))
        assert counts[0] == counts[1], f"differences have as many elements as anchors, {counts}"
        try:
            for parameter, difference in zip(self._parameters, _cut(differences, self._parameters), strict=True):
                parameter.grad = difference
            self._optimizer.step()
        finally:
            for parameter in self._parameters:
                parameter.grad = None

    @torch.inference_mode(False)
    def momenta(self) -> list[Tensor] | None:
        """Return a copy of each anchor's momentum, with the anchor's shape.

        Return None before the first momentum exists, or if the optimizer's state has neither ``momentum_buffer`` nor
        ``exp_avg`` (as in torch) nor ``m`` (as in FedAdam).
        """
        found = []
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter, {})
            held = [state[name] for name in _MOMENTA if isinstance(state.get(name), Tensor)]
            if not held:
                return None
            found.append(held[0])
        pieces = iter(found)
        counts = [len(torch.split(anchor, _PIECE_COUNT)) for anchor in self.anchors]
        return [torch.cat([next(pieces) for _ in range(count)]) for count in counts]

    @torch.inference_mode(False)
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state and options, without the anchors.

        Returns:
            ``"optimizer"``: The name of the optimizer's class.
            ``"sizes"``: The number of elements of each anchor.
            ``"state"`` and ``"param_groups"``: The optimizer's ``state_dict()``, with cloned tensors. Options that
            are functions or other objects, such as a schedule, are left out.
        """
        state = cloned(self._optimizer.state_dict())
        state["param_groups"] = [_without_objects(group) for group in state["param_groups"]]
        return {"optimizer": type(self._optimizer).__name__, "sizes": self._sizes(), **state}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of the result of :meth:`state_dict`, whose options replace those of the factory.

        A warning names the numeric options that differ, such as lr. Options that are not saved remain the factory's.

        Raises:
            ValueError: The state belongs to an optimizer of another class, or to anchors of other sizes.
        """
        saved = (state["optimizer"], list(state["sizes"]))
        present = (type(self._optimizer).__name__, self._sizes())
        if saved != present:
            raise ValueError(
                f"the saved outer state must belong to {present[0]} with anchors of {present[1]} elements, got "
                f"{saved[0]} with {saved[1]}. Use the outer_optimizer and the fragments of the run that saved it"
            )
        # The state is cloned, because torch would keep the caller's tensors if they have the right dtype and device.
        own, groups = self._optimizer.state_dict()["param_groups"], state["param_groups"]
        if len(own) == len(groups):  # if the numbers differ, torch raises an error below
            self._warn_of_changes(own, groups)
            groups = [{**mine, **saved} for mine, saved in zip(own, groups, strict=True)]
        own_parts = {name: value for name, value in state.items() if name not in ("optimizer", "sizes")}
        self._optimizer.load_state_dict(cloned({**own_parts, "param_groups": groups}))
        _use_fast_kernels(self._optimizer)

    def _warn_of_changes(self, own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
        """Warn of saved numeric options that differ from the factory's.

        Numbers that are not options of the optimizer's class, such as a count of steps, are state.
        """
        options = inspect.signature(type(self._optimizer)).parameters
        changes = {
            f"the saved {name}={new[name]} replaces {name}={old}": None
            for mine, new in zip(own, saved, strict=True)
            for name, old in mine.items()
            if name in options and _is_number(old) and _is_number(new.get(name)) and new[name] != old
        }
        if changes:
            warnings.warn(f"outer_optimizer: {', '.join(changes)}", UserWarning, stacklevel=3)

    def _sizes(self) -> list[int]:
        return [anchor.numel() for anchor in self.anchors]


@torch.inference_mode(False)
@torch.no_grad()
def check_factory(factory: object) -> None:
    """Check the option ``outer_optimizer`` by taking two steps with an optimizer of two elements.

    Raises:
        TypeError: The factory is not a function, or does not return a ``torch.optim.Optimizer``.
        ValueError: The factory fails, or returns an optimizer that cannot move an anchor.
    """
    if isinstance(factory, torch.optim.Optimizer):
        _refuse(f"an optimizer ({type(factory).__name__}) that has parameters already. Pass the factory", TypeError)
    if not callable(factory):
        validation.refuse("outer_optimizer", factory, _ALLOWED, TypeError)
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu"))
    try:
        optimizer = factory([parameter])
    except Exception as error:
        _refuse(f"one that raises {type(error).__name__}: {error}", ValueError, error)
    _check_optimizer(optimizer, [parameter])
    _use_fast_kernels(optimizer)
    _check_steps(optimizer, parameter)


def _pieces(flats: Sequence[Tensor]) -> list[Tensor]:
    """Divide flat tensors into pieces that stay in the CPU cache, which halves the time of an outer step."""
    return [piece for flat in flats for piece in torch.split(flat, _PIECE_COUNT)]


def _cut(parts: Sequence[Tensor], pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the elements of ``parts`` divided like ``pieces``. Only a piece that spans several parts is copied."""
    rest = [part for part in reversed(parts) if len(part)]
    for piece in pieces:
        found, missing = list[Tensor](), len(piece)
        while missing:
            part = rest.pop()
            if len(part) > missing:
                rest.append(part[missing:])
            found.append(part[:missing])
            missing -= len(found[-1])
        yield found[0] if len(found) == 1 else torch.cat([piece.detach()[:0], *found])


def _check_optimizer(optimizer: object, parameters: Sequence[nn.Parameter]) -> None:
    """Raise an error unless the factory's result is a minimising optimizer of ``parameters`` without weight decay."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        _refuse(f"one that returns {_with_article(type(optimizer).__name__)}", TypeError)
    name = type(optimizer).__name__
    found = [each for group in optimizer.param_groups for each in group["params"]]
    if sorted(map(id, found)) != sorted(map(id, parameters)):
        _refuse("one whose optimizer has other parameters than the given list. Pass this list to the optimizer")
    for group in optimizer.param_groups:
        if group.get("weight_decay", 0) != 0:
            _refuse(
                f"{name} with weight_decay={group['weight_decay']}, which would shrink the weights once more. Decay "
                "them in the ranks' own optimizers and pass weight_decay=0"
            )
        if group.get("maximize", False):
            _refuse(f"{name} with maximize=True, which would move the weights away from the ranks' average")
    if not {"state", "param_groups"} <= optimizer.state_dict().keys():
        _refuse(f"{name}, whose state_dict() lacks 'state' or 'param_groups'. Pass the optimizer inside the wrapper")
    if needs_closure(optimizer):
        _refuse(f"{name}, whose step needs a closure that evaluates a loss")


def _check_steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Raise ValueError if the optimizer changes or keeps its gradient, or moves the parameter by a zero gradient.

    A zero gradient reveals weight decay under any name.
    """
    name = type(optimizer).__name__
    for difference in (torch.zeros_like(parameter), torch.full_like(parameter, 0.25)):
        before, given = parameter.clone(), difference.clone()
        parameter.grad = difference
        try:
            optimizer.step()
        except Exception as error:
            _refuse(f"{name}, whose step raises {type(error).__name__}: {error}", ValueError, error)
        parameter.grad = None
        if not difference.any() and not torch.equal(parameter, before):
            _refuse(f"{name}, which moves the weights although the difference is 0. Turn off its weight decay")
        if not torch.equal(difference, given) or _keeps(optimizer, difference):
            _refuse(f"{name}, which changes or keeps the gradients that it is given")


def _keeps(optimizer: torch.optim.Optimizer, tensor: Tensor) -> bool:
    """Return whether the optimizer's state shares memory with ``tensor``."""
    states = (state.values() if isinstance(state, Mapping) else (state,) for state in optimizer.state.values())
    kept = (each for state in states for each in state if isinstance(each, Tensor))
    return any(each.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for each in kept)


def _use_fast_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Choose torch's implementations for large tensors.

    With a fused kernel, a step of SGD takes a third of the usual time. With ``foreach``, the step would need temporary
    memory of the size of all anchors.
    """
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False
        if group.get("fused", False) is None:
            group["fused"] = True


def _without_objects(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if _is_data(value)}


def _is_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def _refuse(got: str, kind: type[Exception] = ValueError, cause: Exception | None = None) -> NoReturn:
    raise kind(f"outer_optimizer must be {_ALLOWED}, got {got}") from cause
