"""Finds copies of the weights, by name and value, among the tensors that an optimizer stores.

Mirrors, which equal the weights after each optimizer step, are recognised by their values. Slow weights, origins and
compensations are recognised by their names. Any other tensor that closely resembles the weights probably follows them
in some unknown way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn

from asyncdist.tensors.model_tensors import local_part
from asyncdist.tensors.optimizers.wrapped import attributes_of, items_of, wrapped_optimizers

Kind: TypeAlias = Literal["mirror", "slow", "origin", "compensation"]

#: Names of slow weights in the states of Ranger, and of Lookahead in pytorch-optimizer, torch_optimizer, timm and
#: lookahead-pytorch.
SLOW: Final = frozenset(
    (
        "slow_params",
        "slow_param",
        "slow_weights",
        "slow_buffer",
        "slow_buff",
        "slow",
        "cached_params",
        "shadow",
        "lookahead_params",
        "lookahead_slow_buff",
        "prev_param",
    )
)
#: Names of master weights. They are mirrors even if their values differ.
_MASTERS: Final = frozenset(
    (
        "master",
        "master_param",
        "master_params",
        "master_weight",
        "master_weights",
        "params_master",
        "fp32_param",
        "fp32_params",
        "fp32_master",
        "param_fp32",
    )
)
_ORIGINS: Final = frozenset(("x0",))
#: Names of the rounding errors of the weights (Kahan summation).
_COMPENSATIONS: Final = frozenset(("kahan_comp", "kahan_compensation", "compensation"))
#: Names of bias-corrected moving averages of the weights, which cannot be recognised by their values.
_LAGGING: Final = frozenset(("ema", "param_ema", "pbar"))
#: Names of copies of the weights to leave unchanged: Prodigy's initial weights, and copies used only within a step.
_KEPT: Final = frozenset(("p0", "param_init", "old_p", "backup_params", "param_buffer"))
#: Names of moments and gradients. With some loss functions, these may equal the weights.
_MOMENTS: Final = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "prev", "prev_grad", "previous_grad", "last_grad", "grad")
)
_SAMPLE_COUNT: Final = 2048
_SAMPLE_TENSORS: Final = 64
#: Minimum number of matching values. Fewer may match by chance.
PROOF_COUNT: Final = 16


def has_stepped(optimizer: Any) -> bool:
    """Return whether an optimizer's step counts and moments show that it has taken a step."""
    return any(
        isinstance(parameter, Tensor) and isinstance(state, Mapping) and _shows_step(parameter, state)
        for each in wrapped_optimizers(optimizer)
        for parameter, state in each.state.items()
    )


def _shows_step(parameter: Tensor, state: Mapping[str, Any]) -> bool:
    if "step" in state:
        return bool(state["step"])
    moments = [value for key, value in state.items() if isinstance(value, Tensor) and key not in SLOW | _MASTERS]
    return any(not _is_untouched(local_part(each), local_part(parameter)) for each in moments)


def _is_untouched(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether a tensor still has an initial value: zeros, or a copy of the parameter."""
    if type(tensor) not in (Tensor, nn.Parameter) or not _is_floating(tensor):
        return False
    return not tensor.any() or (tensor.shape == parameter.shape and _are_equal(tensor, parameter))


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A floating-point tensor that an optimizer stores for a parameter, viewed in the parameter's shape.

    Attributes:
        kind: How the tensor must be updated when the parameter is replaced, if it is a copy of the weights; otherwise,
            None.
    """

    parameter: Tensor
    tensor: Tensor
    kind: Kind | None = None


def kind_of(key: str, stored: Sequence[StoredTensor]) -> Kind | None:
    """Return the way in which an optimizer's tensors named ``key`` follow the weights, or None if it is unknown."""
    if key in _MASTERS or (key not in _MOMENTS and _is_mirror(stored)):
        return "mirror"
    if key in SLOW:
        return "slow"
    if key in _COMPENSATIONS:
        return "compensation"
    return "origin" if key in _ORIGINS else None


def follows_unknown(key: str, stored: Sequence[StoredTensor]) -> bool:
    """Return whether the tensors named ``key``, whose kind is unknown, seem to follow the weights."""
    return key in _LAGGING or (key not in _KEPT | _MOMENTS and _tracks(stored))


def _is_mirror(stored: Sequence[StoredTensor]) -> bool:
    """Return whether all tensors equal their parameters, and at least one parameter is not constant."""
    if not all(_are_equal(each.tensor, local_part(each.parameter)) for each in stored):
        return False
    values = (local_part(each.parameter).detach().reshape(-1) for each in stored)
    return any(bool((each != each[0]).any()) for each in values if each.numel())


def _are_equal(tensor: Tensor, parameter: Tensor) -> bool:
    few = parameter.detach().reshape(-1)[:8]
    if not torch.equal(tensor.reshape(-1)[:8].to(few), few):  # eight values suffice to rule out nearly all tensors
        return False
    return torch.equal(tensor.to(parameter), parameter.detach())


def _tracks(stored: Sequence[StoredTensor]) -> bool:
    """Return whether the RMS distance of all tensors to their parameters is below half of the parameters' spread."""
    own = sample_of([local_part(each.parameter) for each in stored])
    other = sample_of([each.tensor for each in stored])
    if own.numel() < PROOF_COUNT or not (own.isfinite().all() and other.isfinite().all()):
        return False
    spread, distance = float(own.std()), float((own - other).square().mean().sqrt())
    return spread > 0.0 and distance < 0.5 * spread


def stored_tensors(optimizer: Any, model: nn.Module) -> Iterator[tuple[str, str, list[StoredTensor]]]:
    """Yield (description, name, tensors) for the tensors that an optimizer and the optimizers inside it store."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    seen = set(parameters)
    for each in wrapped_optimizers(optimizer):
        kind = type(each).__name__
        by_key: dict[str, list[StoredTensor]] = {}
        for parameter, state in each.state.items():
            if id(parameter) not in parameters or not isinstance(state, Mapping):
                continue
            for key, value in state.items():
                shaped = _shaped_as(value, local_part(parameter))
                if shaped is not None and id(value) not in seen:
                    seen.add(id(value))
                    by_key.setdefault(key, []).append(StoredTensor(parameter, shaped))
        for key, stored in by_key.items():
            yield f"{key!r} in the state of {kind}", key, stored
        for name, tensors in _tensor_attributes(each):
            found = _matched([tensor for tensor in tensors if id(tensor) not in seen], list(parameters.values()))
            if found:
                yield f"{name!r} of {kind}", "", found


def _tensor_attributes(optimizer: Any) -> Iterator[tuple[str, list[Tensor]]]:
    for name, value in attributes_of(optimizer).items():
        tensors = [each for each in _leaves(value, 3) if each.is_floating_point() and each.numel()]
        if tensors:
            yield name, tensors
    yield "param_groups", [each for group in optimizer.param_groups for each in group["params"]]


def _matched(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[StoredTensor]:
    """Pair parameters with tensors that equal them. A flat tensor of all trained parameters is split into its parts."""
    left = [parameter for parameter in parameters if parameter.is_floating_point()]
    found: list[StoredTensor] = []
    for tensor in tensors:
        for parameter in left:
            shaped = _shaped_as(tensor, local_part(parameter))
            if shaped is not None and _are_equal(shaped, local_part(parameter)):
                found.append(StoredTensor(parameter, shaped))
                left = [other for other in left if other is not parameter]
                break
        else:
            found += _parts_of(tensor, [each for each in parameters if each.requires_grad])
    return found


def _parts_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[StoredTensor]:
    """Return each parameter's view of a flat tensor. Return nothing if the tensor is not all parameters in order."""
    locals_ = [local_part(parameter) for parameter in parameters]
    if flat.ndim != 1 or len(locals_) < 2 or flat.numel() != sum(each.numel() for each in locals_):
        return []
    views = torch.split(flat.detach(), [each.numel() for each in locals_])
    stored = [StoredTensor(p, view.view(each.shape)) for p, each, view in zip(parameters, locals_, views, strict=True)]
    return stored if _is_mirror(stored) else []


def _shaped_as(value: Any, parameter: Tensor) -> Tensor | None:
    """Return a dense floating-point tensor viewed with the parameter's shape, or None if this is impossible."""
    if not isinstance(value, Tensor):
        return None
    tensor: Tensor = local_part(value).detach()
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    if not is_plain or tensor.dtype.is_complex != parameter.dtype.is_complex or not _is_floating(tensor):
        return None
    if tensor.shape == parameter.shape:
        return tensor
    has_room = tensor.ndim == 1 and tensor.numel() == parameter.numel() > 1 and tensor.is_contiguous()
    return tensor.view(parameter.shape) if has_room else None


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def not_contained(copies: Sequence[StoredTensor], optimizer: Any) -> list[StoredTensor]:
    """Return the copies of weights whose tensors are not in the ``state_dict`` of an optimizer.

    If the ``state_dict`` shares no memory with the optimizer's state, it contains copies of the tensors, so values are
    compared.
    """
    leaves = _strided(_leaves(optimizer.state_dict(), 8))
    own = _strided(_leaves([list(each.state.values()) for each in wrapped_optimizers(optimizer)], 5))
    storages = {each.untyped_storage().data_ptr() for each in leaves}
    if not own or any(each.untyped_storage().data_ptr() in storages for each in own):
        return [copy for copy in copies if copy.tensor.untyped_storage().data_ptr() not in storages]
    return [copy for copy in copies if not _has_values(leaves, copy.tensor)]


def _strided(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each for each in map(local_part, tensors) if each.layout is torch.strided and each.numel()]


def _has_values(leaves: Sequence[Tensor], tensor: Tensor) -> bool:
    values = tensor.detach().reshape(-1)
    alike = (each for each in leaves if each.dtype == values.dtype and each.numel() == values.numel())
    return any(torch.equal(each.detach().reshape(-1).to(values.device), values) for each in alike)


def _leaves(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, Mapping)):
        for each in items_of(value):
            yield from _leaves(each, depth - 1)


def sample_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return a sample of the tensors' values as float32 on the host, with one transfer per device.

    The sample has evenly spaced values from evenly spaced tensors.
    """
    chosen = tensors[:: max(1, len(tensors) // _SAMPLE_TENSORS)]
    count = max(1, _SAMPLE_COUNT // max(1, len(chosen)))
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in chosen:
        values = tensor.detach()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        step = max(1, values.numel() // count)
        by_device.setdefault(tensor.device, []).append(values.reshape(-1)[: step * count : step].to(torch.float32))
    samples = [torch.cat(few).cpu() for few in by_device.values()]
    return samples[0] if len(samples) == 1 else torch.cat([torch.zeros(0, device="cpu"), *samples])
