"""Checks values of options. All errors have the form ``NAME must be ALLOWED, got VALUE``.

NumPy numbers, and numbers of other registered numeric types, are accepted and converted to Python's own types. A bool
is not accepted as a number, because it is probably a misplaced flag. The error for a misspelled name suggests the
nearest allowed name.

:func:`printable` makes strings from other sources safe to print. :func:`optional_imports` reports how to install a
missing library.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Final, NoReturn, ParamSpec

from asyncdist.errors import AsyncdistError, LocalProtocolError

P = ParamSpec("P")

#: Oldest supported torch. A rank that joins late needs a function of the torch.distributed store that older versions
#: lack.
TORCH_MIN: Final = (2, 8)
#: Smallest float above zero.
SMALLEST: Final = math.ulp(0.0)
#: Largest finite float.
LARGEST: Final = math.nextafter(math.inf, 0.0)
#: Largest number of bits of a count. NumPy's seeds have as many.
_COUNT_BITS: Final = 128


def refuse(name: str, value: Any, allowed: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raise ``kind`` with the message ``NAME must be ALLOWED, got VALUE``, in which a very long value is shortened."""
    try:
        text = repr(value)
    except ValueError:  # raised for an integer of thousands of digits
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    raise kind(f"{name} must be {allowed}, got {text if len(text) <= 200 else f'{text[:200]}...'}")


def refuse_other_loop(rank: int, *, serves_blocking_code: bool) -> NoReturn:
    """Raise LocalProtocolError, because a coroutine runs in another event loop than the world of ``rank``.

    The error names the function of asyncdist that the user's code has awaited, and the call to write instead.

    Args:
        serves_blocking_code: Whether :mod:`asyncdist.blocking` has opened the world.
    """
    frame = caller = sys._getframe(1)
    while caller.f_back is not None and _module_of(caller.f_back).startswith(("asyncdist.", "contextlib")):
        caller = caller.f_back
        frame = caller if _module_of(caller) != "contextlib" else frame
    name = frame.f_code.co_qualname.removeprefix("_")  # all_gather()'s coroutine is _all_gather, for example.
    owner, _, method = name.rpartition(".")
    if method == "__aenter__":
        name = f"async with {type(frame.f_locals.get('self')).__name__}(...)"
    if not serves_blocking_code:
        place = "its world, such as the loop of asyncio.run"
        wanted = "await it in the rank's main, or in a task that world.spawn has started"
    else:
        place = "the world that asyncdist.blocking has opened, such as the loop of a notebook or of asyncio.run"
        if method == "__aenter__":
            wanted = "write with asyncdist.blocking.policy(...) or, for other objects, asyncdist.blocking.context(...)"
        elif owner == "World":
            wanted = f"call asyncdist.blocking.current_world().{method}(...) without await"
        elif not owner and not _module_of(frame).startswith("asyncdist.protocols."):
            wanted = f"call asyncdist.blocking.{name}(...) without await"
        else:
            wanted = "call it through asyncdist.blocking"
        wanted += ", or run your coroutine function FN with asyncdist.blocking.current_world().call(FN)"
    raise LocalProtocolError(f"{name} cannot be awaited in another event loop than {place}: {wanted}", rank=rank)


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def one_of(values: Iterable[Any]) -> str:
    """Return a description of the allowed values for an error, such as ``one of 'a', 'b'``."""
    return f"one of {', '.join(map(repr, values))}"


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a foreign string as one line for a terminal or a log, with escapes like ``\x1b`` for control characters.

    Foreign control characters could control a terminal, and Unicode's could reorder text (Boucher and Anderson, Trojan
    Source, USENIX Security 2023). Use this function for every name received from a file, a peer or another process. The
    characters in ``keep``, for example the newline, are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def meant(name: str, allowed: Collection[str], otherwise: str | None = None) -> str:
    """Return ``did you mean NAME?`` with the nearest allowed name.

    If none is near, return ``otherwise`` or list all names.
    """
    near = difflib.get_close_matches(name, allowed, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"the names are {', '.join(sorted(allowed))}" if otherwise is None else otherwise


def names_options(
    *, refused: Mapping[str, str] | None = None, called: Callable[[str, Sequence[Any]], str] | None = None
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a constructor to raise helpful errors for unknown options and too many positional arguments.

    The known options are the constructor's parameters and the keys of the TypedDict that annotates its ``**options``.
    Python's own error for a misspelled keyword suggests an option only since Python 3.13.

    Args:
        refused: Options that only similar constructors have, each with the reason why this constructor lacks it.
        called: Function that gets the class's name and all positional arguments. It returns an explanation if they have
            the order of a similar constructor's.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        parameters = inspect.signature(init).parameters
        named = frozenset(name for name in parameters if parameters[name].kind is not inspect.Parameter.VAR_KEYWORD)
        in_order = [each for each in parameters.values() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]

        @functools.wraps(init)
        def checked(*args: P.args, **options: P.kwargs) -> None:
            if len(args) - 1 > len(in_order):
                _refuse_positional(type(args[0]).__name__, args[1:], [each.name for each in in_order], called)
            _check_names(init, type(args[0]), [name for name in options if name not in named], refused or {})
            init(*args, **options)

        checked.refused_options = refused or {}  # type: ignore[attr-defined]
        return checked

    return decorate


def check_option_names(kind: type, names: Iterable[str]) -> None:
    """Raise the TypeError of :func:`names_options` if the constructor of ``kind`` lacks one of these options.

    Constructors without the decorator :func:`names_options` are not checked.
    """
    init: Any = kind.__init__  # type: ignore[misc]
    if hasattr(init, "refused_options"):
        _check_names(init, kind, names, init.refused_options)


def _check_names(init: Callable[..., None], kind: type, names: Iterable[str], refused: Mapping[str, str]) -> None:
    wrong = []
    for name in names:
        if name in refused:
            wrong.append(f"no option {name!r}: {refused[name]}")
        elif name not in (allowed := option_names(init)):
            wrong.append(f"no option {name!r}; {meant(name, allowed)}")
    if wrong:
        raise TypeError(f"{kind.__name__} has {'; '.join(wrong)}")


def _refuse_positional(
    kind: str, given: Sequence[Any], names: Sequence[str], called: Callable[[str, Sequence[Any]], str] | None
) -> NoReturn:
    explained = "" if called is None else called(kind, given)
    raise TypeError(
        f"{kind} takes {len(names)} positional arguments, {' and '.join(names)}, got {len(given)}; "
        f"{explained or 'pass the others by name'}"
    )


@functools.cache  # resolving the annotations takes 0.3 ms
def option_names(init: Callable[..., None]) -> tuple[str, ...]:
    """Return the names of a constructor's options: its parameters, then the keys of its TypedDict."""
    names: list[str] = []
    for parameter in inspect.signature(init).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            (options,) = typing.get_args(typing.get_type_hints(init)[parameter.name])
            names += options.__annotations__
        elif parameter.name not in ("self", "model", "optimizer"):
            names.append(parameter.name)
    return tuple(names)


@contextlib.contextmanager
def reading_state(of: str) -> Iterator[None]:
    """Convert an error about the content of a saved state to a ValueError. ``of`` names the object with that state.

    ValueErrors and asyncdist's own errors are kept, because they already name the problem.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, AsyncdistError):
            raise
        lines = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"the state of {of} must be a result of its state_dict(), but reading it raised {type(error).__name__}: "
            f"{lines[0]:.200}"
        ) from error


def count(name: str, value: Any, *, least: int = 1, besides: str = "") -> int:
    """Return ``value`` as an int >= ``least``, or raise ValueError.

    ``besides`` describes, for the error message, other values that the caller accepts.
    """
    number = next(iter(whole_numbers((value,))), None)
    if number is None or number < least:
        refuse(name, value, f"an integer >= {least}{besides}")
    if number.bit_length() > _COUNT_BITS:
        refuse(name, value, f"an integer >= {least} of at most {_COUNT_BITS} bits{besides}")
    return number


def whole(name: str, value: Any) -> int:
    """Return ``value``, an integer of any type, as an int. Raise TypeError for any other value."""
    number = next(iter(whole_numbers((value,))), None)
    if number is None:
        refuse(name, value, "an integer", TypeError)
    return number


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return the values as ints, or an empty tuple if any value is not an integer."""
    try:
        return () if any(isinstance(value, bool) for value in values) else tuple(map(operator.index, values))
    except TypeError:
        return ()


def ranks(name: str, values: Any) -> tuple[int, ...]:
    """Return ``values`` as distinct ranks. Raise TypeError or ValueError if they are not."""
    allowed = "a sequence of distinct ranks"
    if isinstance(values, str) or not isinstance(values, Sequence):
        refuse(name, values, allowed, TypeError)
    numbers = tuple(count(f"{name}[{place}]", value, least=0) for place, value in enumerate(values))
    if len(set(numbers)) != len(numbers):
        refuse(name, values, allowed)
    return numbers


def real(name: str, value: Any, allowed: str, *, low: float, high: float = LARGEST) -> float:
    """Return ``value`` as a float from ``low`` to ``high``, or raise ValueError. ``allowed`` describes the range."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not low <= value <= high:
        refuse(name, value, allowed)
    try:
        return float(value)
    except OverflowError:
        refuse(name, value, allowed)


def fraction(name: str, value: Any) -> float:
    """Return ``value`` as a float from 0 to 1, or raise ValueError."""
    return real(name, value, "a number from 0 to 1", low=0.0, high=1.0)


def seconds(name: str, value: Any, *, finite: bool = True) -> float:
    """Return ``value`` as a positive number of seconds, or raise ValueError."""
    if not finite:
        return real(name, value, "> 0 seconds", low=SMALLEST, high=math.inf)
    return real(name, value, "> 0 seconds and finite", low=SMALLEST)


def missing_library(what: str, library: str, extra: str) -> str:
    """Return an error message that names the asyncdist extra that installs a missing library."""
    return f"{what} needs {library}: pip install 'asyncdist[{extra}]'"


@contextlib.contextmanager
def optional_imports(what: str, libraries: Collection[str], extra: str) -> Iterator[None]:
    """Report how to install a library whose import fails in the ``with`` block.

    A failed import of one of ``libraries`` raises a ModuleNotFoundError. Its message names the feature ``what`` and the
    extra of asyncdist that installs the library. Other errors are raised unchanged.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in libraries:
            raise
        raise ModuleNotFoundError(missing_library(what, missing, extra), name=error.name) from None


def main_function(main: Any, args: Sequence[Any]) -> None:
    """Raise TypeError if ``main`` is not a coroutine function that accepts a world and ``args``."""
    what = _place_of(main)
    if not inspect.iscoroutinefunction(main):
        cure = (
            ": if it has no await, call asyncdist.blocking.run(main), or pass asyncdist.blocking.hosted(main) to "
            "simulate or run_local"
        )
        raise TypeError(f"main must be a coroutine function (async def), got {what}{cure if callable(main) else ''}")
    try:
        signature = inspect.signature(main)
    except ValueError:  # ``main`` has no signature, so only its call can raise an error
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        if not signature.parameters:
            name = main.__name__ if inspect.isfunction(main) else "main"
            raise TypeError(
                f"main must take the world as its first argument, but {what} takes no argument: write async def "
                f"{name}(world)"
            ) from None
        given = f"the world and {len(args)} more argument{'s'[: len(args) != 1]}"
        raise TypeError(f"main must take {given}, got {what}: {error}") from None


def _place_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        if isinstance(function, (str, bytes, int, float, type(None))):  # their repr contains no memory address
            return f"{function!r:.200}"
        return getattr(function, "__qualname__", None) or f"an object of type {type(function).__name__}"
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def torch_problem(version: str) -> str | None:
    """If this version of torch is too old, return an error message with a remedy, otherwise None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= TORCH_MIN:
        return None
    least = ".".join(map(str, TORCH_MIN))
    return f"torch must be >= {least}, got {version}: pip install 'torch>={least}'"
