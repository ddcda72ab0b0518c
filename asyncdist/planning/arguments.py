"""Declares the arguments of ``asyncdist plan``, and converts quantities such as ``7B``, ``1gbit`` or ``300ms``."""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable
from typing import Final

from asyncdist.argument_types import count
from asyncdist.planning.outer_rules import SHARDS

_MULTIPLES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_BINARY: Final = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
_NUMBER: Final = r"(\d+(?:_\d+)*(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_PARAMS: Final = re.compile(rf"{_NUMBER} ?([kmbgt]?)", re.IGNORECASE)
#: Gbps are bits, and GBps are bytes.
_BITS: Final = re.compile(rf"{_NUMBER} ?([kKmMgGtT]?)(?:(?i:bit(?:/s|ps)?)|bps)")
_BYTES: Final = re.compile(rf"{_NUMBER} ?([kKMGT]?)(i?)B(?:/s|ps)")
_PARAM_COUNT_MAX: Final = 10**15
_BANDWIDTH_MAX: Final = 1e15
_STEP_S_MIN: Final = 1e-9
_SECONDS_MAX: Final = 1e9
#: Default numbers of steps between averaging rounds that the tables compare.
DEFAULT_EVERIES: Final = (30, 128, 500)


def add_to(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand ``plan`` and its arguments."""
    plan = add_parser(
        "plan",
        help="estimate what averaging costs on given ranks and links, and which policy to start from",
        usage=(
            "asyncdist plan --params N --ranks RANKS --link BANDWIDTH --step SECONDS\n"
            "                      [--every H,...] [--fragments P] [--overlap STEPS] [--latency SECONDS]\n"
            "                      [--slowest RATIO --shards iid|mixed|separate]"
        ),
        description=(
            "Estimate bytes, seconds, memory and utilisation of each method of averaging, for ranks that each have "
            "their own host, and print a policy to start from. The command starts no ranks and sends nothing."
        ),
    )
    plan.add_argument(
        "--params", type=_parameter_count, required=True, metavar="N", help="parameters of the model: 1e9, 7B, 350M"
    )
    plan.add_argument(
        "-n",
        "--ranks",
        type=functools.partial(count, least=2),
        required=True,
        metavar="RANKS",
        help="the number of ranks",
    )
    plan.add_argument(
        "--link",
        type=_bandwidth,
        required=True,
        metavar="BANDWIDTH",
        help="bandwidth of a host's network in each direction: 50mbit, 1gbit, 12.5MB/s",
    )
    plan.add_argument(
        "--step", type=_step_seconds, required=True, metavar="SECONDS", help="time of a rank's step: 0.3, 300ms"
    )
    plan.add_argument(
        "--every",
        type=_step_counts,
        metavar="H,...",
        help=f"steps between rounds (default: {','.join(map(str, DEFAULT_EVERIES))})",
    )
    plan.add_argument(
        "--fragments", type=count, metavar="P", help="parts of the model in Streaming DiLoCo (default: up to 4)"
    )
    plan.add_argument(
        "--overlap",
        type=functools.partial(count, least=0),
        metavar="STEPS",
        help="steps that hide the transfer of a part in Streaming DiLoCo (default: as many as are needed)",
    )
    plan.add_argument(
        "--latency",
        type=_latency_seconds,
        default=1e-3,
        metavar="SECONDS",
        help="time until a message's first byte arrives on another host: 0.02, 20ms (default: 0.001)",
    )
    plan.add_argument(
        "--slowest",
        type=_speed_ratio,
        metavar="RATIO",
        help="step time of the slowest rank divided by the step time of the fastest rank; determines whether waiting "
        "is recommended",
    )
    plan.add_argument(
        "--shards",
        choices=tuple(SHARDS),
        help="with --slowest: ranks have the same kind of data (iid), different shares (mixed), or separate kinds",
    )


def _parameter_count(text: str) -> int:
    """Convert a number of parameters, such as ``7B``, to an integer."""
    found = _PARAMS.fullmatch(text)
    number = math.nan if found is None else float(found[1]) * _MULTIPLES[found[2].lower()]
    if not 1 <= number <= _PARAM_COUNT_MAX:
        raise argparse.ArgumentTypeError(
            f"must be a number of parameters from 1 to 1e15, such as 1e9, 7B or 350M, got {text!r}"
        )
    return round(number)


def _bandwidth(text: str) -> float:
    """Convert a bandwidth, such as ``1gbit``, to bytes per second."""
    bits, nbytes = _BITS.fullmatch(text), _BYTES.fullmatch(text)
    number = math.nan
    if bits is not None:
        number = float(bits[1]) * _MULTIPLES[bits[2].lower()] / 8
    elif nbytes is not None:
        multiples = _BINARY if nbytes[3] else _MULTIPLES
        number = float(nbytes[1]) * multiples[nbytes[2].lower()]
    if not 1 <= number <= _BANDWIDTH_MAX:
        raise argparse.ArgumentTypeError(
            f"must be a bandwidth with its unit, such as 50mbit, 1gbit or 12.5MB/s, got {text!r}"
        )
    return number


def _step_seconds(text: str) -> float:
    return _seconds(text, _STEP_S_MIN)


def _latency_seconds(text: str) -> float:
    return _seconds(text, 0.0)


def _speed_ratio(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number >= 1, got {text!r}")
    return number


def _seconds(text: str, least: float) -> float:
    """Convert a duration, such as ``0.3``, ``0.3s`` or ``300ms``, to seconds."""
    is_ms = text.endswith("ms")
    try:
        number = float(text.removesuffix("ms" if is_ms else "s")) / (1e3 if is_ms else 1.0)
    except ValueError:
        number = math.nan
    if not least <= number <= _SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"must be a time from {least:g} to {_SECONDS_MAX:g} seconds, such as 0.3, 0.3s or 300ms, got {text!r}"
        )
    return number


def _step_counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({count(word) for word in text.split(",")}))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be integers >= 1, separated by commas, such as 30,128, got {text!r}"
        ) from None
