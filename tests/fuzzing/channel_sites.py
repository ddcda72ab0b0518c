"""Finds every channel that the runtime and the protocols open in their source, so that none is forgotten."""

from __future__ import annotations

import ast
import functools
import importlib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncdist.messaging.channels import Overflow
from asyncdist.protocols.joining.policy_channel import Part
from asyncdist.tags import CONTROL

_ROOT: Final = Path(__file__).resolve().parents[2]
#: The only call that passes a user's arguments on.
_USERS: Final = "asyncdist.messaging.services"
#: Opens the channels that the code creates with ``PolicyChannel(services, message_types, ...)``.
_POLICIES: Final = "protocols.joining.policy_channel"


@dataclass(frozen=True, slots=True)
class ChannelSite:
    """One call of ``Services.open_channel`` in the code.

    Attributes:
        where: Module and line.
        message_types: A dataclass, or a union of dataclasses.
        tag: Tag of the channels.
        overflow: Behaviour when the mailbox is full.
        has_handler, has_epochs, has_earlier_handler: Whether the call passes these arguments.
    """

    where: str
    message_types: Any
    tag: int
    overflow: Overflow
    has_handler: bool
    has_epochs: bool
    has_earlier_handler: bool

    @property
    def classes(self) -> tuple[type[Any], ...]:
        """The message types, in the order of the channel's kinds."""
        return classes_of(self.message_types)


def classes_of(message_types: Any) -> tuple[type[Any], ...]:
    """Return the dataclasses of a union, or the only one."""
    is_union = typing.get_origin(message_types) in (typing.Union, types.UnionType)
    return typing.get_args(message_types) if is_union else (message_types,)


@functools.cache
def channel_sites() -> tuple[ChannelSite, ...]:
    """Return all calls, in the order of the files."""
    found = []
    for package in ("asyncdist", "protocols"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
            if "_compiled" in path.parts or name == _POLICIES:
                continue
            text = path.read_text()
            if "open_channel(" in text or "PolicyChannel(" in text:
                found += _sites_in(ast.parse(text), name)
    return tuple(found)


def _sites_in(tree: ast.Module, name: str) -> list[ChannelSite]:
    all_calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in all_calls if isinstance(call.func, ast.Attribute) and call.func.attr == "open_channel"]
    of_policies = [call for call in all_calls if isinstance(call.func, ast.Name) and call.func.id == "PolicyChannel"]
    if name == _USERS:
        users = [call for call in calls if ast.unparse(call.args[0]) == "message_type"]
        assert len(users) == 1, "the calls for users' channels and for the runtime's own cannot be told apart"
        calls.remove(users[0])
    known = vars(importlib.import_module(name))

    def value_of(node: ast.expr) -> Any:
        return eval(ast.unparse(node), known)  # the evaluated text is our own source code

    found = [
        ChannelSite(f"{name}, line {call.lineno}", value_of(call.args[1]) | Part, CONTROL, "error", True, False, False)
        for call in of_policies
    ]
    for call in calls:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        found.append(
            ChannelSite(
                f"{name}, line {call.lineno}",
                value_of(call.args[0]),
                value_of(given["tag"]),
                value_of(given["overflow"]) if "overflow" in given else "error",
                "handler" in given,
                "epoch" in given,
                "earlier_handler" in given,
            )
        )
    return found
