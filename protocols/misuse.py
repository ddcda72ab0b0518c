"""Detects mistakes in the use of a policy, and reports them with the user's own line of code."""

from __future__ import annotations

import ast
import asyncio
import itertools
import linecache
import logging
import sys
import warnings
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

import asyncdist
from asyncdist import BusyError, ClosedError
from asyncdist.protocols.step_info import StepInfo

logger = logging.getLogger("protocols.misuse")

#: Words in variable names, and whether a larger value of such a variable is better.
_DIRECTIONS: Final = {"loss": False, "losses": False, "acc": True, "accuracy": True, "reward": True, "rewards": True}
#: Words in the names of variables that contain a negated value.
_SIGNS: Final = frozenset({"neg", "negative", "negated", "minus", "inverse", "inverted"})
#: Method names, and words in variable names, that do not change a value's meaning or sign.
_CONVERSIONS: Final = frozenset({"avg", "cpu", "detach", "double", "float", "item", "mean", "sum", "value"})
#: Folders whose stack frames may lie between the user's call of ``step`` and the policy.
_BETWEEN: Final = tuple(str(Path(file).parent) for file in (asyncdist.__file__, __file__, asyncio.__file__))


class NoPlainContext:
    """Base class of async context managers that raises a helpful error if they are used with a plain ``with``."""

    def __enter__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"{kind} must be entered with async with, got with: write async with {kind}(...) as policy in a coroutine, "
            f"or with asyncdist.blocking.policy({kind}(...)) as policy in blocking code"
        )

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None: ...


def line_of_caller() -> tuple[str, int]:
    """Return the file and line from which this function's caller was called."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def check_evaluates(**metrics: object) -> None:
    """Raise TypeError if a policy that evaluates trial weights gets a metric that is not callable."""
    for name, given in metrics.items():
        if given is not None and not callable(given):
            raise TypeError(
                f"{name} must be a callable without arguments that evaluates the model, because the policy calls it "
                f"with trial weights in the model, got {given!r:.80}; write step({name}=evaluate) instead of "
                f"step({name}=evaluate())"
            )


def refuse_call(call: str, kind: str, stage: str, *, is_stepping: bool) -> NoReturn:
    """Raise the error that explains why a call of a policy is not possible now.

    The error is the same on all ranks, so that the job reports it only once.

    Args:
        kind: Name of the policy's class.
        stage: Stage of the policy: "new", "open", "lent" or "closed".
    """
    if stage == "new":
        raise ClosedError(
            f"{call} must be called inside async with {kind}(...) as policy, or in blocking code inside with "
            f"asyncdist.blocking.policy({kind}(...)) as policy",
            state=stage,
        )
    if stage == "closed":
        raise ClosedError(f"{call} must be called inside the policy's async with block, which has ended", state=stage)
    if stage == "lent":
        raise BusyError(
            f"{call} must not be called inside async with policy.anchor_weights(), while the model contains the "
            "anchor; leave the block first",
            state=stage,
        )
    if is_stepping:
        raise BusyError(f"{call} must be called by one task at a time, but another task of this rank is inside step()")
    raise BusyError(
        f"{call} must not be called while world.compute(...) may change the weights or a save reads them; await the "
        "compute or the save first"
    )


def warn_of_no_step(first_call: tuple[str, int]) -> None:
    """Warn that ``step`` was never awaited; ``first_call`` is the file and line of its first call."""
    text = "no step() of this policy was awaited, so nothing was averaged: write await policy.step(...)"
    warnings.warn_explicit(text, RuntimeWarning, *first_call)


class UnawaitedStep(Coroutine[Any, Any, StepInfo]):
    """Wraps the coroutine of a step, so that using it as the step's result without ``await`` raises TypeError.

    A plain coroutine is truthy, so ``if policy.step(x):`` would look as if weights changed in each step. A policy
    returns this wrapper for its first step and after a step that was not awaited. All other steps are plain coroutines,
    which are faster.
    """

    def __init__(self, step: Coroutine[Any, Any, StepInfo]) -> None:
        self._step = step

    def __await__(self) -> Generator[Any, Any, StepInfo]:
        return self._step.__await__()

    def send(self, value: Any, /) -> Any:
        """Resume the step's coroutine."""
        return self._step.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception inside the step's coroutine."""
        return self._step.throw(*error)

    def close(self) -> None:
        """Close the step's coroutine."""
        self._step.close()

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_filename.startswith(_BETWEEN):
            return True  # since Python 3.12, the repr of an asyncio task tests its coroutine's truth value
        raise self._refusal()

    def __getattr__(self, name: str) -> Any:
        if name in StepInfo.__dataclass_fields__:
            raise self._refusal()
        return getattr(self._step, name)  # code that inspects tasks reads the coroutine's frame and name

    def _refusal(self) -> TypeError:
        self._step.close()  # Python would otherwise warn later, without the user's line, that it was never awaited
        return TypeError("step() must be awaited, otherwise it does nothing: write info = await policy.step(...)")


def warn_of_first_weights(marks: Sequence[int]) -> None:
    """Warn that members begin with different weights, if there is more than one distinct checksum in ``marks``."""
    if len(marks) > 1:
        logger.warning(
            "the ranks of a policy begin with different weights, and the mean of such models is usually meaningless: "
            "call torch.manual_seed(seed) with the same seed on all ranks before the model is created, or load the "
            "same weights everywhere, or use selective averaging with averaging_strategy='best_only'. Ignore this "
            "warning if the models began equal and have been trained since, for example before a checkpoint"
        )


def warn_of_opposite_metric(metric_mode: str) -> None:
    """Warn if the user's call of ``step`` passes a loss although larger metrics are better, or the reverse.

    The direction is inferred from words in the name of the variable that is passed, such as ``loss`` or ``accuracy``,
    and from a minus sign. If the name contains no known word, there is no warning.
    """
    frame = _frame_of_user()
    call = None if frame is None else _call_in(frame)
    if frame is None or call is None:
        return
    keyword, argument = _metric_in(call)
    wants_larger = {"loss": False, "score": True}.get(keyword, metric_mode == "max")
    direction = _direction_of(argument)
    if argument is None or direction is None or direction is wants_larger:
        return
    variable = argument.operand if isinstance(argument, ast.UnaryOp) else argument
    word = "score" if _direction_of(variable) else "loss"
    text = (
        f"{ast.unparse(call)} treats a {'larger' if wants_larger else 'smaller'} value as better, but the name means "
        "the opposite, so the worst ranks would be averaged into the best; "
        f"write step({word}={ast.unparse(variable)}), which is independent of metric_mode"
    )
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)


def _frame_of_user() -> FrameType | None:
    """Return the frame of the user code that called ``step``; frames of asyncdist and asyncio are skipped."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _call_in(frame: FrameType) -> ast.Call | None:
    """Return the syntax tree of the call that ``frame`` is executing; None if its source code is not available."""
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if position is None:
        return None
    first, last, begin, end = position
    if first is None or last is None or begin is None or end is None:
        return None
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    if len(lines) <= last - first:
        return None
    encoded = [line.encode() for line in lines]  # the positions from co_positions() count bytes
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][begin:]
    try:
        found = ast.parse(b"(" + b"".join(encoded) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return found if isinstance(found, ast.Call) else None


def _metric_in(call: ast.Call) -> tuple[str, ast.expr | None]:
    """Return the keyword ("loss", "score" or "") and the metric in a call of a policy or of its ``step``."""
    for given in call.keywords:
        if given.arg in ("loss", "score"):
            return given.arg, given.value
        if given.arg == "local_metric":
            return "", given.value
    is_step = isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    place = 0 if is_step else 3
    return "", call.args[place] if len(call.args) > place else None


def _direction_of(metric: ast.expr | None) -> bool | None:
    """Return whether a larger value of a metric is better, judging by the expression's names; None if unknown."""
    match metric:
        case ast.UnaryOp(ast.USub(), operand):
            direction = _direction_of(operand)
            return None if direction is None else not direction
        case ast.Subscript(_, ast.Constant(str(name))):
            return is_larger_better(name)
        case ast.Call(ast.Name("float"), [inner], []) | ast.Subscript(inner, _):
            return _direction_of(inner)
        case ast.Call(ast.Attribute(inner, method)) if method in _CONVERSIONS:
            return _direction_of(inner)
        case ast.Call(ast.Attribute(attr=name) | ast.Name(name)) | ast.Attribute(attr=name) | ast.Name(name):
            return is_larger_better(name)
    return None


def is_larger_better(name: str) -> bool | None:
    """Return whether a larger value of a metric with this name is better; None if the name does not show it."""
    words = [word for word in name.lower().split("_") if word not in _CONVERSIONS]
    return _DIRECTIONS.get(words[-1]) if words and _SIGNS.isdisjoint(words) else None
