"""Formats the shell command that repeats a run, and reads and writes fault plans, which are JSON lists of faults."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import reprlib
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from asyncdist import environment
from asyncdist.simulation.faults import Fault, check_plan

#: Names of the ``sysconfig`` paths that every Python has on ``sys.path``, and of the scripts folder.
_OWN_PATHS: Final = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_KINDS: Final = {kind.__name__: kind for kind in get_args(Fault)}


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


class ScriptError(Exception):
    """Raised if ``asyncdist sim`` cannot run a script. The message is one line for the user."""


def read_faults(given: str, ranks: int) -> tuple[Fault, ...]:
    """Read the fault plan of the option ``--faults``. Raise ScriptError if it cannot be read or is invalid.

    ``given`` is a JSON list of objects such as ``{"kind": "Kill", "rank": 1, "at_s": 0.5}``, or the path of such a
    file.
    """
    text, source = given, "the fault plan"
    if not given.lstrip().startswith(("[", "{")):
        source = repr(given)
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ScriptError(f"the fault plan {source} cannot be read: {reason}") from error
    try:
        plan = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ScriptError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(plan, list):
        raise ScriptError(f"{source} must be a list of faults, got {type(plan).__name__} {reprlib.repr(plan)}")
    faults = tuple(_fault(item, f"fault {number} of {source}") for number, item in enumerate(plan, 1))
    try:
        check_plan(faults, ranks)
    except ValueError as error:
        raise ScriptError(f"{source}: {error}") from error
    return faults


def _fault(item: Any, where: str) -> Fault:
    if not isinstance(item, dict):
        raise ScriptError(f'{where} must be like {{"kind": "Kill", "rank": 1, "at_s": 0.5}}, got {reprlib.repr(item)}')
    if item.get("kind") not in list(_KINDS):
        raise ScriptError(f"{where}: kind must be one of {', '.join(sorted(_KINDS))}, got {item.get('kind')!r}")
    kind = _KINDS[item["kind"]]
    fields = {name: value for name, value in item.items() if name != "kind"}
    names = kind.__dataclass_fields__
    for name in fields:
        if name not in names:
            raise ScriptError(f"{where}: a field of {kind.__name__} must be one of {', '.join(names)}, got {name!r}")
    try:
        fault: Fault = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ScriptError(f"{where}, {kind.__name__}: {error}") from error
    return fault


def format_faults(faults: Sequence[Fault]) -> str:
    """Format a fault plan as JSON for ``--faults``."""
    return json.dumps([{"kind": type(fault).__name__, **fields_of(fault)} for fault in faults])
