"""Declares each policy option once: its default, check and documentation, and whether all members must agree on it.

A frozen subclass of :class:`Options` declares each option as a field. Its instances contain checked values. The
``TypedDict`` classes of :mod:`protocols.options` repeat the options' names and types for editors and type checkers.
:func:`with_options` derives a policy's signature and its docstring's list of options from the declarations.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Final, Self, TypeAlias, TypeVar, cast, get_args

from asyncdist import validation

T = TypeVar("T")
#: Function that checks an option. It takes the option's name and value, and returns the value to store, or raises
#: TypeError or ValueError.
Check: TypeAlias = Callable[[str, Any], Any]
_DOC: Final = "doc"  # key of an option's documentation in the metadata of its field
#: Maximum length of a value's text that the ranks compare in full. They compare the beginning and a checksum of a
#: longer text.
_TEXT_LENGTH_MAX: Final = 1000
#: Headings of the option groups, in documentation order.
GROUPS: Final = (
    "start here",
    "exploration",
    "fragments and bytes",
    "donors",
    "stragglers and rounds",
    "members and timeouts",
    "islands",
    "coordinator",
)


def option(
    doc: str,
    check: Check,
    *,
    default: Any = MISSING,
    group: str = GROUPS[0],
    is_agreed: bool = False,
    shown: str = "",
) -> Any:
    """Declare an option as a field of an :class:`Options` subclass.

    Args:
        default: Default value. Without a default, the option is required.
        group: One of :data:`GROUPS`.
        is_agreed: Whether the value must be equal on all members.
        shown: Python expression that the documentation shows as the default; by default, the default's ``repr``.
    """
    facts = {_DOC: doc, "check": check, "group": group, "is_agreed": is_agreed, "shown": shown}
    return field(default=default, metadata=facts)


def like(kind: type[Options], name: str, default: Any = MISSING) -> Any:
    """Declare a field that repeats option ``name`` of class ``kind``, optionally with another default."""
    found = kind.__dataclass_fields__[name]
    return field(default=found.default if default is MISSING else default, metadata=found.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base class of frozen dataclasses that declare policy options. Instances contain checked values."""

    def __post_init__(self) -> None:
        """Check each value. Raise TypeError or ValueError if a value is not allowed."""
        for each in declared(type(self)):
            value = getattr(self, each.name)
            try:
                checked = each.metadata["check"](each.name, value)
            except OverflowError:
                validation.refuse(each.name, value, "a number, or numbers, that a float can represent")
            object.__setattr__(self, each.name, checked)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return an instance with the options in ``given`` that this class declares. Ignore all others."""
        return cls(**{each.name: given[each.name] for each in declared(cls) if each.name in given})

    def agreed(self) -> dict[str, Any]:
        """Return the options that must be equal on all members, by name, as JSON values."""
        found = [each.name for each in declared(type(self)) if each.metadata["is_agreed"]]
        return {name: shortened(getattr(self, name)) for name in found}


def shortened(value: Any) -> Any:
    """Return ``value``, or the beginning of its text and a checksum if the text is long."""
    text = repr(value)
    if len(text) <= _TEXT_LENGTH_MAX:
        return value
    return f"{text[:100]}... ({len(text)} characters, CRC-32 {zlib.crc32(text.encode(errors='backslashreplace')):08x})"


def among(options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the options whose names are keys of the TypedDict ``kind``."""
    return {name: options[name] for name in kind.__annotations__ if name in options}


def declared(kind: type[Options]) -> tuple[Field[Any], ...]:
    """Return the fields of ``kind`` that were declared with :func:`option` or :func:`like`."""
    return _declared(cast(Any, kind))  # mypy considers a class unhashable if its instances are


@functools.cache  # in a simulation, all ranks create policies of the same classes
def _declared(kind: type[Options]) -> tuple[Field[Any], ...]:
    return tuple(each for each in fields(kind) if _DOC in each.metadata)


def with_options(options: type, *kinds: type[Options]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds the options to a policy's signature and docstring.

    The decorated class gets the attribute ``declared_options``, a tuple of the arguments.

    Args:
        options: TypedDict with the names of the policy's options.
        kinds: Classes that declare these options.
    """

    def decorate(policy: type[T]) -> type[T]:
        init: Any = policy.__init__
        found = {each.name: each for kind in kinds for each in declared(kind)}
        parameters = [each for each in inspect.signature(init).parameters.values() if each.kind is not each.VAR_KEYWORD]
        names = [each.name for each in parameters] + list(options.__annotations__)
        init.__signature__ = inspect.Signature(
            [*parameters, *(_parameter(found[name]) for name in options.__annotations__)], return_annotation=None
        )
        text = listed([found[name] for name in names if name in found])
        policy.__doc__ = f"{inspect.cleandoc(policy.__doc__ or '')}\n\n{text}"
        policy.declared_options = (options, *kinds)  # type: ignore[attr-defined]
        return policy

    return decorate


def _parameter(each: Field[Any]) -> inspect.Parameter:
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)


def by_group(options: list[Field[Any]]) -> dict[str, list[Field[Any]]]:
    """Return the options by group heading, in the order of the groups."""
    found = {group: [each for each in options if each.metadata["group"] == group] for group in GROUPS}
    return {group: members for group, members in found.items() if members}


def listed(options: list[Field[Any]]) -> str:
    """Return the options as a string with a heading for each group and a paragraph for each option."""
    lines = []
    for group, members in by_group(options).items():
        lines.append(f"Options, {group}:")
        for each in members:
            default = "required" if each.default is MISSING else f"default {_shown(each)}"
            text = f"{each.name} ({default}): {each.metadata[_DOC]}"
            lines += textwrap.wrap(text, 110, initial_indent="    ", subsequent_indent="        ")
    return "\n".join(lines)


def _shown(each: Field[Any]) -> str:
    return each.metadata["shown"] or repr(each.default)


# -- checks -----------------------------------------------------------------------------------------------------------


def one_of(literal: Any, kind: type[Exception] = ValueError) -> Check:
    """Return a check that accepts the strings of a Literal type."""
    allowed = get_args(literal)

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in allowed:  # an array would be compared element by element
            validation.refuse(name, value, validation.one_of(allowed), kind)
        return value

    return check


def number(allowed: str, low: float, high: float = validation.LARGEST) -> Check:
    """Return a check for a real number from ``low`` to ``high``. In the error, ``allowed`` describes these numbers."""
    return lambda name, value: validation.real(name, value, allowed, low=low, high=high)


def integer(least: int, besides: str = "") -> Check:
    """Return a check for an integer >= ``least``. In the error, ``besides`` describes other allowed values."""
    return lambda name, value: validation.count(name, value, least=least, besides=besides)


def instance(kind: type, allowed: str) -> Check:
    """Return a check for instances of ``kind``. In the error, ``allowed`` describes them."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            validation.refuse(name, value, allowed, TypeError)
        return value

    return check


boolean: Final[Check] = instance(bool, "True or False")


def or_none(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda name, value: None if value is None else check(name, value)


def function(allowed: str) -> Check:
    """Return a check for a callable or None."""

    def check(name: str, value: Any) -> Any:
        if value is not None and not callable(value):
            validation.refuse(name, value, allowed, TypeError)
        return value

    return check
