"""Copies ``asyncdist/compiled.py`` and the modules that it lists, for tests that compile or pretend to."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from asyncdist import compiled

TOP = Path(__file__).resolve().parents[2]


def copied(folder: Path, modules: Sequence[str] = compiled.MODULES) -> ModuleType:
    """Copy the named modules, with a copy of asyncdist/compiled.py that lists them, and import that copy."""
    for module in modules:
        for source in (compiled.source_of(module), compiled.source_of(module).with_suffix(".pxd")):
            target = folder / source.relative_to(TOP / "asyncdist")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_name("__init__.py").touch()  # Cython recognises a package by this file
            shutil.copy(source, target)
    text, count = re.subn(
        r"(?<=\nMODULES: Final = )\([^()]*\)", repr(tuple(modules)), Path(compiled.__file__).read_text()
    )
    assert count == 1
    (folder / "compiled.py").write_text(text)
    spec = importlib.util.spec_from_file_location("copied_compiled", folder / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def pretend_to_compile(copy: ModuleType) -> None:
    for module in copy.MODULES:
        place = copy.folder().joinpath(*module.split(".")).with_suffix(EXTENSION_SUFFIXES[0])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
