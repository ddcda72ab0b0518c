"""Tests that the examples in public docstrings run, on two ranks of this process."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support import pages

import asyncdist as ad
from asyncdist.bench import __main__ as bench

#: The module of each block.
MODULE = """
from dataclasses import dataclass
import pytest
import torch
import asyncdist as ad
from protocols import *

@dataclass(frozen=True)
class Ask:
    number: int

@dataclass(frozen=True)
class Answer:
    number: int

def train_step(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss
"""
#: What each rank has before a block begins.
VARIABLES = """
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = loader = [torch.ones(4, 2)] * 3
"""
#: Additional entries of some docstrings, by the name of their object.
MORE = {
    "asyncdist.blocking.context": """
server, states = 0, torch.zeros(3, 2)
if world.rank == server:
    world.awaited.spawn(serve_replay_buffer([0, 1], capacity=10))
""",
    "asyncdist.progress": "import types; request = types.SimpleNamespace(query=lambda: True)\n",
    "asyncdist.integrations.pytorch.new_replica_group": """
from asyncdist.integrations.pytorch import SelectiveAveraging
new_replica_group = lambda replica_size: None
DistributedDataParallel = lambda module, process_group: module
""",
    "asyncdist.integrations.torchgfn.policies": """
from asyncdist.integrations.torchgfn import AsyncSelectiveAveragingPolicy
build, gflownet, n_iterations, group, loss = None, model, 3, None, 1.0
""",
    "protocols.ReplicaAveragingPolicy": """
module, of_my_replica = model, None
DistributedDataParallel = lambda module, process_group: module
""",
}
#: Those that are only compiled: importing them hides the ranks of this process. docs/integrations.md runs the like.
HIDING = {
    f"asyncdist.integrations.{path.stem}"
    for path in (pages.ROOT / "asyncdist" / "integrations").glob("*.py")
    if "\njoining.hide_ranks()\n" in path.read_text()
}
#: Those that are commands.
COMMANDS = {"asyncdist.bench"}
#: torchgfn needs numpy 1, which Python 3.13 and later do not have.
WITHOUT_TORCHGFN = importlib.util.find_spec("gfn") is None
_FIELD = re.compile(r"^( *)::\n\n((?:(?:\1    .*)?\n)+)", re.MULTILINE)


def documented() -> Iterator[tuple[str, Any]]:
    """Return the objects that the API reference describes, including members of classes and modules."""
    for page in sorted((pages.ROOT / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            if WITHOUT_TORCHGFN and _is_of_torchgfn(name):
                continue
            shown = found(name)
            yield name, shown
            for member, value in vars(shown).items() if isinstance(shown, type | ModuleType) else ():
                if member[0] != "_" and getattr(value, "__module__", "").startswith(("asyncdist.", "protocols.")):
                    yield f"{name}.{member}", value


def _is_of_torchgfn(name: str) -> bool:
    return name.startswith("asyncdist.integrations.torchgfn")


def found(name: str) -> Any:
    """Return the object with this name, or the module if no other object has it."""
    owner, _, last = name.rpartition(".")
    try:
        return getattr(pkgutil.resolve_name(owner), last)
    except (AttributeError, ValueError):
        return importlib.import_module(name)


def shown() -> dict[str, str]:
    """Return the code blocks by the name of their docstring's object, the first name if there are several."""
    blocks: dict[str, str] = {}
    for name, described in documented():
        for index, (_, text) in enumerate(_FIELD.findall(f"{inspect.getdoc(described) or ''}\n")):
            text = textwrap.dedent(text)
            if text not in blocks.values():
                blocks[f"{name}{f' {index}' if index else ''}"] = text
    return blocks


BLOCKS = shown()


def test_all_blocks_are_found() -> None:
    assert len(BLOCKS) >= 13 and len(HIDING) >= 3
    expected = MORE.keys() | HIDING | COMMANDS
    assert {name for name in expected if not (WITHOUT_TORCHGFN and _is_of_torchgfn(name))} <= BLOCKS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BLOCKS.keys() - HIDING - COMMANDS))
def test_what_is_shown_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shown")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look into it
    text = BLOCKS[name]
    if name == "asyncdist.pytest_plugin":
        exec(compile(f"{MODULE}{text}", name, "exec"), vars(module))
        ad.simulate(module.test_everybody_agrees, ranks=4, seed=3, strict=True).value()
    elif "open_world()" in text:
        exec(compile(f"{MODULE}{VARIABLES}{text}", name, "exec"), vars(module))
    else:
        body = textwrap.indent(f"{VARIABLES}{MORE.get(name, '')}{text}", "    ")
        is_awaited = re.search(r"\b(await|async)\b", text) is not None
        main = f"{MODULE}\n{'async ' if is_awaited else ''}def main(world):\n{body}"
        exec(compile(main, name, "exec"), vars(module))
        ad.run_local(module.main if is_awaited else ad.blocking.hosted(module.main), ranks=2, strict=True)


@pytest.mark.parametrize("name", sorted(HIDING))
def test_what_hides_ranks_compiles(name: str) -> None:
    compile(BLOCKS[name], name, "exec")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_what_is_to_be_typed_is_understood(name: str) -> None:
    for line in BLOCKS[name].strip().splitlines():
        words = shlex.split(line)
        assert bench._parser().parse_args(words[words.index("asyncdist.bench") + 1 :]).name in line
