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
    """``asyncdist sim`` cannot do what it is asked for: the message is one line for the user."""


def read_faults(given: str, ranks: int) -> tuple[Fault, ...]:
    """Read the fault plan of ``--faults``.

    Args:
        given: a file, or what would be in it: a JSON list of ``{"kind": "Kill", "rank": 1, "at_s": 0.5}``.
        ranks: how many there are.

    Raises:
        ScriptError: the file cannot be read, or the plan makes no sense; says where.
    """
    text, source = given, "the fault plan"
    if not given.lstrip().startswith("["):
        source = repr(given)
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ScriptError(f"the fault plan {source} cannot be read: {reason}") from error
    try:
        plan = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ScriptError(f"{source} is no JSON: {error}") from error
    if not isinstance(plan, list):
        raise ScriptError(f"{source} holds no list of faults, but {type(plan).__name__} {reprlib.repr(plan)}")
    faults = tuple(_fault(item, f"fault {number} of {source}") for number, item in enumerate(plan, 1))
    try:
        check_plan(faults, ranks)
    except ValueError as error:
        raise ScriptError(f"{source}: {error}") from error
    return faults


def _fault(item: Any, where: str) -> Fault:
    if not isinstance(item, dict):
        raise ScriptError(f'{where} is {reprlib.repr(item)}; needed is {{"kind": "Kill", "rank": 1, "at_s": 0.5}}')
    if item.get("kind") not in list(_KINDS):
        raise ScriptError(f"{where} is of kind {item.get('kind')!r}; allowed: {', '.join(sorted(_KINDS))}")
    kind = _KINDS[item["kind"]]
    fields = {name: value for name, value in item.items() if name != "kind"}
    names = kind.__dataclass_fields__
    for name in fields:
        if name not in names:
            raise ScriptError(f"{where}: {kind.__name__} has no field {name!r}; allowed: {', '.join(names)}")
    try:
        fault: Fault = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ScriptError(f"{where}, {kind.__name__}: {error}") from error
    return fault


def format_faults(faults: Sequence[Fault]) -> str:
    """Format a plan in the form that ``--faults`` takes."""
    return json.dumps([{"kind": type(fault).__name__, **fields_of(fault)} for fault in faults])
