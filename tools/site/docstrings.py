"""Reads asyncdist's docstrings for the site.

Sphinx's roles become links, ``::`` before code is removed, and a function is found even if its module has its name.
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
#: Packages in which a name without a module is searched.
PACKAGES = ("asyncdist", "protocols", "asyncdist.blocking", "asyncdist.simulation")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data|obj):`~?([\w.]+)`")
_FIELD = re.compile(r"^( *)::$\n?", re.MULTILINE)


@functools.cache
def documented() -> frozenset[str]:
    """Return the names that the reference pages describe, without members of classes."""
    return frozenset(name for page in API.glob("*.md") for name in re.findall(r"^::: (\S+)", page.read_text(), re.M))


class Docstrings(griffe.Extension):
    """Converts each docstring to Markdown."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Convert a package's docstrings after the whole package has been read, since links depend on its names."""
        loader.resolve_aliases(implicit=True, external=False)  # before their modules are replaced
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
    """Yield an object and everything defined in it, if it is of the given kind."""
    if isinstance(obj, kind):
        yield obj
    for member in list(obj.members.values()):
        if isinstance(member, griffe.Object):
            yield from _below(member, kind)


def _replace_shadowed(module: griffe.Module, pkg: griffe.Module) -> None:
    """Replace each submodule by the object of the same name that its package imports, as Python does.

    Without this, griffe takes ``asyncdist.simulation.replay`` for the module instead of the function.
    """
    for name, path in module.imports.items():
        member = module.members.get(name)
        if isinstance(member, griffe.Module) and member.path != path:
            module.members[name] = griffe.Alias(name, pkg[path.removeprefix(f"{pkg.name}.")], parent=module)


def _link(scope: str, found: griffe.ModulesCollection, role: re.Match[str]) -> str:
    """Return a Markdown link to the object that a role names, resolved from ``scope``, or the name as code.

    An attribute that only its class's docstring lists has no anchor, so its link leads to the class.
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
