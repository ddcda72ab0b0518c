"""Draws values of the types that can be sent in messages."""

from __future__ import annotations

import dataclasses
import functools
import random
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Final

from protocols.selective.messages import PackedAssign, PackedFrozen
from protocols.selective.plan import Freeze, Plan

_NUMBERS: Final = (-1, 0, 1, 2, 3, 7, 255, 2**16, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63))
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))


def draw(annotation: Any, rng: random.Random, known: Sequence[Any] = (), texts: Sequence[str] = ("", "x")) -> Any:
    """Return a random value of a field's type.

    Args:
        annotation: Type of a message's field.
        rng: Random numbers.
        known: Earlier values, from which half of the results are taken if one has the right type.
        texts: Earlier strings.

    Raises:
        ValueError: A drawn dataclass refuses its values.
    """
    same = [value for value in known if type(value) is annotation] if known else []
    if same and rng.random() < 0.5:
        return rng.choice(same)
    if annotation is bool:
        return rng.random() < 0.5
    if annotation is int:
        return rng.choice((*_NUMBERS, rng.randrange(10), rng.randrange(1000)))
    if annotation is float:
        return rng.choice((*_FLOATS, rng.uniform(0, 10)))
    if annotation is str:
        text = rng.choice(texts)
        end = rng.choice(("", "0", "é", ",", "-9"))
        return text if rng.random() < 0.7 else text[: rng.randrange(len(text) + 1)] + end
    if annotation is bytes:
        return rng.randbytes(rng.choice((0, 1, 8, 100)))
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return draw_message(annotation, rng, known, texts)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return draw(rng.choice(arguments), rng, known, texts)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(draw(arguments[0], rng, known, texts) for _ in range(rng.choice((0, 1, 1, 2, 3, 20))))
        return tuple(draw(argument, rng, known, texts) for argument in arguments)
    assert annotation in (None, type(None)), annotation
    return None


def draw_message(
    cls: type[Any], rng: random.Random, known: Sequence[Any] = (), texts: Sequence[str] = ("", "x"), **given: Any
) -> Any:
    """Return an instance of a dataclass, with the given fields. Raises the errors of :func:`draw`."""
    if cls in _PACKED:
        name, pack = _PACKED[cls]
        given.setdefault(name, pack(rng))
    hints = _hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    drawn = {name: draw(hint, rng, known, texts) for name, hint in hints.items() if name not in given}
    return cls(**drawn, **given)


def _draw_plan(rng: random.Random) -> bytes:
    named = _draw_ranks(rng, rng.randint(1, 40))
    replacers = tuple(rank for rank in named if rng.random() < 0.4)
    donors = tuple(rank for rank in named if rank not in replacers)
    judged = tuple(draw(int, rng) for _ in named) if rng.random() < 0.7 else (7,) * len(named)
    restarted = tuple((rank, rng.randrange(1, 4)) for rank in named if rng.random() < 0.1)
    reducers = donors if rng.random() < 0.5 else ()
    return Plan(named, replacers, judged, draw(int, rng), rng.random() < 0.2, restarted, reducers).packed()


def _draw_freeze(rng: random.Random) -> bytes:
    donors = _draw_ranks(rng, rng.randint(0, 40))
    weights = tuple(rng.choice((0.0, 0.5, 1.0, 1e300)) for _ in donors)
    iterations = tuple(draw(int, rng) for _ in donors)
    return Freeze(donors, weights, iterations, draw(int, rng), donors if rng.random() < 0.5 else ()).packed()


def _draw_ranks(rng: random.Random, count: int) -> tuple[int, ...]:
    count = min(count, limit := rng.choice((2, 4, 100, 5000)))
    return tuple(sorted(rng.sample(range(limit), count)))


#: For messages with packed bytes: the field that contains them, and a function that draws meaningful values.
_PACKED: Final[dict[type[Any], tuple[str, Callable[[random.Random], bytes]]]] = {
    PackedAssign: ("plan", _draw_plan),
    PackedFrozen: ("freeze", _draw_freeze),
}


@functools.cache
def _hints_of(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls)}
