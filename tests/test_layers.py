"""DESIGN section 2, read from the imports themselves: what may import what, and who reads the environment."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[1]

#: From the bottom up. A module may import those of lower layers alone.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "_version",
        "simulation.determinism.__init__",
        "launch.__init__",
        "functional.__init__",
        "spmd.__init__",
        "runtime.__init__",
        "collectives.__init__",
        "messaging.__init__",
        "transports.torch_distributed.__init__",
        "tensors.__init__",
        "tensors.byte_views",
        "validation",
        "compiled",
        "transports.cross_memory_attach",
        "errors",
        "tensors.means",
        "tensors.model_tensors",
        "tensors.shared_memory",
        "tensors.torch_modes",
        "transports.persistent_send",
    ),
    ("collectives.call_checker", "tensors.flat_state", "tensors.pytrees"),
    (
        "tensors.infinities",
        "tags",
        "tensors.byte_layout",
        "tensors.model_cache",
        "tensors.bucket",
        "transports.base",
        "transports.torch_distributed.gloo_transfers",
        "tensors.serialization",
    ),
    ("messaging.polling", "collectives.reductions", "transports.mpi_requests"),
    (
        "messaging.wire",
        "messaging.engine",
        "transports.local",
        "transports.matching",
        "transports.mpi",
        "transports.split_plane",
        "transports.__init__",
    ),
    ("messaging.mailboxes", "messaging.streams", "transports.torch_distributed.gloo_streams"),
    ("messaging.channels",),
    ("collectives.agreement_messages", "collectives.groups", "transports.torch_distributed.gloo"),
    ("collectives.agreement",),
    ("collectives.membership", "runtime.compute", "collectives.ordered_reduce"),
    ("collectives.group_ledger", "collectives.shared_memory_reduce"),
    (
        "collectives.nonblocking",
        "transports.torch_distributed.backends",
        "transports.torch_distributed.rendezvous",
        "transports.torch_distributed.polled",
        "transports.torch_distributed.completion_probe",
        "messaging.tensor_streams",
    ),
    ("collectives.agreed_start", "transports.torch_distributed.transport"),
    ("runtime.world",),
    ("collectives.one_sided", "collectives.error_exchange", "runtime.watchdogs"),
    ("launch.guardians", "environment", "spmd.mesh"),
    (
        "spmd.tree_collectives",
        "spmd.sharding",
        "runtime.notebooks",
        "transports.select",
        "runtime.process",
        "runtime.tracebacks",
    ),
    ("spmd.gradient_update", "spmd.shard_map", "runtime.supervision"),
    ("runtime.failure",),
    ("runtime.run", "functional.collectives", "functional.load_balance", "launch.mpirun", "launch.local_ranks"),
    ("functional.averaging", "functional.main_process"),
    ("functional.ragged_gather", "functional.rank_layout"),
    ("functional.parallel_groups",),
    ("launch.process_groups",),
    ("launch.config",),
    ("launch.spawn", "launch.doctor"),
    ("simulation.determinism.sandbox", "simulation.determinism.entropy", "simulation.determinism.one_at_a_time"),
    ("simulation.distributions",),
    ("simulation.trace", "simulation.scheduler", "simulation.models", "simulation.determinism.rng"),
    ("simulation.faults",),
    ("simulation.fabric", "simulation.event_loop"),
    ("simulation.determinism.clocks", "simulation.determinism.generators", "simulation.determinism.sets"),
    ("simulation.simulate", "simulation.shrink", "simulation.repro_command", "simulation.process_pool"),
    ("simulation.explore",),
    ("simulation.run_script",),
    ("simulation.__init__",),
    ("__init__", "cli", "pytest_plugin"),
    ("__main__",),
)


def modules(package: str) -> dict[str, ast.Module]:
    """Every module of a package by its dotted name below it, parsed."""
    folder = ROOT / package
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


ASYNCDIST = modules("asyncdist")
PROTOCOLS = modules("protocols")


def imports(tree: ast.Module) -> set[str]:
    """Every module that is imported anywhere in it, functions included; for ``from a import b`` both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def own_imports(tree: ast.Module) -> set[str]:
    """The modules of asyncdist among them, by their names in LAYERS."""
    found = {name.removeprefix("asyncdist.") for name in imports(tree) if name.startswith("asyncdist.")}
    return {name for name in found if name in ASYNCDIST}


def uses(tree: ast.Module, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports(tree))


def layer_of(name: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if name in layer)


def test_every_module_has_its_layer() -> None:
    assert sorted(ASYNCDIST) == sorted(name for layer in LAYERS for name in layer)


@pytest.mark.parametrize("name", sorted(ASYNCDIST))
def test_imports_go_down_only(name: str) -> None:
    wrong = {other for other in own_imports(ASYNCDIST[name]) if layer_of(other) >= layer_of(name)}
    assert not wrong


def test_there_is_something_to_prove() -> None:
    """The parser sees what it should: a rule that finds no import proves nothing."""
    assert {"messaging.engine", "messaging.wire", "errors"} <= own_imports(ASYNCDIST["messaging.channels"])
    assert "transports.mpi" in own_imports(ASYNCDIST["transports.select"]), "an import inside a function"
    assert uses(ASYNCDIST["transports.mpi"], "mpi4py")


def test_mpi4py_is_imported_in_the_mpi_transport_and_the_doctor_alone() -> None:
    users = {name for name, tree in ASYNCDIST.items() if uses(tree, "mpi4py")}
    assert users <= {"transports.mpi", "launch.doctor"}
    assert not any(uses(tree, "mpi4py") for tree in PROTOCOLS.values())


def test_torch_distributed_is_imported_where_processes_meet_alone() -> None:
    """Plain functions of ``launch_subprocesses`` bring collectives of their own and need a process group of torch."""
    users = {name for name, tree in ASYNCDIST.items() if uses(tree, "torch.distributed")}
    assert users == {
        "launch.process_groups",
        *(f"transports.{name}" for name in ("backends", "gloo", "meeting", "torch")),
    }
    assert not any(uses(tree, "torch.distributed") for tree in PROTOCOLS.values())


def test_a_concrete_transport_is_known_to_what_opens_it_alone() -> None:
    users = {
        name
        for name, tree in ASYNCDIST.items()
        if own_imports(tree) & {"transports.local", "transports.mpi", "transports.torch_distributed.transport"}
        and not name.startswith("transports.")
    }
    assert users == {"transports.select", "runtime.run"}


def test_asyncdist_never_imports_protocols() -> None:
    assert not [name for name, tree in ASYNCDIST.items() if uses(tree, "protocols")]


def test_protocols_import_no_transport() -> None:
    forbidden = {
        "asyncdist.transports.local",
        "asyncdist.transports.mpi",
        "asyncdist.runtime.run",
        "asyncdist.environment",
    }
    assert not {name: found for name, tree in PROTOCOLS.items() if (found := imports(tree) & forbidden)}


def test_protocols_never_ask_which_transport_they_run_on() -> None:
    asked = {"transport_name", "capabilities", "transport"}
    for name, tree in PROTOCOLS.items():
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not attributes & asked, name


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_decision_cores_know_no_loop_no_clock_and_no_chance(name: str) -> None:
    if name.endswith("_core") or name == "messages":
        for package in ("asyncio", "time", "random", "secrets", "torch"):
            assert not uses(PROTOCOLS[name], package), package
        used = {module for module in imports(PROTOCOLS[name]) if module.startswith("asyncdist.")}
        assert used <= {"asyncdist.validation"}, "options are checked in one way; all else there knows a loop"


def test_the_environment_is_read_in_the_launcher_and_before_it_alone() -> None:
    readers = set()
    for package, trees in (("asyncdist", ASYNCDIST), ("protocols", PROTOCOLS)):
        for name, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
                    readers.add(f"{package}.{name}")
            if imports(tree) & {"os.environ", "os.getenv", "os.environb"}:
                readers.add(f"{package}.{name}")
    assert readers == {"asyncdist.environment", "asyncdist.compiled"}  # which says why


@pytest.mark.parametrize("trees", [ASYNCDIST, PROTOCOLS], ids=["asyncdist", "protocols"])
def test_nothing_is_pickled_and_nothing_is_evaluated(trees: dict[str, ast.Module]) -> None:
    for name, tree in trees.items():
        for package in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
            assert not uses(tree, package), name
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & ({"eval"} if name == "environment" else {"eval", "exec", "compile"}), name


@pytest.mark.parametrize("trees", [ASYNCDIST, PROTOCOLS], ids=["asyncdist", "protocols"])
def test_every_new_tensor_names_its_device(trees: dict[str, ast.Module]) -> None:
    """``torch.set_default_device`` is the user's: with it a barrier failed, whose byte lay on a GPU."""
    makers = {maker.__name__ for maker in _device_constructors()}
    calls = [
        (name, node)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{maker}" for maker in makers}
    ]
    assert calls, "the parser sees what it should"
    assert not [
        f"{name}, line {call.lineno}" for name, call in calls if "device" not in {key.arg for key in call.keywords}
    ]


def test_every_module_says_what_it_is() -> None:
    for trees in (ASYNCDIST, PROTOCOLS):
        for name, tree in trees.items():
            assert ast.get_docstring(tree), name
