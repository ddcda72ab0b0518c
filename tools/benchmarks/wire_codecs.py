"""Measures the wire codecs: the rate at which one core encodes and decodes 64 MiB of float32.

Each codec alternates with ``Tensor.copy_`` of the same 64 MiB. Rates are bytes of float32 per second of CPU time,
because other processes share the cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from harness import MIB, Results, Row

from asyncdist.tensors.codecs import ErrorFeedback, find_codec

#: No ranks to launch: one process measures.
RANKS: Final = ()
#: Minimum rate of int8, as a share of the copy's rate.
TARGET: Final = 0.25
_NAMES: Final = ("float32", "bfloat16", "float16", "int8", "q4", "topk")


def measure(count: int, block_count: int) -> Results:
    """Time each codec on ``count`` values, ``block_count`` times."""
    torch.set_num_threads(1)
    values, decoded = torch.randn(count), torch.zeros(count)
    feedback, results = ErrorFeedback(count), {}
    for name in _NAMES:
        codec = find_codec(name)
        encoded = torch.zeros(codec.nbytes(count), dtype=torch.uint8)
        calls: dict[str, Callable[[], object]] = {
            "copy": functools.partial(decoded.copy_, values),
            "encode": functools.partial(codec.encode, values, encoded),
            "decode": functools.partial(codec.decode, encoded, decoded),
            "feedback": functools.partial(feedback.encode, codec, values, encoded),
        }
        times = [{step: _seconds(call) for step, call in calls.items()} for _ in range(block_count)]
        medians = {step: statistics.median(each[step] for each in times) for step in calls}
        results[name] = {step: 4e-9 * count / seconds for step, seconds in medians.items()} | {"nbytes": len(encoded)}
    return results


def _seconds(call: Callable[[], object]) -> float:
    began_at = time.thread_time()
    call()
    return time.thread_time() - began_at


def rows(results: Results) -> list[Row]:
    """Return the rows of the table."""
    table = []
    for name, rates in results.items():
        for step in ("encode", "decode", "feedback"):
            ratio = rates[step] / rates["copy"]
            is_judged = name == "int8" and step != "feedback"
            ours, rival = f"{rates[step]:.2f} GB/s (x{ratio:.2f})", f"{rates['copy']:.2f} GB/s (a copy)"
            target, met = (f">= x{TARGET:g}", ratio >= TARGET) if is_judged else ("", None)
            table.append(Row(f"{name}, {step}", ours, rival, target, met))
    return table


def main() -> None:
    """Measure, and write the results to the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    found = measure(10_000, 2) if options.quick else measure(16 * MIB, 11)
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
