"""Builds training steps that compute a loss, average its gradients along a mesh axis, and apply an optimizer.

A functional optimizer, as in torchopt, has ``init(params) -> state`` and ``update(grads, state, params=params) ->
(updates, state)``. A ``torch.optim.Optimizer`` stores its state, and changes its parameters in place.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import optree
import torch
from torch import Tensor

from asyncdist.spmd.mesh import Axis, find_axis
from asyncdist.spmd.tree_collectives import pmean, reporting_failure
from asyncdist.tensors import pytrees
from asyncdist.tensors.byte_views import dtype_name

#: A training step: ``async (opt_state, params, /, *args, **kwargs) -> (loss, params, opt_state)``.
Update: TypeAlias = Callable[..., Coroutine[Any, Any, tuple[Any, Any, Any]]]


class FunctionalOptimizer(Protocol):
    """Interface of optimizers whose caller passes the state to each update and gets a new state."""

    def init(self, params: Any, /) -> Any:
        """Return the initial optimizer state for these parameters."""

    def update(self, updates: Any, state: Any, /, *, params: Any) -> tuple[Any, Any]:
        """Return the values to add to the parameters, and the new optimizer state."""


def gradient_update(
    loss_fn: Callable[..., Any],
    optimizer: FunctionalOptimizer | torch.optim.Optimizer,
    dp_axis_name: str | None = None,
    has_aux: bool = False,
) -> Update:
    """Build a training step from a loss function and an optimizer.

    Args:
        loss_fn: Plain function ``(params, *args, **kwargs) -> loss``, where the loss is a floating 0-d tensor. If
            ``has_aux`` is true, it returns ``(loss, aux)``.
        optimizer: An object with ``init`` and ``update``, as in torchopt, or a ``torch.optim.Optimizer``.
        dp_axis_name: Name of the open mesh's axis along which gradients are averaged; None for no averaging.
        has_aux: Whether ``loss_fn`` also returns ``aux``, which may be any tree.

    Returns:
        ``async (opt_state, params, /, *args, **kwargs) -> (value, params, opt_state)``. ``params`` is a tree of
        floating tensors. ``value`` is the detached return value of ``loss_fn`` on this rank. With a functional
        optimizer, the returned parameters are new. A ``torch.optim.Optimizer`` changes its parameters in place, ignores
        ``opt_state``, and requires that ``params`` are exactly its parameters. The loss may also use them through their
        module.

        The training step raises TypeError if a parameter or the loss is not a floating tensor. It raises ValueError if
        the loss depends on no parameter, or if ``params`` are not the optimizer's parameters. It also raises the errors
        of :func:`asyncdist.pmean`. If it fails on one rank before gradients are averaged, the other ranks of the axis
        get a RemoteError.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or ``loss_fn`` is not callable.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the parameters, got {loss_fn!r:.80}")
    is_functional = all(callable(getattr(optimizer, name, None)) for name in ("init", "update"))
    if not isinstance(optimizer, torch.optim.Optimizer) and (not is_functional or inspect.isclass(optimizer)):
        allowed = "an object with init and update, or a torch.optim.Optimizer"
        raise TypeError(f"optimizer must be {allowed}, got {optimizer!r}")
    return functools.partial(_update, loss_fn, optimizer, dp_axis_name, has_aux)


async def _update(
    loss_fn: Callable[..., Any],
    optimizer: FunctionalOptimizer | torch.optim.Optimizer,
    dp_axis_name: str | None,
    has_aux: bool,
    opt_state: Any,
    params: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, Any, Any]:
    with reporting_failure(_axes(dp_axis_name)):
        leaves, spec = _checked_params(params)
        if isinstance(optimizer, torch.optim.Optimizer):
            _check_same(optimizer, leaves, spec)
            trained = params
        else:
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            trained = optree.tree_unflatten(spec, leaves)
        value, gradients = _value_and_gradients(functools.partial(loss_fn, trained, *args, **kwargs), leaves, has_aux)
    gradients = await pmean(gradients, dp_axis_name)
    if isinstance(optimizer, torch.optim.Optimizer):
        _step(optimizer, leaves, gradients)
        return value, params, opt_state
    frozen = optree.tree_unflatten(spec, [leaf.detach() for leaf in leaves])
    with torch.no_grad():
        updates, opt_state = optimizer.update(optree.tree_unflatten(spec, gradients), opt_state, params=frozen)
        params = optree.tree_map(lambda param, update: (param + update).to(param.dtype), frozen, updates)
        return value, params, opt_state


def agent_gradient_update(
    loss_fn: Callable[..., Any],
    optimizer: FunctionalOptimizer | torch.optim.Optimizer,
    dp_axis_name: str | None = None,
    has_aux: bool = False,
    attach_fn: Callable[[Any, Any], Any] | None = None,
    detach_fn: Callable[[Any], Any] | None = None,
) -> Update:
    """Build a training step that updates the parameters inside an agent's state.

    Args:
        loss_fn: Plain function ``(agent_state, *args, **kwargs) -> loss``, or ``(loss, aux)`` if ``has_aux`` is true.
        optimizer: An object with ``init`` and ``update``, as in torchopt, or a ``torch.optim.Optimizer``.
        dp_axis_name: Name of the open mesh's axis along which gradients are averaged; None for no averaging.
        has_aux: Whether ``loss_fn`` also returns ``aux``, which may be any tree.
        attach_fn: Function ``(agent_state, params) -> agent_state`` that returns a copy of the state with new
            parameters. By default it replaces ``params`` in a dataclass, a named tuple or a mapping.
        detach_fn: Function ``agent_state -> params`` that returns the parameters to train; by default the state's
            ``params``.

    Returns:
        ``async (opt_state, agent_state, /, *args, **kwargs) -> (value, agent_state, opt_state)``.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or ``loss_fn`` is not callable.
    """
    attach = attach_fn or _attach_params
    detach = detach_fn or _detach_params

    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of the agent state, got {loss_fn!r:.80}")

    def loss_of_params(params: Any, agent_state: Any, /, *args: Any, **kwargs: Any) -> Any:
        return loss_fn(attach(agent_state, params), *args, **kwargs)

    update_params = gradient_update(loss_of_params, optimizer, dp_axis_name, has_aux)

    async def update(opt_state: Any, agent_state: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        with reporting_failure(_axes(dp_axis_name)):
            params = detach(agent_state)
        value, params, opt_state = await update_params(opt_state, params, agent_state, *args, **kwargs)
        return value, attach(agent_state, params), opt_state

    return update


def _axes(dp_axis_name: str | None) -> list[Axis]:
    return [] if dp_axis_name is None else [find_axis(dp_axis_name, None)]


def _checked_params(params: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    leaves, spec = pytrees.flatten_tensors(params, "params")
    for index, leaf in enumerate(leaves):
        if not leaf.is_floating_point() and not leaf.is_complex():
            path, kind = pytrees.leaf_paths(spec, "params")[index], dtype_name(leaf.dtype)
            raise TypeError(
                f"{path} must be a floating or complex tensor, because only those have gradients, got {kind}"
            )
    return leaves, spec


def _check_same(optimizer: torch.optim.Optimizer, leaves: Sequence[Tensor], spec: optree.PyTreeSpec) -> None:
    """Raise ValueError unless the leaves are exactly the optimizer's parameters, and all require a gradient."""
    name = type(optimizer).__name__
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for index, leaf in enumerate(leaves):
        path = pytrees.leaf_paths(spec, "params")[index] if id(leaf) not in owned or not leaf.requires_grad else ""
        if path:
            what = "does not require a gradient" if id(leaf) in owned else f"is not a parameter of the {name}"
            raise ValueError(f"{path} must be a parameter of the {name} that requires a gradient, but it {what}")
    missing = len(owned) - len({id(leaf) for leaf in leaves})
    if missing:
        raise ValueError(f"params must be all {len(owned)} parameters of the {name}, got {len(owned) - missing}")


def _value_and_gradients(
    compute: Callable[[], Any], leaves: Sequence[Tensor], has_aux: bool
) -> tuple[Any, list[Tensor]]:
    with torch.enable_grad():
        value = compute()
        if has_aux and not (isinstance(value, tuple) and len(value) == 2):
            raise TypeError(f"loss_fn must return (loss, aux) with has_aux=True, got a {type(value).__qualname__}")
        loss = value[0] if has_aux else value
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss must be a floating 0-d tensor, got {loss!r:.80}")
        if not loss.is_floating_point() or loss.dim():
            kind = f"{dtype_name(loss.dtype)} of shape {list(loss.shape)}"
            raise TypeError(f"the loss must be a floating 0-d tensor, got {kind}")
        connected = loss.requires_grad
        found = torch.autograd.grad(loss, leaves, allow_unused=True) if connected else [None] * len(leaves)
    if all(gradient is None for gradient in found):
        raise ValueError("the loss must depend on the parameters: loss_fn must compute it from its first argument")
    gradients = [
        torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    ]
    return optree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value), gradients


def _step(optimizer: torch.optim.Optimizer, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Take one optimizer step with these gradients, and then restore each parameter's ``grad``."""
    kept = [leaf.grad for leaf in leaves]
    try:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
    finally:
        for leaf, own in zip(leaves, kept, strict=True):
            leaf.grad = own


def _attach_params(agent_state: Any, params: Any) -> Any:
    if isinstance(agent_state, Mapping):
        return {**agent_state, "params": params}
    if hasattr(agent_state, "_replace"):
        return agent_state._replace(params=params)
    return dataclasses.replace(agent_state, params=params)


def _detach_params(agent_state: Any) -> Any:
    if isinstance(agent_state, Mapping) and "params" in agent_state:
        return agent_state["params"]
    if hasattr(agent_state, "params") and (dataclasses.is_dataclass(agent_state) or hasattr(agent_state, "_replace")):
        return agent_state.params
    raise TypeError(
        "the agent's state must be a dataclass, a named tuple or a mapping with params unless attach_fn and detach_fn "
        f"are passed, got a {type(agent_state).__qualname__}"
    )
