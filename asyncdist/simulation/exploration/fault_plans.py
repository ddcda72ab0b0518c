"""Reads and writes the fault plans of ``asyncdist sim``: JSON lists of faults."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from asyncdist.simulation.exploration.repro_command import fields_of
from asyncdist.simulation.faults import Fault, check_plan

_KINDS: Final = {kind.__name__: kind for kind in get_args(Fault)}


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
