"""Tests the errors for wrong options of DiLoCo, in particular for the names that other libraries use."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from support.facts import naming

import asyncdist.tensors.codecs
import protocols
from protocols import AsyncDiLoCoPolicy, DiLoCoPolicy, FedAdam, SelectiveDiLoCoPolicy, TopK
from protocols.diloco.foreign_options import FOREIGN_OPTIONS
from protocols.diloco.options import DiLoCoOptions

SGD = torch.optim.SGD


def make(**options: Any) -> DiLoCoPolicy:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    options = {"average_every": 8, **options}
    return DiLoCoPolicy(model, torch.optim.AdamW(model.parameters()), **options)


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("sync_every", "average_every"),
        ("local_sgd_steps", "average_every"),
        ("target_batch_size", "average_every"),
        ("H", "average_every"),
        ("inner_steps", "average_every"),
        ("tau", "overlap_steps"),
        ("num_fragments", "fragments"),
        ("outer_lr", "outer_optimizer"),
        ("fragment_sync_delay", "overlap_steps"),
        ("fragment_update_alpha", "mixing"),
        ("alpha", "mixing"),
        ("should_quantize", "wire="),
        ("grad_compression", "wire="),
        ("model_fragments", "fragment_pattern"),
        ("inner_optimizer", "optimizer"),
        ("manager", "group"),
        ("pg", "group"),
        ("use_async_quorum", "group"),
        ("state_dict", "policy.state_dict()"),
        ("load_state_dict", "asyncdist.save_population"),
        ("timeout", "no time limit"),
        ("quorum_timeout", "grace_s"),
        ("dht", "group"),
        ("pin_memory", "anchor"),
        ("batch_size_per_step", "step(tokens=n)"),
        ("averaging_timeout", "grace_s"),
        ("min_replicas", "quorum"),
        ("enabled", "leaves the policy out"),
        ("params", "model"),
        ("scheduler", "the training loop"),
        ("delay_state_averaging", "overlap_steps"),
        ("client_mode", "each rank trains"),
        ("average_opt_statistics", "stays on its rank"),
        ("momentum", "outer_optimizer"),
        ("metric", "AsyncSelectiveAveragingPolicy"),
    ],
)
def test_an_option_of_another_library_has_another_name(name: str, fact: str) -> None:
    with pytest.raises(TypeError, match=naming("DiLoCoPolicy", f"{name!r}", fact)):
        make(**{name: 1})


MODEL = torch.nn.Linear(2, 2)
INNER = SGD(MODEL.parameters(), lr=0.1)
OUTER = SGD(MODEL.parameters(), lr=0.7)


@pytest.mark.parametrize(
    ("arguments", "options", "facts"),
    [
        ((object(), [MODEL], INNER, OUTER, 100), {}, ("got 5", "torchft's DiLoCo(", "average_every=sync_every")),
        ((object(), [MODEL], INNER, [OUTER]), {"sync_every": 100}, ("got 4", "torchft's DiLoCo(", "FUNCTION")),
        ((object(), MODEL, INNER, OUTER, 100), {}, ("got 5", "torchft's DiLoCo(")),
        ((object(), MODEL, INNER, 100), {}, ("got 4", "torchft's LocalSGD(", "outer_optimizer=None")),
        ((object(), MODEL, 8), {}, ("got 3", "Accelerate's LocalSGD(", "average_every=local_sgd_steps")),
        ((MODEL, INNER, 100), {}, ("got 3", "pass the others by name")),
    ],
)
@pytest.mark.parametrize("kind", [DiLoCoPolicy, AsyncDiLoCoPolicy, SelectiveDiLoCoPolicy])
def test_the_positional_arguments_of_another_library(
    kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], facts: tuple[str, ...]
) -> None:
    """Regression: Python's own error counted self and named no option."""
    with pytest.raises(TypeError, match=naming(kind.__name__, "model and optimizer", *facts)):
        kind(*arguments, **options)


def test_all_options_of_another_library_are_explained_at_once() -> None:
    given = {"accelerator": None, "model": MODEL, "local_sgd_steps": 8, "enabled": True}
    facts = [f"{name!r}: {FOREIGN_OPTIONS[name]}" for name in given if name != "model"]
    with pytest.raises(TypeError, match=naming(*facts)):
        DiLoCoPolicy(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "kind", "facts"),
    [
        ({"fragments": 0}, ValueError, ("fragments", "0")),
        ({"fragments": 1.5}, ValueError, ("fragments", "1.5")),
        ({"fragments": [torch.nn.Linear(1, 1)]}, ValueError, ("fragments", ">= 1", "fragment_pattern")),
        ({"fragments": 9, "fragment_pattern": "balanced"}, ValueError, ("fragments", "average_every (8)", "9")),
        ({"fragment_pattern": "striped"}, ValueError, ("fragment_pattern", "'strided'", "'striped'")),
        ({"fragment_pattern": [torch.nn.Linear(1, 1)]}, TypeError, ("fragment_pattern", "module names", "Linear")),
        ({"fragment_pattern": [["0"], [3]]}, TypeError, ("fragment_pattern", "3")),
        ({"fragment_pattern": None}, TypeError, ("fragment_pattern", "None")),
        ({"fragment_pattern": [["0", "1"], ["2", "3"]]}, ValueError, ("fragment_pattern", "1", "fragments", "2")),
        ({"overlap_steps": 8}, ValueError, ("overlap_steps", "average_every (8)", "8")),
        ({"mixing": 1.5}, ValueError, ("mixing", "0 to 1", "1.5")),
        ({"wire": "fp8"}, ValueError, ("wire", "'int8'", "'fp8'")),
        ({"outer_optimizer": None, "wire": "int8"}, ValueError, ("wire", "'bfloat16'", "'int8'")),
        ({"outer_optimizer": None, "error_feedback": 1.0}, ValueError, ("error_feedback", "None", "1.0")),
        ({"fragments": 5}, ValueError, ("fragments", "layers", "4", "5")),
        ({"average_every": 20, "fragments": 9, "fragment_pattern": "balanced"}, ValueError, ("tensors", "8", "9")),
        ({"outer_optimizer": SGD([torch.ones(1)], lr=1.0)}, TypeError, ("outer_optimizer", "SGD", "factory")),
        ({"outer_optimizer": functools.partial(SGD, lr=1.0, weight_decay=0.1)}, ValueError, ("weight_decay=0.1",)),
        ({"warmup_steps": -1}, ValueError, ("warmup_steps", ">= 0", "-1")),
        ({"error_feedback": 1.5}, ValueError, ("error_feedback", "1.5")),
        ({"drain_timeout_s": -1}, ValueError, ("drain_timeout_s", "-1")),
        ({"weights": "examples"}, ValueError, ("weights", "'tokens'", "'examples'")),
        ({"average_every": 0}, ValueError, ("average_every", ">= 1", "0")),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(
    options: dict[str, Any], kind: type[Exception], facts: tuple[str, ...]
) -> None:
    with pytest.raises(kind, match=naming(*facts)):
        make(**options)


def test_topk_without_error_feedback_warns_the_caller() -> None:
    for wire in ("topk", TopK(share=0.01)):
        with pytest.warns(UserWarning, match=naming("topk", "error_feedback")) as caught:
            make(wire=wire)
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(wire="topk", error_feedback=0.95)
        make(wire="q4", outer_optimizer=functools.partial(SGD, lr=0.7))


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (functools.partial(SGD, lr=0.7, momentum=0.9, nesterov=True), "SGD(lr=0.7, momentum=0.9, nesterov=True)"),
        (lambda own: SGD(own, lr=0.5, momentum=0.0), "SGD(lr=0.5)"),
        (functools.partial(FedAdam, lr=0.5), "FedAdam(lr=0.5)"),
    ],
)
def test_members_compare_the_options_of_the_outer_optimizer(factory: Any, text: str) -> None:
    """Regression: ranks with different lambdas started, and their anchors diverged."""
    assert DiLoCoOptions(outer_optimizer=factory).agreed()["outer_optimizer"] == text


def test_the_codec_with_options_is_a_public_name() -> None:
    assert protocols.TopK is asyncdist.tensors.codecs.TopK and "TopK" in protocols.__all__
