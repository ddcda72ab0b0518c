"""Tests which folders import which, and that only the allowed modules read the environment or import MPI.

``docs/architecture.md`` shows the diagram that :func:`diagram` draws from the same imports.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[2]

#: Folders of the package from the bottom up, each with the folders that it may import. All folders may import the
#: ground.
FOLDERS: dict[str, set[str]] = {
    "ground": set(),
    "tensors": set(),
    "transports": {"tensors"},
    "recording": set(),
    "messaging": {"tensors", "transports", "recording"},
    "collectives": {"tensors", "transports", "messaging"},
    "story": {"recording"},
    "live": {"messaging", "story"},
    "runtime": {"tensors", "transports", "recording", "messaging", "collectives", "live", "story"},
    "spmd": {"tensors", "transports", "messaging", "collectives", "runtime"},
    "functional": {"tensors", "transports", "messaging", "collectives", "runtime", "spmd"},
    "launch": {"tensors", "transports", "messaging", "collectives", "live", "story", "runtime", "spmd", "functional"},
    "blocking": {"recording", "collectives", "runtime", "spmd", "functional"},
    "integrations": {"tensors", "functional", "blocking"},
    "bench": {"messaging"},
    "report": {"recording", "live", "story"},
    "planning": {"recording"},
    "simulation": {"tensors", "transports", "recording", "messaging", "collectives", "runtime", "blocking"},
    "interface": {"tensors", "transports", "live", "runtime", "launch", "blocking", "simulation"}
    | {"planning", "report", "story"},
}
#: Modules of ``asyncdist/`` itself that every module may import; the other modules there are the public interface.
GROUND = {
    *("_version", "argument_types", "compiled", "environment", "errors", "local_host", "rank_program"),
    *("tags", "validation", "waits", "wording"),
}
#: Folders whose modules belong to the ground: every module may import them.
GROUND_FOLDERS = {"host_memory", "launchers", "trust"}
INTERFACE = {"__init__", "__main__", "cli", "pytest_plugin"}
#: Modules that only decide: without an event loop, a clock, or randomness that is not an argument.
PURE = {
    "exchange.ledger",
    "exchange.messages",
    "exchange.schedule",
    "joining.messages",
    "one_sided.selection",
    "ranking",
    "replay_buffer.store",
    "replica_averaging.members",
    "selective.islands.layout",
    "selective.islands.migrants",
    "selective.lifecycle",
    "selective.member",
    "selective.messages",
    "selective.plan",
    "selective.roster",
    "selective.rounds",
    "selective.selection",
    "selective.waiting",
}


def modules(package: str) -> dict[str, ast.Module]:
    """Return every module of a package by its dotted name, parsed, without the scripts of ``asyncdist init``."""
    folder = ROOT / package
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if not {"_compiled", "starters"} & set(path.parts) and path.parent != ROOT / "asyncdist" / "protocols":
            found[".".join(path.relative_to(folder).with_suffix("").parts)] = ast.parse(path.read_text(), str(path))
    return found


ASYNCDIST = modules("asyncdist")
PROTOCOLS = modules("protocols")


@functools.cache
def imports(tree: ast.Module) -> frozenset[str]:
    """Return every module that is imported in a tree, even inside functions; for ``from a import b`` both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports must be absolute"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def own_imports(tree: ast.Module) -> set[str]:
    """Return asyncdist's modules among the imports, by their names in the package."""
    found = {name.removeprefix("asyncdist.") for name in imports(tree) if name.startswith("asyncdist.")}
    return {name for name in found if name in ASYNCDIST}


def protocol_imports(tree: ast.Module) -> set[str]:
    """Return the modules of protocols among the imports, by their names in the package."""
    found = {name.removeprefix("asyncdist.protocols.") for name in imports(tree)}
    return {name for name in found if name in PROTOCOLS}


def uses(tree: ast.Module, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports(tree))


def folder_of(name: str) -> str:
    folder, dot, _ = name.partition(".")
    if dot:
        return "ground" if folder in GROUND_FOLDERS else folder
    return "ground" if name in GROUND else "interface"


def edges() -> set[tuple[str, str]]:
    """Return the pairs of folders whose first one imports the second one."""
    found = {(folder_of(name), folder_of(other)) for name, tree in ASYNCDIST.items() for other in own_imports(tree)}
    return {(folder, other) for folder, other in found if folder != other}


def diagram() -> str:
    """Return the folders and their imports in Mermaid's language, without arrows that follow from others."""
    all_edges = edges()
    above = {folder: {other for start, other in all_edges if start == folder} for folder in FOLDERS}
    lines = ["graph TD"]
    for folder in reversed(FOLDERS):
        implied = {far for near in above[folder] for far in _reachable(near, above)}
        lines += [f"    {folder} --> {other}" for other in FOLDERS if other in above[folder] - implied]
    return "\n".join(lines)


def _reachable(folder: str, above: dict[str, set[str]]) -> set[str]:
    return above[folder].union(*(_reachable(other, above) for other in above[folder]))


def test_every_module_has_its_folder() -> None:
    assert {name for name in ASYNCDIST if "." not in name} == GROUND | INTERFACE
    assert {folder_of(name) for name in ASYNCDIST} == set(FOLDERS)


@pytest.mark.parametrize("name", sorted(ASYNCDIST))
def test_imports_go_down_only(name: str) -> None:
    allowed = FOLDERS[folder_of(name)] | {folder_of(name), "ground"}
    assert not {other for other in own_imports(ASYNCDIST[name]) if folder_of(other) not in allowed}


@pytest.mark.parametrize("package", ["asyncdist", "protocols"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """This includes modules of one folder, and imports inside functions and for annotations."""
    trees, find = {"asyncdist": (ASYNCDIST, own_imports), "protocols": (PROTOCOLS, protocol_imports)}[package]
    left = {name: find(tree) - {name} for name, tree in trees.items()}
    while free := {name for name, used in left.items() if not used & left.keys()}:
        left = {name: used for name, used in left.items() if name not in free}
    assert not left


def test_roles_know_neither_their_state_machine_nor_its_owner() -> None:
    """Roles do not call back into their owner, so that one module executes all instructions of a member."""
    roles = {name for name in PROTOCOLS if name.startswith("selective.roles.")}
    owners = {"selective.member", "selective.roles.member_roles"}
    users = {name.rpartition(".")[2] for name in roles if protocol_imports(PROTOCOLS[name]) & owners}
    assert users == {"member_roles"}


def test_constructors_of_protocols_take_only_users_callables() -> None:
    """Constructors get objects instead of callbacks, since a callback's effect cannot be found from its call."""
    made = [
        node
        for tree in PROTOCOLS.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    arguments = [each for node in made for each in (*node.args.args, *node.args.kwonlyargs) if each.annotation]
    callables = {each.arg for each in arguments if each.annotation and "Callable" in ast.unparse(each.annotation)}
    assert callables <= {"metric", "on_event"}


def test_there_is_something_to_prove() -> None:
    """The parser finds known imports, since a rule that finds no import proves nothing."""
    assert {"messaging.engine", "messaging.wire", "errors"} <= own_imports(ASYNCDIST["messaging.channels"])
    assert "selective.member" in protocol_imports(PROTOCOLS["selective.policy"])
    assert "transports.mpi" in own_imports(ASYNCDIST["transports.select"]), "imports inside functions must be found"
    assert uses(ASYNCDIST["transports.mpi"], "mpi4py")
    assert len(edges()) > 20


@pytest.mark.slow
def test_the_diagram_of_the_documentation_is_that_of_the_imports() -> None:
    assert f"```mermaid\n{diagram()}\n```" in (ROOT / "docs" / "architecture.md").read_text(), f"now:\n{diagram()}"


def test_no_folder_is_too_large_to_look_through() -> None:
    for package in ("asyncdist", "protocols"):
        for folder in {path.parent for path in (ROOT / package).rglob("*.py") if "_compiled" not in path.parts}:
            assert len(list(folder.glob("*.py"))) <= 15, folder


def test_mpi4py_is_imported_only_by_the_mpi_modules_and_a_rival() -> None:
    users = {name for name, tree in ASYNCDIST.items() if uses(tree, "mpi4py")}
    assert users == {"transports.mpi", "launch.doctor", "bench.blocking_messages"}
    assert not any(uses(tree, "mpi4py") for tree in PROTOCOLS.values())


def test_torch_distributed_is_imported_only_by_meeting_modules() -> None:
    """Plain functions of ``launch_subprocesses`` bring collectives of their own and need a process group of torch."""
    users = {name for name, tree in ASYNCDIST.items() if uses(tree, "torch.distributed")}
    meeting = {f"meeting.{name}" for name in ("rendezvous", "stores")}
    transport = {f"transports.torch_distributed.{name}" for name in ("gloo_groups", "transport", *meeting)}
    others = {
        "launch.process_groups",
        "launch.place_claims",
        "bench.blocking_messages",
        "integrations.replicas",
    }
    assert users == others | transport
    assert not any(uses(tree, "torch.distributed") for tree in PROTOCOLS.values())


def test_a_concrete_transport_is_known_to_what_opens_it_alone() -> None:
    both = {"transports.mpi", "transports.mpi_survival"}
    trees = {name: ast.unparse(tree) for name, tree in ASYNCDIST.items() if name.startswith("transports.")}
    concrete = {name for name, text in trees.items() if re.search(r"^    name = '", text, re.M)} | both
    assert {"transports.local", "transports.torch_distributed.transport"} < concrete, (
        "the pattern must find the transports"
    )
    users = {name for name, tree in ASYNCDIST.items() if own_imports(tree) & concrete}
    assert users - both == {"transports.select", "runtime.run", "messaging.user_requests.progress"}


def test_asyncdist_imports_protocols_only_to_offer_or_measure() -> None:
    users = {folder_of(name) for name, tree in ASYNCDIST.items() if uses(tree, "asyncdist.protocols")}
    assert users == {"integrations", "bench"}


def test_package_finds_its_protocols_if_a_user_has_that_name_too() -> None:
    """Users write ``from protocols import ...``, which may find another package on their path."""
    for trees in (ASYNCDIST, PROTOCOLS):
        for name, tree in trees.items():
            assert not uses(tree, "protocols"), f"{name} must import from asyncdist.protocols"


def test_protocols_import_no_transport() -> None:
    for name, tree in PROTOCOLS.items():
        assert not {
            other for other in own_imports(tree) if folder_of(other) in ("transports", "launch", "simulation")
        }, name
        assert not own_imports(tree) & {"runtime.run", "environment"}, name


def test_protocols_never_ask_which_transport_they_run_on() -> None:
    asked = {"transport_name", "capabilities", "transport"}
    for name, tree in PROTOCOLS.items():
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not attributes & asked, name


@pytest.mark.parametrize("name", sorted(PURE))
def test_decision_cores_know_no_loop_no_clock_and_no_chance(name: str) -> None:
    for package in ("asyncio", "time", "random", "secrets"):
        assert not uses(PROTOCOLS[name], package), package
    assert not uses(PROTOCOLS[name], "torch") or name == "replay_buffer.store", (
        "only the replay buffer's store may import torch"
    )
    assert own_imports(PROTOCOLS[name]) <= {"validation", "tensors.byte_views"}, (
        "a decision core may import only modules without an event loop"
    )


@pytest.mark.slow
def test_environment_is_read_in_few_modules_or_before_they_load() -> None:
    readers = set()
    for package, trees in (("asyncdist", ASYNCDIST), ("protocols", PROTOCOLS)):
        for name, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv"):
                    readers.add(f"{package}.{name}")
            if imports(tree) & {"os.environ", "os.getenv", "os.environb"}:
                readers.add(f"{package}.{name}")
    programs = {"asyncdist.rank_program", "asyncdist.launch.guardians"}
    of_launchers = {name for name in readers if name.startswith("asyncdist.launchers.")}
    # each of the other modules states the reason
    assert readers - of_launchers == {"asyncdist.environment", "asyncdist.compiled", *programs}
    assert of_launchers


@pytest.mark.slow
@pytest.mark.parametrize("trees", [ASYNCDIST, PROTOCOLS], ids=["asyncdist", "protocols"])
def test_nothing_is_pickled_and_nothing_is_evaluated(trees: dict[str, ast.Module]) -> None:
    for name, tree in trees.items():
        # torchgfn sends containers between its ranks with dill
        allowed = {"dill"} if name == "integrations.torchgfn.buffers" else set[str]()
        for package in {"pickle", "marshal", "shelve", "dill", "cloudpickle"} - allowed:
            assert not uses(tree, package), name
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & ({"eval"} if name == "rank_program" else {"eval", "exec", "compile"}), name


@pytest.mark.parametrize("trees", [ASYNCDIST, PROTOCOLS], ids=["asyncdist", "protocols"])
def test_every_new_tensor_names_its_device(trees: dict[str, ast.Module]) -> None:
    """Regression: with the user's ``torch.set_default_device``, a barrier failed, because its byte was on a GPU."""
    makers = {maker.__name__ for maker in _device_constructors()}
    calls = [
        (name, node)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{maker}" for maker in makers}
    ]
    assert calls, "the parser must find calls"
    assert not [
        f"{name}, line {call.lineno}" for name, call in calls if "device" not in {key.arg for key in call.keywords}
    ]


def test_every_module_says_what_it_is() -> None:
    for trees in (ASYNCDIST, PROTOCOLS):
        for name, tree in trees.items():
            assert ast.get_docstring(tree), name


def test_names_of_tests_have_at_most_60_characters() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    assert not [name for text in texts for name in re.findall(r"\bdef (test_\w{56,})\(", text)]


def test_type_checkers_find_each_module_by_both_names() -> None:
    modules = {path.relative_to(ROOT) for path in (ROOT / "protocols").rglob("*.py")}
    stubs = {path.relative_to(ROOT / "asyncdist") for path in (ROOT / "asyncdist" / "protocols").rglob("*.pyi")}
    assert {path.with_suffix(".pyi") for path in modules} == stubs, "run ./tools/setup, which writes the stubs"
