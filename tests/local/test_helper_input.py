"""Tests invalid arguments of helpers: one clear error that names the value and the allowed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.facts import names

import asyncdist as ad
from protocols import OneSidedSelectiveAveragingPolicy

LINE = "\n"
WRONG: Any = 5
TENSOR = torch.ones(2)


def one_sided(**options: Any) -> object:
    model = torch.nn.Linear(1, 1)
    return OneSidedSelectiveAveragingPolicy(model, torch.optim.SGD(model.parameters()), average_every=1, **options)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda: ad.new_mesh({"POP": 1}, group=[0, 1]), ("group", "[0, 1]", "Group")),
        (lambda: ad.is_main_process(group=[0, 1]), ("group", "[0, 1]", "Group")),  # type: ignore[arg-type]
        (lambda: ad.RankLayout(2, (0, 1), {}), ("agent_groups[0]", "0", "a list of ranks")),  # type: ignore[arg-type]
        (lambda: ad.RankLayout(2, "01", {}), ("agent_groups", "'01'", "a list of groups of ranks")),  # type: ignore[arg-type]
        (lambda: ad.RankLayout(1, ((0,),), None), ("clients", "None", "a dict")),  # type: ignore[arg-type]
        (lambda: ad.RankLayout(2, ((0,),), {1: 0}), ("clients[1]", "0", "a list of ranks")),  # type: ignore[dict-item]
        (lambda: ad.initialize_distributed_compute(layout="x"), ("layout", "'x'", "RankLayout", "None")),
        (lambda: ad.all_gather({"a": TENSOR}), ("tensor", "dict", "a tensor, or a tree")),
        (lambda: ad.psum(TENSOR, ["POP"]), ("axis_name", "['POP']", "the name of an axis or None")),  # type: ignore[arg-type]
        (lambda: ad.psum(TENSOR, "POP", mesh="x"), ("mesh", "'x'", "Mesh")),  # type: ignore[arg-type]
        (lambda: ad.gradient_update(WRONG, torch.optim.SGD([TENSOR])), ("loss_fn", "5", "a function")),
        (lambda: ad.agent_gradient_update(WRONG, torch.optim.SGD([TENSOR])), ("loss_fn", "5")),
        (lambda: ad.report_load_imbalance([{5: [1.0]}]), ("rank 0", "5", "strings")),  # type: ignore[dict-item]
        (lambda: ad.report_time_info([{"a": ["x"]}]), ("rank 0", "'a'", "'x'")),  # type: ignore[dict-item]
        (lambda: one_sided(timing=[]), ("timing", "[]", "a dict or None")),
    ],
)
def test_one_sentence_names_the_value_and_what_is_allowed(call: Callable[[], Any], facts: tuple[str, ...]) -> None:
    async def main(world: ad.World) -> str:
        try:
            found = call()
            await found
        except (TypeError, ValueError) as error:
            return str(error)
        return "nothing"

    said = ad.run_local(main, ranks=1)[0]
    assert names(said, *facts) and LINE not in said


def test_a_layout_takes_lists() -> None:
    layout = ad.RankLayout(3, [[0, 1]], {2: [0, 1]})  # type: ignore[arg-type, dict-item, list-item]
    assert layout == ad.RankLayout(3, ((0, 1),), {2: (0, 1)})
    assert layout.agent_group_of(1) == 0 and layout.buffer_of(0) == 2


@pytest.mark.parametrize("seconds", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), [np.float32(1.0), 2]])
def test_arrays_of_seconds_are_lists_of_them(seconds: Any) -> None:
    assert ad.report_time_info([{"step": seconds}]).times[0].total_s == 3.0
