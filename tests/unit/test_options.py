"""Tests that forwarded options equal the constructor's, and that a misspelled option is refused."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import naming

import protocols
from asyncdist import validation
from asyncdist.integrations import pytorch, torchgfn
from asyncdist.runtime.run import WorldOptions, open_world, run
from asyncdist.tensors.codecs import Codec
from protocols import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    EvolutionStrategyPolicy,
    OneSidedSelectiveAveragingPolicy,
    ReplayBuffer,
    ReplicaAveragingPolicy,
    SpawnPolicy,
)
from protocols.declared import GROUPS, Options, by_group, declared, one_of
from protocols.exchange.options import ExchangeOptions
from protocols.population_training.hyperparameters import Space, Value

ROOT = Path(__file__).parents[2]


def in_markdown(options: list[Field[Any]]) -> str:
    """Return the options as the Markdown list that the docs contain."""
    lines = []
    for each in options:
        shown = each.metadata["shown"] or repr(each.default)
        default = "required" if each.default is MISSING else f"default `{shown}`".replace("'", '"')
        text = f"- `{each.name}` ({default}): {each.metadata['doc']}"
        lines += textwrap.wrap(text, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters())


def declared_by(policy: Any) -> tuple[type, type, list[str], list[type[Options]]]:
    """Return a policy, the TypedDict of its options, the parameters that are options, and the declaring classes."""
    options, *kinds = policy.declared_options
    names = {each.name for kind in kinds for each in declared(kind)}
    parameters = inspect.signature(inspect.unwrap(policy.__init__)).parameters.values()
    others = [each.name for each in parameters if each.name in names and each.kind is not each.VAR_KEYWORD]
    return policy, options, others, kinds


#: All exported policies, the base class first.
POLICIES: list[Any] = [
    SpawnPolicy,
    *(
        kind
        for name, kind in sorted(vars(protocols).items())
        if isinstance(kind, type)
        and issubclass(kind, SpawnPolicy)
        and kind is not SpawnPolicy
        and name == kind.__name__
    ),
]
DECLARED = [declared_by(policy) for policy in POLICIES]
#: Options whose checked values have a narrower type than the given ones.
CONVERTED: dict[str, Any] = {
    "successors": tuple[int, ...],
    "wire": Codec,
    **dict.fromkeys(("hyperparameters", "custom_hyperparameters"), Mapping[str, Space]),
    "initial": Mapping[str, Value],
}
SELECTIVE, ONE_SIDED = map(declared_by, (AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy))


def test_the_exported_policies_are_found() -> None:
    found = {
        "AverageAllPolicy",
        "ReplicaAveragingPolicy",
        "PopulationAveragingPolicy",
        "DiLoCoPolicy",
        *(each[0].__name__ for each in (SELECTIVE, ONE_SIDED)),
    }
    assert {policy.__name__ for policy in POLICIES} >= found


def declarations(names: typing.Iterable[str], kinds: list[type[Options]]) -> list[dataclasses.Field[Any]]:
    """Return the declarations of these options, in their order."""
    found = {each.name: each for kind in kinds for each in declared(kind)}
    return [found[name] for name in names]


@pytest.mark.parametrize(
    ("policy", "options", "others", "kinds"), DECLARED, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_names_of_options_are_those_declared(
    policy: Any, options: type, others: list[str], kinds: list[type[Options]]
) -> None:
    types = typing.get_type_hints(options)
    for kind in kinds:
        own = typing.get_type_hints(kind)
        for name in {each.name for each in declared(kind)} & types.keys():
            given = types[name]
            assert own[name] in (given, CONVERTED.get(name)), name
    parameters = inspect.signature(policy).parameters
    for each in declarations([*others, *types], kinds):
        assert parameters[each.name].kind is inspect.Parameter.KEYWORD_ONLY
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        assert parameters[each.name].default == default
        assert f"    {each.name} (" in policy.__doc__, "the docstring of the policy must list the option"


@pytest.mark.parametrize(
    ("policy", "options", "others", "kinds"), DECLARED[1:], ids=lambda value: getattr(value, "__name__", "")
)
def test_at_most_twelve_options_are_read_first(
    policy: Any, options: type, others: list[str], kinds: list[type[Options]]
) -> None:
    groups = by_group(declarations([*others, *options.__annotations__], kinds))
    assert len(groups[GROUPS[0]]) <= 12, [each.name for each in groups[GROUPS[0]]]


def lists_of_the_docs() -> dict[str, str]:
    """Return the lists of options in the docs, by their titles."""
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    return dict(re.findall(r"<!-- options: (.*?) -->\n(.*?)\n<!-- end of options -->", text, re.DOTALL))


def own_names(policy: Any, options: type, kinds: list[type[Options]]) -> list[str]:
    """Return the options that the policy's own module or folder declares, without the exchange policies' options."""
    own = ".".join(policy.__module__.split(".")[:3])
    shared = {in_markdown([each]) for each in declared(ExchangeOptions)}
    fields = [each for kind in kinds if f"{kind.__module__}.".startswith(f"{own}.") for each in declared(kind)]
    names = {each.name for each in fields if in_markdown([each]) not in shared}
    return [name for name in options.__annotations__ if name in names]


def test_the_docs_list_the_options_as_they_are_declared() -> None:
    selective, own = [
        declarations([*others, *options.__annotations__], kinds) for _, options, others, kinds in (SELECTIVE, ONE_SIDED)
    ]
    known = {each.name for each in selective}
    wanted = {group: in_markdown(members) for group, members in by_group(selective).items()}
    wanted["one-sided"] = in_markdown([each for each in own if each.name not in known])
    for policy, options, _, kinds in DECLARED:
        if policy not in (SELECTIVE[0], ONE_SIDED[0]) and (names := own_names(policy, options, kinds)):
            wanted[policy.__name__] = in_markdown(declarations(names, kinds))
    found = lists_of_the_docs()
    missing = [name for name in wanted if found.get(name) != wanted[name]]
    lists = [f"<!-- options: {name} -->\n{wanted[name]}\n<!-- end of options -->" for name in missing]
    if lists:  # without a traceback, which would indent the lists
        pytest.fail("the docs must contain these lists:\n\n" + "\n\n".join(lists), pytrace=False)
    assert found.keys() == wanted.keys()


@pytest.mark.parametrize(
    ("function", "others"),
    [(run, ["main", "args", "transport", "ranks", "loop"]), (inspect.unwrap(open_world), ["transport", "ranks"])],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_options_of_worlds_are_those_of_the_function(function: Callable[..., Any], others: list[str]) -> None:
    types = typing.get_type_hints(function)
    names = [name for name in inspect.signature(function).parameters if name not in others]
    assert typing.get_type_hints(WorldOptions) == {name: types[name] for name in names}


@pytest.mark.parametrize("policy", [each for each in POLICIES[1:] if each is not EvolutionStrategyPolicy])
def test_a_policy_names_the_option_that_was_meant(policy: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        TypeError, match=f"^{policy.__name__} has no option 'avg_every'; did you mean average_every\\?$"
    ):
        policy(model, optimizer, avg_every=5)
    with pytest.raises(TypeError, match=r"no option 'zzz'; the names are .*average_every, .*start_timeout_s, .*world$"):
        policy(model, optimizer, average_every=5, zzz=5)


@pytest.mark.parametrize("digits", [310, 5000])
@pytest.mark.parametrize(
    ("policy", "option"),
    [
        (protocols.DiLoCoPolicy, "average_every"),
        (protocols.DiLoCoPolicy, "fragments"),
        (protocols.GossipPolicy, "topology"),
        (protocols.GossipPolicy, "start_timeout_s"),
    ],
)
def test_an_absurd_number_is_refused_by_its_options_name(policy: Any, option: str, digits: int) -> None:
    """Regression: the constructor raised OverflowError, MemoryError or an error about the conversion of integers."""
    with pytest.raises((TypeError, ValueError), match=f"^{option} must be "):
        policy(*model_and_optimizer(), **{"average_every": 10, option: 10**digits})


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
            is_decorated = any("names_options" in ast.unparse(each) for each in node.decorator_list)
            checks_names = "averaging(policy, options" in ast.unparse(node)  # raises the policy's own error
            assert is_decorated or checks_names, f"{path}:{node.lineno}"


def test_a_constructor_shows_its_own_signature() -> None:
    parameters = inspect.signature(AsyncSelectiveAveragingPolicy).parameters
    assert list(parameters)[:5] == ["model", "optimizer", "average_every", "metric", "replacement_ratio"]
    assert validation.option_names(AverageAllPolicy.__init__)[0] == "average_every"


@pytest.mark.parametrize("option", ["islands", "coordinator", "migration"])
def test_replicas_refuse_options_of_a_divided_population(option: str) -> None:
    with pytest.raises(TypeError, match=f"no option '{option}': replicas are one population"):
        ReplicaAveragingPolicy(*model_and_optimizer(), replica_size=2, average_every=1, **{option: 2})  # type: ignore[call-arg]


def test_opposite_modes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"only one of mode and metric_mode may be passed, .*, got mode='max' and metric_mode='min'"
    ):
        pytorch.SelectiveAveraging(*model_and_optimizer(), 1, mode="max", metric_mode="min")


@pytest.mark.parametrize("value", [np.array(["mean", "best"]), np.array("mean"), torch.tensor([1, 2]), ["mean"], None])
def test_an_option_that_is_not_a_string_is_refused_by_name(value: Any) -> None:
    """Regression: the comparison with an array raised an error about its truth value."""
    with pytest.raises(ValueError, match=naming("strategy", "'mean'", "'best'")):
        one_of(typing.Literal["mean", "best"])("strategy", value)
