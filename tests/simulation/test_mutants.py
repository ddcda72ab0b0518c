"""The table of the mutants: each defect has one or a reason, and each scenario exists."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[2]
DEFECTS = set(range(1, 16))


@pytest.fixture(scope="module")
def table() -> Iterator[Any]:
    """The module of that name, which has too plain a name to be imported by it."""
    name = "mutations_table"
    spec = importlib.util.spec_from_file_location(name, TOP / "tools" / "mutations" / "table.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def test_every_defect_has_a_mutant_or_a_reason(table: Any) -> None:
    mutants, left_out = table.MUTANTS, table.LEFT_OUT
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names)
    numbers = {mutant.defect for mutant in mutants if isinstance(mutant.defect, int)}
    assert numbers | set(left_out) == DEFECTS
    assert not numbers & set(left_out)
    others = {"network", "deadline", "route", "island", "reading", "sharded replica"}
    assert {mutant.defect for mutant in mutants} - numbers == others


def test_every_scenario_exists(table: Any) -> None:
    files = {"scenarios": "tools/mutations/scenarios.py"}
    files |= {
        f"simulation.{name}": f"tests/simulation/{name}.py"
        for name in (
            "scenarios",
            "one_sided_scenarios",
            "deadline_scenarios",
            "island_scenarios",
            "read_scenarios",
            "sharded_replica_scenarios",
        )
    }
    for mutant in table.MUTANTS:
        module, _, function = mutant.scenario.partition(":")
        tree = ast.parse((TOP / files[module]).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, mutant.name
