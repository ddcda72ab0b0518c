"""Reads asyncdist's docstrings for the site.

Sphinx's roles become links, ``::`` before code goes, and a function that has the name of its module is found.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import griffe

T = TypeVar("T", bound=griffe.Object)
API = Path(__file__).resolve().parents[2] / "docs" / "api"
#: Where a bare name may be found.
PACKAGES = ("asyncdist", "protocols", "asyncdist.blocking", "asyncdist.simulation")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data|obj):`~?([\w.]+)`")
_FIELD = re.compile(r"^( *)::$\n?", re.MULTILINE)


@functools.cache
def documented() -> frozenset[str]:
    """The names that pages of the reference describe, members aside."""
    return frozenset(name for page in API.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M))


class Docstrings(griffe.Extension):
    """Changes each docstring to Markdown."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Change a package when all of it has been read, for links depend on what there is."""
        loader.resolve_aliases(implicit=True, external=False)  # their paths lead through the modules replaced next
        for module in _below(pkg, griffe.Module):
            _replace_shadowed(module, pkg)
        for obj in _below(pkg, griffe.Object):
            if obj.docstring is None and obj.is_attribute and str(getattr(obj, "value", "")).startswith("_blocking"):
                text = f"Blocks in :func:`asyncdist.{obj.name}`, takes the same arguments, and returns its result."
                obj.docstring = griffe.Docstring(text, parent=obj)
            if obj.docstring is not None:
                text = _FIELD.sub("", obj.docstring.value)
                text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
                obj.docstring.value = _ROLE.sub(functools.partial(_link, obj.path, loader.modules_collection), text)


def _below(obj: griffe.Object, kind: type[T]) -> Iterator[T]:
    """An object and all that is defined in it, of one kind."""
    if isinstance(obj, kind):
        yield obj
    for member in list(obj.members.values()):
        if isinstance(member, griffe.Object):
            yield from _below(member, kind)


def _replace_shadowed(module: griffe.Module, pkg: griffe.Module) -> None:
    """Put what a package imports in the place of the submodule whose name it has, as Python does.

    For griffe ``asyncdist.simulation.replay`` is the module of that name, and not the function.
    """
    for name, path in module.imports.items():
        member = module.members.get(name)
        if isinstance(member, griffe.Module) and member.path != path:
            module.members[name] = griffe.Alias(name, pkg[path.removeprefix(f"{pkg.name}.")], parent=module)


def _link(scope: str, found: griffe.ModulesCollection, role: re.Match[str]) -> str:
    """A link to what is documented under a name, as seen from a scope; else the name as code.

    What is only listed among the attributes of its class has no anchor: the link leads to the class.
    """
    name = role[1]
    parents = scope.split(".")
    public = [f"{package}.{name}" for package in PACKAGES]
    inside = [".".join([*parents[:end], name]) for end in range(len(parents), 0, -1)]
    for path in [name, *public, *inside]:
        owner, _, last = path.rpartition(".")
        if path in documented():
            return f"[`{name}`][{path}]"
        if owner.rpartition(".")[2][:1].isupper() and owner in documented():
            if owner.partition(".")[0] not in found:  # a package that is read later
                return f"[`{name}`][{path}]"
            member = found[owner].all_members.get(last)
            if member is not None:
                return f"[`{name}`][{path if member.has_docstring else owner}]"
    return f"`{name}`"
