"""Detects mistakes in the use of a policy, and reports the line of the user's code."""

from __future__ import annotations

import ast
import asyncio
import itertools
import linecache
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Coroutine, Generator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

import asyncdist
from asyncdist import BusyError, ClosedError, LocalProtocolError
from asyncdist.protocols.step_info import StepInfo
from asyncdist.runtime.world import World

logger = logging.getLogger("protocols.misuse")

#: Warnings that this process has logged.
_warned: Final[set[str]] = set()

#: Words in variable names, mapped to whether a larger value of the variable is better.
_DIRECTIONS: Final = {"loss": False, "losses": False, "acc": True, "accuracy": True, "reward": True, "rewards": True}
#: Words that, in a variable's name, indicate a negated value.
_SIGNS: Final = frozenset({"neg", "negative", "negated", "minus", "inverse", "inverted"})
#: Method names, and words in variable names, that do not change a value's meaning or sign.
_CONVERSIONS: Final = frozenset({"avg", "cpu", "detach", "double", "float", "item", "mean", "sum", "value"})
#: Folders of code whose stack frames may be between the user's call of ``step`` and the policy.
_BETWEEN: Final = tuple(f"{Path(file).parent}{os.sep}" for file in (asyncdist.__file__, __file__, asyncio.__file__))


class NoPlainContext:
    """Base class of async context managers that raise a helpful error in a plain ``with``."""

    def __enter__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"{kind} must be entered with async with, got with: write async with {kind}(...) as policy in a coroutine, "
            f"or with asyncdist.blocking.policy({kind}(...)) as policy in blocking code"
        )

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None: ...


def line_of_caller() -> tuple[str, int]:
    """Return the file and line of the code that called the caller of this function."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


def check_evaluates(**metrics: object) -> None:
    """Raise TypeError if a metric is not callable although the policy evaluates trial weights."""
    for name, given in metrics.items():
        if given is not None and not callable(given):
            raise TypeError(
                f"{name} must be a callable without arguments that evaluates the model, because the policy calls it "
                f"with trial weights in the model, got {given!r:.80}; write step({name}=evaluate) instead of "
                f"step({name}=evaluate())"
            )


def refuse_entry(kind: str, stage: str) -> NoReturn:
    """Raise the error for a policy of class ``kind`` that is entered again, or while it is being started."""
    if stage == "starting":
        raise BusyError(
            f"this {kind} is already being started, by another task or by a cancelled start that still waits for the "
            "group's first member; make a new policy",
            state=stage,
        )
    raise LocalProtocolError(
        f"a policy can be entered only once, and this {kind} was entered before; make a new policy", state=stage
    )


def refuse_call(call: str, kind: str, stage: str, *, is_stepping: bool) -> NoReturn:
    """Raise the error that explains why a call of a policy is not possible now.

    The message does not name the rank, so that the job reports equal errors only once.

    Args:
        call: The call, such as "step()".
        kind: Name of the policy's class.
        stage: Stage of the policy: "new", "open", "evaluating" or "closed".
    """
    if stage == "new":
        raise ClosedError(
            f"{call} must be called inside async with {kind}(...) as policy, or in blocking code inside with "
            f"asyncdist.blocking.policy({kind}(...)) as policy",
            state=stage,
        )
    if stage == "closed":
        raise ClosedError(f"{call} must be called inside the policy's async with block, which has ended", state=stage)
    if stage == "evaluating":
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


def warn_if_unlaunched(world: World, *, is_alone: bool) -> None:
    """If this process is the only rank because no launcher has started it, warn once that nothing is averaged."""
    if is_alone and world.warns_if_alone and multiprocessing.parent_process() is None and "alone" not in _warned:
        _warned.add("alone")
        is_script = sys.argv[0].endswith(".py") and "ipykernel" not in sys.argv[0]
        logger.warning(
            "this process trains alone, so nothing is averaged; to start four ranks, use asyncdist run -n 4 %s",
            sys.argv[0] if is_script else "script.py",
        )


def warn_of_no_step(first_call: tuple[str, int], step: UnawaitedStep | None) -> None:
    """Warn that ``step`` was never awaited, at the line of its first call. Prevent Python's own warning."""
    if step is not None:
        step.close()
    text = "no step() of this policy was awaited, so nothing was averaged: write await policy.step(...)"
    warnings.warn_explicit(text, RuntimeWarning, *first_call)


class UnawaitedStep(Coroutine[Any, Any, StepInfo]):
    """Wraps the coroutine of a step, and raises TypeError if it is used as the step's result without ``await``.

    A plain coroutine is truthy, so ``if policy.step(x):`` would look as if each step changed the weights. A policy
    returns this wrapper for its first step and after a step that was not awaited. All other steps are plain coroutines,
    which are faster.
    """

    def __init__(self, step: Coroutine[Any, Any, StepInfo], last: UnawaitedStep | None, call: tuple[str, int]) -> None:
        """Wrap ``step``, and count the unawaited steps in a row, up to ``last``.

        Args:
            call: File and line of the first call of ``step``.

        Raises:
            TypeError: The previous two steps were not awaited. One such step is allowed, because an error may have
                prevented its await.
        """
        self._step = step
        self._is_used = False
        self._unused_count: int = 0 if last is None or last._is_used else last._unused_count + 1
        if self._unused_count >= 2:
            file, line = call
            raise TypeError(f"step() must be awaited, otherwise it does nothing: write await at line {line} of {file}")

    def __del__(self) -> None:
        if not self._is_used:
            self._step.close()  # prevents Python's warning, which lacks the user's line

    def __await__(self) -> Generator[Any, Any, StepInfo]:
        self._is_used = True
        return self._step.__await__()

    def send(self, value: Any, /) -> Any:
        """Resume the step's coroutine."""
        self._is_used = True
        return self._step.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception inside the step's coroutine."""
        self._is_used = True
        return self._step.throw(*error)

    def close(self) -> None:
        """Close the step's coroutine."""
        self._is_used = True
        self._step.close()

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_filename.startswith(_BETWEEN):
            return True  # since Python 3.12, a task's repr tests its coroutine's truth value
        raise self._refusal()

    def __getattr__(self, name: str) -> Any:
        if name in StepInfo.__dataclass_fields__:
            raise self._refusal()
        return getattr(self._step, name)  # the frame, the name and others, for code that inspects tasks

    def _refusal(self) -> TypeError:
        self.close()  # prevents Python's warning, which lacks the user's line
        return TypeError("step() must be awaited, otherwise it does nothing: write info = await policy.step(...)")


def warn_of_first_weights(marks: Sequence[int]) -> None:
    """If ``marks``, the members' distinct checksums, has several entries, warn that the initial weights differ.

    Negative marks are not checksums: they belong to members that resume training (:meth:`PendingRounds.mark`).
    """
    if len(marks) > 1 and min(marks) >= 0:
        logger.warning(
            "the ranks of a policy begin with different weights, and the mean of such models is usually meaningless: "
            "call torch.manual_seed(seed) with the same seed on all ranks before the model is created, or load the "
            "same weights everywhere, or use selective averaging with averaging_strategy='best_only'. Ignore this "
            "warning if the models began equal and have been trained since, for example before a checkpoint"
        )


def warn_of_opposite_metric(metric_mode: str) -> None:
    """Warn if the user's call of ``step`` passes a loss although larger metrics are better, or the reverse.

    The direction is inferred from a word in the name of the passed variable, such as ``loss`` or ``accuracy``, and from
    a minus sign. Without a known word, there is no warning.
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
    """Return the frame of the user's code that called ``step``: the innermost frame outside asyncdist and asyncio."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _call_in(frame: FrameType) -> ast.Call | None:
    """Return the syntax tree of the call that ``frame`` is executing, or None if its source code is not available."""
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if position is None:
        return None
    first, last, begin, end = position
    if first is None or last is None or begin is None or end is None:
        return None
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[first - 1 : last]
    if len(lines) <= last - first:
        return None
    encoded = [line.encode() for line in lines]  # co_positions() counts columns in bytes
    encoded[-1] = encoded[-1][:end]
    encoded[0] = encoded[0][begin:]
    try:
        found = ast.parse(b"(" + b"".join(encoded) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return found if isinstance(found, ast.Call) else None


def _metric_in(call: ast.Call) -> tuple[str, ast.expr | None]:
    """Return "loss", "score" or "", and the metric, from a call of a policy or of its ``step``."""
    for given in call.keywords:
        if given.arg in ("loss", "score"):
            return given.arg, given.value
        if given.arg == "local_metric":
            return "", given.value
    is_step = isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    place = 0 if is_step else 3
    return "", call.args[place] if len(call.args) > place else None


def _direction_of(metric: ast.expr | None) -> bool | None:
    """Return whether the names in an expression suggest that a larger value is better, or None if unknown."""
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
    """Return whether a metric's name suggests that a larger value is better, or None if unknown."""
    words = [word for word in name.lower().split("_") if word not in _CONVERSIONS]
    return _DIRECTIONS.get(words[-1]) if words and _SIGNS.isdisjoint(words) else None
