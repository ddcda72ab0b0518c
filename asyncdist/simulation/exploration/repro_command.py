"""Formats the shell command that repeats a run from its scenario, seed and fault plan."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from asyncdist import environment
from asyncdist.simulation.faults import Fault

#: Names of the ``sysconfig`` paths that every Python has on ``sys.path``, and of the scripts folder.
_OWN_PATHS: Final = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")


def repeat_line(scenario: Any, seed: int, faults: Sequence[Fault] | None = None, hash_seed: str | None = None) -> str:
    """Return a shell command that runs one seed of a scenario, and fails if the seed fails.

    A scenario may provide a method ``repeat_line`` that returns the command. If ``faults`` is None, the seed determines
    the fault plan. ``hash_seed`` is the PYTHONHASHSEED of the process that ran the seed.
    """
    own = getattr(scenario, "repeat_line", None)
    if own is not None:
        return str(own(seed, faults))
    imports, name = _reference(scenario)
    plan = ""
    if faults is not None:
        plan = f", faults=[{', '.join(map(expression_of, faults))}]"
        kinds = sorted({type(fault).__name__ for fault in faults})
        imports = [*([f"from asyncdist.simulation import {', '.join(kinds)}"] if kinds else []), *imports]
    # Seeds run with one thread of torch, because the order in which it adds numbers depends on this.
    imports = ["import torch", "torch.set_num_threads(1)", *imports]
    statement = "; ".join([*imports, f"{name}({seed}{plan}).check_ranks()"])
    paths = _import_paths()
    prefix = f"PYTHONPATH={shlex.quote(os.pathsep.join(paths))} " if paths else ""
    hashes = f"{environment.HASH_SEED_VARIABLE}={hash_seed} " if hash_seed is not None else ""
    return f"{hashes}{prefix}{python_command()} -c {shlex.quote(statement)}"


def hash_seed_prefix(default: str | None = None) -> str:
    """Return a shell prefix that sets PYTHONHASHSEED as in this process, or "" if it is unset or ``default``."""
    number = environment.hash_seed()
    return "" if number in (None, default) else f"{environment.HASH_SEED_VARIABLE}={number} "


def expression_of(fault: Fault) -> str:
    """Return the fault as a Python expression, without fields that have their default values."""
    return f"{type(fault).__name__}({', '.join(f'{name}={value!r}' for name, value in fields_of(fault).items())})"


def fields_of(fault: Fault) -> dict[str, Any]:
    """Return the fault's fields that differ from their default values."""
    values = ((f, getattr(fault, f.name)) for f in dataclasses.fields(fault))
    return {f.name: value for f, value in values if value != f.default}


def _reference(scenario: Any) -> tuple[list[str], str]:
    """Return an expression for the scenario, preceded by the import statements that it needs."""
    if isinstance(scenario, functools.partial):
        imports, inner = _reference(scenario.func)
        given = [*map(repr, scenario.args), *(f"{name}={value!r}" for name, value in scenario.keywords.items())]
        return ["import functools", *imports], f"functools.partial({', '.join([inner, *given])})"
    if not hasattr(scenario, "__qualname__"):  # an instance that has ``__call__``
        imports, _ = _reference(type(scenario))
        return imports, repr(scenario)
    module = scenario.__module__
    if module == "__main__":  # the main script can also be imported by its module name
        module = Path(getattr(sys.modules["__main__"], "__file__", "")).stem or module
    return [f"from {module} import {scenario.__qualname__.partition('.')[0]}"], scenario.__qualname__


def _import_paths() -> list[str]:
    """Return the entries of ``sys.path`` that are missing in an interpreter started in the current folder."""
    here = Path.cwd()
    own = [Path(sysconfig.get_path(name)).resolve() for name in _OWN_PATHS]
    found: dict[str, None] = {}
    for entry in map(Path, filter(None, sys.path)):
        path = entry.resolve()
        if path.is_dir() and path != here and not any(path.is_relative_to(folder) for folder in own):
            found[str(path.relative_to(here) if path.is_relative_to(here) else path)] = None
    return list(found)


def python_command() -> str:
    """Return the shell word that starts the running Python interpreter."""
    running = Path(sys.executable)
    if shutil.which("python") == str(running):
        return "python"
    return shlex.quote(str(running.relative_to(Path.cwd()) if running.is_relative_to(Path.cwd()) else running))
