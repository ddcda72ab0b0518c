"""Tests which policies may skip a step that has nothing to do (``SpawnPolicy._begin_step``)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import protocols
from protocols.policy import SpawnPolicy


def policies() -> list[type[SpawnPolicy]]:
    for found in pkgutil.walk_packages(protocols.__path__, "protocols."):
        importlib.import_module(found.name)
    found, rest = [], [SpawnPolicy]
    while rest:
        subclasses = rest.pop().__subclasses__()
        found += subclasses
        rest += subclasses
    ours = {cls for cls in found if cls.__module__.removeprefix("asyncdist.").startswith("protocols")}
    return sorted(ours, key=lambda cls: cls.__qualname__)


@pytest.mark.parametrize("cls", policies(), ids=lambda cls: cls.__name__)
def test_a_policy_with_its_own_step_decides_when_to_skip_it(cls: type[SpawnPolicy]) -> None:
    """Regression: ranks of a sharded replica skipped a swap for which the others of the replica waited forever.

    They inherited ``_begin_step`` of the policy whose ``_step`` they replace.
    """
    if "_step" in vars(cls) and "_begin_step" not in vars(cls):
        assert "super()._step(" in inspect.getsource(vars(cls)["_step"])
