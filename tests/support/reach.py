"""What a test comes to, read from the sources: the names that it uses, itself and through the tests' own helpers.

It follows names to what the same file defines, what it imports from other files of the tests, and programs that it
names (``"scripts/policies.py"``) or holds as a text. It does not follow asyncdist and the protocols: a name counts
where tests use it.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
_SUBJECTS = ("asyncdist", "protocols")
_PACKAGES = ("support", "helpers", "conformance", "simulation")


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the tests.

    Attributes:
        path: of it.
        tree: the whole.
        defined: what it defines outside of functions, by name.
        imported: the file that a name comes from, and how it is called there; None for the file itself.
        subjects: names that stand for the packages that are tested, or for what was imported from them.
    """

    path: Path
    tree: ast.Module
    defined: dict[str, list[ast.stmt]]
    imported: dict[str, tuple[Path, str | None]]
    subjects: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Reach:
    """What was found from one function on.

    Attributes:
        names: identifiers, attributes, and texts.
        offered: what is used of asyncdist and the protocols: ``ad.name``, or a name that was imported from there.
        attributes: ``.name``, and ``name=`` of a call.
        assert_count: statements that compare what came out.
    """

    names: frozenset[str]
    offered: frozenset[str]
    attributes: frozenset[str]
    assert_count: int


@functools.cache
def source(path: Path) -> Source:
    """The file, parsed."""
    tree = ast.parse(path.read_text(), str(path))
    defined: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        for name in _defines(node):
            defined.setdefault(name, []).append(node)
    imported = {name: origin for node in ast.walk(tree) for name, origin in _imports(node)}
    return Source(path, tree, defined, imported, _subjects(tree))


def reach(path: Path, function: str) -> Reach:
    """What ``function``, of the file at ``path``, comes to."""
    names: set[str] = set()
    offered: set[str] = set()
    attributes: set[str] = set()
    asserts: set[ast.AST] = set()
    todo: list[tuple[Source, ast.AST]] = [(source(path), node) for node in source(path).defined[function]]
    seen: set[ast.AST] = set()
    while todo:
        file, root = todo.pop()
        if root in seen:
            continue
        seen.add(root)
        for node in ast.walk(root):
            name = _name(node)
            if isinstance(node, ast.Assert) or (
                isinstance(node, ast.Call) and (_name(node.func) or "").startswith("assert")
            ):
                asserts.add(node)
            if name is None:
                continue
            names.add(name)
            if isinstance(node, (ast.Attribute, ast.keyword)):
                attributes.add(name)
            if isinstance(node, ast.Name) and file.subjects.get(name) is not None:
                offered.add(str(file.subjects[name]))
            if isinstance(node, ast.Attribute) and file.subjects.get(_name(node.value) or "", "") is None:
                offered.add(name)
            todo += [(file, found) for found in file.defined.get(name, ())]
            if name in file.imported:
                origin, there = file.imported[name]
                other = source(origin)
                if there is not None:
                    todo += [(other, found) for found in other.defined.get(there, ())]
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in file.imported:
                other = source(file.imported[node.value.id][0])
                todo += [(other, found) for found in other.defined.get(node.attr, ())]
            if "import asyncdist as ad" in name:
                program = ast.parse(textwrap.dedent(name))
                todo.append((Source(file.path, program, file.defined, file.imported, _subjects(program)), program))
            if name.endswith(".py"):
                todo += [(source(found), source(found).tree) for found in TESTS.glob(f"scripts/{Path(name).name}")]
    return Reach(frozenset(names), frozenset(offered), frozenset(attributes), len(asserts))


def _name(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
            return name
    return None


def _subjects(tree: ast.Module) -> dict[str, str | None]:
    """What a file calls the packages that are tested, None, and what it imports from them, with its name there."""
    found: dict[str, str | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: None for alias in node.names if alias.name in _SUBJECTS}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _SUBJECTS:
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [found.id for target in targets for found in ast.walk(target) if isinstance(found, ast.Name)]


def _imports(node: ast.AST) -> Iterator[tuple[str, tuple[Path, str | None]]]:
    if not isinstance(node, ast.ImportFrom) or node.module is None or node.module.partition(".")[0] not in _PACKAGES:
        return
    folder = TESTS.joinpath(*node.module.split("."))
    for alias in node.names:
        here = alias.asname or alias.name
        if folder.with_suffix(".py").exists():
            yield here, (folder.with_suffix(".py"), alias.name)
        elif (folder / f"{alias.name}.py").exists():
            yield here, (folder / f"{alias.name}.py", None)
