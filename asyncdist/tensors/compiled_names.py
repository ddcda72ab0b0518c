"""Removes the prefixes that :func:`torch.compile` adds to names, so that compiled and plain models have equal names.

The wrapper of a compiled module holds the module as ``_orig_mod``, which becomes a part of all names inside it. The
wrapper of Lightning's Fabric holds it under two names, which Fabric removes only from the names in its state dict.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

_PREFIX: Final = re.compile(r"(?<![^.])(_orig_mod|_forward_module|_original_module)(\.|$)")


def plain_name(name: str) -> str:
    """Return the name that a tensor or module would have without the wrappers of :func:`torch.compile` and Fabric."""
    return _PREFIX.sub("", name).removesuffix(".")


def plain_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's state dict with the names of the unwrapped model."""
    plain = OrderedDict((plain_name(name), value) for name, value in state.items())
    if len(plain) < len(state):  # the model has modules with this name that torch.compile has not made
        return state
    return _with_versions(plain, {plain_name(name): version for name, version in _versions(state).items()})


def state_for(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state dict of a compiled or plain model with the names of ``model``, which has the same layout."""
    own = list(model.state_dict())
    if state.keys() == set(own):
        return state
    plain = plain_state(state)
    versions = _versions(plain)
    modules = {name: versions[plain_name(name)] for name, _ in model.named_modules() if plain_name(name) in versions}
    return _with_versions(OrderedDict((name, plain[plain_name(name)]) for name in own), modules)


def _versions(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the modules' version numbers, which ``load_state_dict`` reads, by module name."""
    return getattr(state, "_metadata", {})


def _with_versions(state: OrderedDict[str, Any], versions: Mapping[str, Any]) -> OrderedDict[str, Any]:
    vars(state)["_metadata"] = OrderedDict(versions)
    return state
