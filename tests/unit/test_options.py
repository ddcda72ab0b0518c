"""The names of options: what may be passed on is what a constructor takes, and a misspelled one is found out."""

from __future__ import annotations

import ast
import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.facts import naming

from asyncdist import validation
from asyncdist.integrations import pytorch, torchgfn
from asyncdist.runtime.run import WorldOptions, open_world, run
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    OneSidedSelectiveAveragingPolicy,
    ReplayBuffer,
    ReplicaAveragingPolicy,
    SpawnPolicy,
)
from protocols.average_all import AverageAllOptions
from protocols.options import MemberOptions, ReplicaOptions, SelectiveOptions

ROOT = Path(__file__).parents[2]
MODEL = ["model", "optimizer", "average_every"]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters())


def types_of(function: Callable[..., Any], *but: str) -> dict[str, Any]:
    types = typing.get_type_hints(function)
    return {name: types[name] for name in inspect.signature(function).parameters if name not in ("self", *but)}


@pytest.mark.parametrize(
    ("options", "function", "others"),
    [
        (MemberOptions, SpawnPolicy.__init__, [*MODEL, "metric", "metric_mode", "resets_optimizer"]),
        (AverageAllOptions, AverageAllPolicy.__init__, MODEL),
        (SelectiveOptions, AsyncSelectiveAveragingPolicy.__init__, [*MODEL, "metric"]),
        (
            ReplicaOptions,
            AsyncSelectiveAveragingPolicy.__init__,
            [*MODEL, "metric", *(SelectiveOptions.__annotations__.keys() - ReplicaOptions.__annotations__)],
        ),
        (WorldOptions, run, ["main", "args", "transport", "ranks", "loop"]),
        (WorldOptions, inspect.unwrap(open_world), ["transport", "ranks"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_options_passed_on_are_those_of_the_function(
    options: type, function: Callable[..., Any], others: list[str]
) -> None:
    assert typing.get_type_hints(options) == types_of(function, *others)


POLICIES = [AsyncSelectiveAveragingPolicy, AverageAllPolicy, OneSidedSelectiveAveragingPolicy, ReplicaAveragingPolicy]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_names_the_option_that_was_meant(policy: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        TypeError, match=f"^{policy.__name__} has no option 'avg_every'; did you mean average_every\\?$"
    ):
        policy(model, optimizer, avg_every=5)
    with pytest.raises(TypeError, match=r"no option 'zzz'; allowed: .*average_every, .*start_timeout_s, .*world$"):
        policy(model, optimizer, average_every=5, zzz=5)


def test_a_replay_buffer_names_the_option_that_was_meant() -> None:
    with pytest.raises(TypeError, match=naming("ReplayBuffer", "'nam'", "name")):
        ReplayBuffer(0, nam="x")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "option", "meant"),
    [
        (
            lambda **options: pytorch.SelectiveAveraging(*model_and_optimizer(), 1, **options),
            "replace_ratio",
            "replacement_ratio",
        ),
        (functools.partial(torchgfn.AverageAllPolicy, 1), "optimizer_stat", "optimizer_state"),
        (functools.partial(torchgfn.AsyncSelectiveAveragingPolicy, None, 1), "treshold", "threshold"),
        (functools.partial(torchgfn.AsyncSelectiveAveragingPolicy, None, 1), "metricmode", "metric_mode"),
    ],
)
def test_an_integration_names_the_option_that_was_meant(make: Callable[..., Any], option: str, meant: str) -> None:
    with pytest.raises(TypeError, match=naming(repr(option), meant)):
        make(**{option: 1})


@pytest.mark.parametrize("path", sorted((ROOT / "asyncdist" / "integrations").glob("*.py")), ids=lambda path: path.stem)
def test_every_integration_checks_the_names_of_its_options(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and node.args.kwarg is not None:
            assert any("names_options" in ast.unparse(each) for each in node.decorator_list), f"{path}:{node.lineno}"


def test_a_constructor_shows_its_own_signature() -> None:
    parameters = inspect.signature(AsyncSelectiveAveragingPolicy).parameters
    assert list(parameters)[:4] == ["model", "optimizer", "average_every", "replacement_ratio"]
    assert validation.option_names(AverageAllPolicy.__init__)[0] == "average_every"


@pytest.mark.parametrize("option", ["islands", "coordinator", "migration"])
def test_replicas_refuse_options_of_a_divided_population(option: str) -> None:
    with pytest.raises(TypeError, match=f"no option '{option}': replicas are one population"):
        ReplicaAveragingPolicy(*model_and_optimizer(), replica_size=2, average_every=1, **{option: 2})  # type: ignore[call-arg]


def test_opposite_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="mode is 'max' and metric_mode is 'min'; both mean the same"):
        pytorch.SelectiveAveraging(*model_and_optimizer(), 1, mode="max", metric_mode="min")
