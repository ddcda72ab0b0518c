"""Tests the names of other systems that asyncdist offers, and their table in docs/migrating.md.

``NAMES`` contains every name that the five sources offer. The tests that the table links check how each name behaves.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_LISTED = """
DistributedContext DistributedContextmpi4py initialize_distributed_compute initialize_distributed_compute_mpi4py
average_gradients average_models gather_distributed_data report_load_imbalance report_time_info
barrier compute_and_broadcast gather_from_all_ranks gather_scalar_from_all_ranks reduce_and_broadcast zero_first
zero_only is_distributed is_main_process
SpawnPolicy AverageAllPolicy AverageAllPolicympi4py AsyncSelectiveAveragingPolicy
AsyncSelectiveAveragingPolicympi4pyFast AsyncSelectiveAveragingPolicympi4pyGeneral
expose_params check_policy check_agent print_stats print_time
_compute_worst_ranks_by_ratio _determine_ranks_for_averaging _compute_averaging_weights
MultiprocessConfig launch_subprocesses init_and_run init_dist init_process_group_from_backend
default_backend get_distributed_backend set_distributed_backend all_to_all
psum pmean pmin pmax all_gather POP_AXIS_NAME DP_AXIS_NAME gradient_update agent_gradient_update
split_key_to_devices tree_device_put get_global_ranks get_process_id is_dist_initialized shmap_map shmap_vmap
"""
_CONTEXT = """
my_rank world_size num_training_ranks agent_group_size agent_groups agent_group_id train_global_group assigned_buffer
assigned_training_ranks buffer_group dc_mpi4py is_buffer_rank is_training_rank cleanup
"""
_OF_A_CONTEXT = _CONTEXT.split()
_OF_STATISTICS = ["agents_killed", "averaging_ranks", "num_replacements", "total_iterations"]
_OF_BUFFERS = ["ReplayBufferManager", "scoring_function", "remote_manager_rank", "get_metadata"]
_DROPPED = ["capture_comm", "poll_interval_s", "send_termination_signal"]
NAMES = [*_LISTED.split(), *_OF_A_CONTEXT, *_OF_STATISTICS, *_OF_BUFFERS, *_DROPPED, "resolve"]
#: Options and steps whose old names no longer exist, and options of objects that a call creates.
RENAMED = {"expose_params", "check_policy", "check_agent"} | {name for name in NAMES if name.startswith("_")}
RENAMED |= {*_DROPPED, *_OF_A_CONTEXT, *_OF_BUFFERS}


def rows() -> list[tuple[list[str], list[str], list[tuple[str, str]]]]:
    """Return the table's rows: foreign names, asyncdist's names, and tests by file and function."""
    text = (ROOT / "docs" / "migrating.md").read_text()
    table = re.search(r"<!-- names -->\n(.*?)<!-- end of names -->", text, re.DOTALL)
    assert table is not None
    found = []
    for line in table[1].splitlines()[2:]:
        there, here, tested = line.strip("|").split("|")
        names = re.findall(r"`(\w+)`", there)
        places = re.findall(r"`((?:asyncdist|protocols)\.[\w.]+)`", here)
        if "the same of" in here:
            places = [f"{places[0]}.{name}" for name in names]
        found.append((names, places, [(path, name) for name, path in re.findall(r"\[(\w+)\]\(\.\./(.*?)\)", tested)]))
    return found


ROWS = rows()


def resolve(path: str) -> Any:
    """Return the object named ``asyncdist.name``, ``protocols.module.name`` or ``protocols.Class.method``."""
    package, *parts = path.split(".")
    found: Any = importlib.import_module(package)
    for part in parts:
        found = getattr(found, part)
    return found


def test_every_name_is_in_the_table_once() -> None:
    assert sorted(name for names, _, _ in ROWS for name in names) == sorted(NAMES)


@pytest.mark.parametrize(("there", "here", "tests"), ROWS, ids=[row[0][0] for row in ROWS])
def test_a_row_names_places_and_tests_that_exist(
    there: list[str], here: list[str], tests: list[tuple[str, str]]
) -> None:
    assert there and here and tests
    for place in here:
        if place.rpartition(".")[2] not in _OF_A_CONTEXT:  # attributes of an object, see below
            assert resolve(place) is not None
    for path, function in tests:
        assert re.search(rf"^\s*(async )?def {function}\(", (ROOT / path).read_text(), re.MULTILINE), (path, function)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RENAMED])
def test_a_port_is_an_import(name: str) -> None:
    """The old name works too: it is an alias of the new one."""
    import asyncdist
    import protocols

    homes = (
        asyncdist,
        protocols,
        protocols.OneSidedSelectiveAveragingPolicy,
        protocols.OneSidedStatistics,
        asyncdist.MultiprocessConfig,
    )
    assert any(hasattr(home, name) for home in homes)


def test_aliases_are_the_same_thing() -> None:
    import asyncdist
    import protocols

    assert asyncdist.DistributedContextmpi4py is asyncdist.DistributedContext
    assert asyncdist.initialize_distributed_compute_mpi4py is asyncdist.initialize_distributed_compute
    assert protocols.AverageAllPolicympi4py is protocols.AverageAllPolicy
    assert protocols.AsyncSelectiveAveragingPolicympi4pyFast is protocols.OneSidedSelectiveAveragingPolicy
    assert protocols.AsyncSelectiveAveragingPolicympi4pyGeneral is protocols.OneSidedSelectiveAveragingPolicy


def test_a_context_has_all_that_it_had() -> None:
    import asyncdist

    async def main(world: asyncdist.World) -> list[str]:
        context = await asyncdist.initialize_distributed_compute(num_remote_buffers=1)
        return [name for name in _OF_A_CONTEXT if not hasattr(context, name)]

    assert asyncdist.run_local(main, ranks=2, strict=True) == [[], []]


def test_what_is_dropped_says_why() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text()
    for name in _DROPPED:
        assert re.search(rf"\| `{name}` \| dropped, because ", text), name


def names_of_scripts() -> dict[str, list[str]]:
    """Return the names that torchgfn's scripts import, by the module in which torchgfn has them."""
    text = (ROOT / "docs" / "migrating.md").read_text()
    table = re.search(r"<!-- script names -->\n(.*?)<!-- end of script names -->", text, re.DOTALL)
    assert table is not None
    lines = [line.strip("|").split("|") for line in table[1].splitlines()[2:]]
    return {there.strip(" `"): re.findall(r"`(\w+)`", names) for there, names in lines}


@pytest.mark.slow  # torchgfn takes seconds to import
def test_what_a_script_of_torchgfn_imports_has_its_arguments() -> None:
    """The module is offered under the same names; ``gfn.utils.distributed`` is parsed, since it would load MPI."""
    pytest.importorskip("gfn", reason="torchgfn is not installed")
    from asyncdist.integrations import torchgfn

    found = names_of_scripts()
    for names in found.values():
        assert not [name for name in names if not callable(getattr(torchgfn, name)) and name != "ContainerUnion"]
    for module in ("gfn.containers", "gfn.containers.replay_buffer_manager"):
        there = importlib.import_module(module)
        for name in set(found[module]) - {"ContainerUnion"}:
            theirs, ours = (list(inspect.signature(getattr(home, name)).parameters) for home in (there, torchgfn))
            assert ours[: len(theirs)] == theirs, name
            assert {*ours[len(theirs) :]} <= {"communication_backend", "timing"}, (
                "only options of later versions may be missing"
            )
            assert issubclass(getattr(torchgfn, name), getattr(there, name))
    spec = importlib.util.find_spec("gfn.utils.distributed")
    assert spec is not None and spec.origin is not None
    defined = {
        node.name: [each.arg for each in node.args.args]
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert set(defined) <= set(found["gfn.utils.distributed"])
    for name, theirs in defined.items():
        assert theirs == list(inspect.signature(getattr(torchgfn, name)).parameters)[: len(theirs)], name
