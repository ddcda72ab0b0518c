"""Reads asyncdist's docstrings for the site: Sphinx's roles become links, and ``::`` before code goes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import griffe

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

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one; give one to a blocking form that a decorator makes."""
        if obj.docstring is None and obj.is_attribute and str(getattr(obj, "value", "")).startswith("_blocking"):
            text = f"Blocks in :func:`asyncdist.{obj.name}`, takes the same arguments, and returns its result."
            obj.docstring = griffe.Docstring(text, parent=obj)
        if obj.docstring is not None:
            scope = obj.path
            text = _FIELD.sub("", obj.docstring.value)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = _ROLE.sub(lambda role: _link(role[1], scope), text)


def _link(name: str, scope: str) -> str:
    """A link to what is documented under that name, as seen from a scope; else the name as code."""
    parents = scope.split(".")
    public = [f"{package}.{name}" for package in PACKAGES]
    inside = [".".join([*parents[:end], name]) for end in range(len(parents), 0, -1)]
    for path in [name, *public, *inside]:
        owner = path.rpartition(".")[0]
        is_class = owner.rpartition(".")[2][:1].isupper()
        if path in documented() or (is_class and owner in documented()):
            return f"[`{name}`][{path}]"
    return f"`{name}`"
