"""Checks which functions a pickle in an untrusted ``torch.save`` file calls, and with which arguments.

``torch.load(weights_only=True)`` allows only functions that run no code of the file. With chosen arguments, some of
them nevertheless create large objects from a few bytes: ``torch.FloatTensor(1 << 40)`` is a tensor of 4 TiB, and nested
calls of ``_codecs.encode(data, "hex")`` double a string each time. Computing the hash of a tuple takes years if both of
its items are the same tuple, both of whose items are the same tuple, and so on for sixty levels. A dictionary whose n
keys have equal hashes takes n * n comparisons. This module therefore follows a pickle's instructions without creating
its objects, and allows only the calls that ``torch.save`` writes.
"""

from __future__ import annotations

import _compat_pickle
import pickletools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

#: Number of items that a tuple, including the tuples in it, may always have. A larger number is allowed if the pickle
#: itself contains that many items.
_ITEM_COUNT_MAX: Final = 1_000_000
#: Number of different large numbers, or tuples that may become keys, that may have the same hash. Apart from -1 and -2,
#: and tuples with them, values have equal hashes only if they were chosen for that.
_EQUAL_HASH_COUNT_MAX: Final = 100
#: Absolute value below which different integers have different hashes.
_HASH_MODULUS: Final = sys.hash_info.modulus
_UNKNOWN: Final = "call of an unknown function"
_REBUILD_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"


@dataclass(frozen=True, slots=True)
class _Function:
    """Represents a function or class by its full name."""

    name: str


@dataclass(frozen=True, slots=True)
class _Tuple:
    """A tuple.

    Attributes:
        count: Number of items in it and in the tuples that it contains.
        hash: Hash that the loaded tuple will have, if all items are numbers, strings or such tuples.
        other_hash: Hash that differs between different tuples even if ``hash`` does not.
    """

    items: tuple[Any, ...]
    count: int
    hash: int
    other_hash: int

    def __hash__(self) -> int:
        return self.hash


@dataclass(slots=True)
class _Container:
    """Represents a list and its items, or a dictionary and its keys and values."""

    kind: str
    items: list[Any] = field(default_factory=list)


# Strings and numbers on the stack represent themselves, and None represents all other values.
_MARK: Final = object()


#: Functions that copy nothing, and that ``torch.save`` files call with any arguments.
_REBUILDING: Final = frozenset(
    (
        *(f"torch._utils._rebuild_{what}" for what in ("tensor", "tensor_v2", "tensor_v3", "qtensor", "sparse_tensor")),
        *(f"torch._utils._rebuild_{what}" for what in ("parameter", "parameter_with_state", "nested_tensor")),
        *("torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_wrapper_subclass"),
        *("torch.serialization._get_layout", "torch.device", "builtins.complex"),
    )
)
#: Functions that copy their arguments, and that ``torch.save`` files call with certain arguments only.
_COPYING: Final = frozenset(
    ("torch.Size", "collections.OrderedDict", "collections.Counter", "builtins.set", "_codecs.encode")
)


def _copied_count(name: str, arguments: tuple[Any, ...]) -> int | None:
    """Return the number of items or characters that a call of a function of ``_COPYING`` copies.

    Return None if ``torch.save`` writes no such arguments.
    """
    match name, arguments:
        case "torch.Size", (_Tuple(_, count),):
            return count
        case "collections.OrderedDict" | "collections.Counter" | "builtins.set", ():
            return 0
        case "collections.OrderedDict" | "builtins.set", (_Container("list", items),):
            return len(items)
        case "collections.Counter", (_Container("dict", items),):
            return len(items)
        case "_codecs.encode", (str(text), "latin1"):
            return len(text)
    return None


#: Prefixes and suffixes of the names of other functions and classes that torch allows.
_MODULES_OF_TORCH: Final = ("torch._utils.", "torch._tensor.", "torch.storage.", "torch.nn.parameter.", _UNKNOWN)
_CLASSES_OF_TORCH: Final = ("Tensor", "Storage")


def check(data: Any) -> None:
    """Raise ValueError if a pickle contains a call that could take much memory or time.

    Calls of functions that torch refuses are not checked.

    Args:
        data: Binary file, which is read to the end of the pickle.
    """
    values = _Values()
    for code, argument, _ in pickletools.genops(data):
        values.follow(code.name, argument)


class _Values:
    """Follows the instructions that torch's unpickler knows, and keeps the kinds of the values on its stack."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._count = 0  # number of instructions and of characters in strings so far
        self._copied_count = 0
        self._hashes: dict[int, tuple[int, ...]] = {}  # other hashes of the different values with each hash
        self._users = set(map(_name_of, torch.serialization.get_safe_globals()))

    def follow(self, name: str, argument: Any) -> None:
        """Follow one instruction, given by its name in :mod:`pickletools`."""
        self._count += 1
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name == "BINUNICODE":
            self._count += len(argument)
            self._stack.append(argument)
        elif name in _NUMBERS:
            self._stack.append(argument)
            if abs(argument) >= _HASH_MODULUS:
                self._count_hash(hash(argument), _other_hash(argument))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            self._stack.append(_Container("list" if name == "EMPTY_LIST" else "dict"))
        elif name == "GLOBAL":
            self._stack.append(_Function(_renamed(argument)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self._stack.append(self._memo.get(argument))
        elif name in _TUPLES:
            self._make_tuple(self._popped(_TUPLES[name]))
        elif name == "TUPLE":
            self._make_tuple(self._popped_to_mark())
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = self._popped(2)
            self._check_call(function, arguments, is_new=name == "NEWOBJ")
            self._stack.append(self._result(function, arguments))
        elif name == "BINPERSID":
            (storage,) = self._popped(1)
            if isinstance(storage, _Tuple):
                self._count_keys(storage.items[2:3])  # the name by which torch finds the storage
            self._stack.append(None)
        elif name in ("APPEND", "APPENDS"):
            self._append(self._popped(1) if name == "APPEND" else self._popped_to_mark())
        elif name in ("SETITEM", "SETITEMS"):
            self._set_items(self._popped(2) if name == "SETITEM" else self._popped_to_mark())
        elif name == "BUILD":
            self._popped(1)
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"it has the instruction {name}, which torch.save does not write")

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("its pickle is invalid")
        items = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return items

    def _popped_to_mark(self) -> list[Any]:
        for count, value in enumerate(reversed(self._stack)):
            if value is _MARK:
                return self._popped(count + 1)[1:]
        raise ValueError("its pickle is invalid")

    def _append(self, items: list[Any]) -> None:
        if self._stack and isinstance(self._stack[-1], _Container):
            if not self._stack[-1].items:
                self._count_keys(items[:1])  # a list of a key and a value may become a dictionary item
            self._stack[-1].items += items

    def _set_items(self, items: list[Any]) -> None:
        self._count_keys(items[::2])
        if self._stack and isinstance(self._stack[-1], _Container):
            self._stack[-1].items += items

    def _make_tuple(self, items: list[Any]) -> None:
        count = 1 + sum(each.count if isinstance(each, _Tuple) else 1 for each in items)
        if count > max(_ITEM_COUNT_MAX, self._count):
            raise ValueError("it has tuples that contain each other too often")
        known = tuple(each if isinstance(each, str | int | float | complex | _Tuple) else None for each in items)
        made = _Tuple(tuple(items), count, hash(known), hash(tuple(map(_other_hash, known))))
        self._count_keys(items[:1])
        self._stack.append(made)

    def _count_keys(self, values: Sequence[Any]) -> None:
        """Count equal hashes of tuples that are or may become keys or set items. Other tuples may have equal hashes."""
        for value in values:
            if isinstance(value, _Tuple):
                self._count_hash(value.hash, value.other_hash)

    def _count_hash(self, value: int, other: int) -> None:
        others = self._hashes.get(value, ())
        if other not in others:
            if len(others) == _EQUAL_HASH_COUNT_MAX:
                raise ValueError(f"it has more than {_EQUAL_HASH_COUNT_MAX} numbers or tuples with equal hashes")
            self._hashes[value] = *others, other

    def _result(self, function: Any, arguments: Any) -> Any:
        """Return a call's result as a value on the stack, if its hash does not depend on the process."""
        name = function.name if isinstance(function, _Function) else _UNKNOWN
        match name, arguments.items if isinstance(arguments, _Tuple) else ():
            case "torch.Size", (_Tuple() as items,):
                return items
            case "builtins.complex", (int() | float() as real, int() | float() as imaginary):
                number = complex(real, imaginary)
                self._count_hash(hash(number), _other_hash(number))
                return number
        return None

    def _check_call(self, function: Any, arguments: Any, *, is_new: bool) -> None:
        name = function.name if isinstance(function, _Function) else _UNKNOWN
        items = arguments.items if isinstance(arguments, _Tuple) else ()
        if name in self._users:
            return
        if name == _REBUILD_FROM_TYPE and not is_new:  # this function calls its first argument with its third
            self._check_call(items[0] if items else None, items[2] if len(items) > 2 else None, is_new=False)
        elif name == "builtins.bytearray":
            raise ValueError("it has a bytearray, which must be a tensor of uint8 or bytes")
        elif name not in _REBUILDING and name not in _COPYING:
            if name.startswith(_MODULES_OF_TORCH) or name.endswith(_CLASSES_OF_TORCH):
                raise ValueError(f"it has a {name}")
        elif is_new or (count := 0 if name in _REBUILDING else _copied_count(name, items)) is None:
            raise ValueError(f"it calls {name} in another way than torch.save does")
        else:
            self._copied_count += count
            if self._copied_count > self._count:  # torch.save writes each value that it copies
                raise ValueError(f"it calls {name} too often with the same arguments")
            if name == "builtins.set" and items:
                self._count_keys(items[0].items)


_TUPLES: Final[Mapping[str, int]] = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS: Final[Mapping[str, Any]] = {
    "MARK": _MARK,
    **dict.fromkeys(("NONE", "EMPTY_SET", "SHORT_BINSTRING"), None),
    "NEWTRUE": True,
    "NEWFALSE": False,
}
_NUMBERS: Final = frozenset(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"))


def _renamed(argument: str) -> str:
    """Return the full name of a global in Python 3. ``argument`` is the module and the name, with a space between."""
    module, _, name = argument.partition(" ")
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


def _other_hash(value: Any) -> int:
    """Return a hash that depends on this process, so that no file can contain different values with equal hashes."""
    if isinstance(value, _Tuple):
        return value.other_hash
    return hash(value if isinstance(value, str) else f"{type(value)} {value}")


def _name_of(safe: Any) -> str:
    """Return the full name of a global that the user has declared safe, either alone or with another name."""
    return str(safe[1]) if isinstance(safe, tuple) else f"{safe.__module__}.{safe.__qualname__}"
