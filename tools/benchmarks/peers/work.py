"""The work that every peer does, and how it is timed.

Two processes of one host pass a message of 64 bytes back and forth, then a tensor of 64 MiB, and then replace a tensor
of 16 MiB on both by the mean. A peer does the parts that its library offers. The time of a message or tensor is half a
round trip, because no two processes share a clock.

A peer is a script that is started with the path of a file for its results. The scripts of libraries that have no
launcher start the second process themselves.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the work: its size, and the number of timed blocks and of calls in each."""

    nbytes: int
    block_count: int
    call_count: int

    @property
    def total(self) -> int:
        """Number of calls in all blocks, including the first block, which warms up and is not timed."""
        return (1 + self.block_count) * self.call_count

    def tensor(self, value: float = 1.0) -> torch.Tensor:
        """Return a float32 tensor of this size."""
        return torch.full((self.nbytes // 4,), value)


SMALL: Final = Part(64, block_count=20, call_count=50)
LARGE: Final = Part(64 << 20, block_count=9, call_count=1)
MEAN: Final = Part(16 << 20, block_count=9, call_count=1)


def median_s(part: Part, call: Callable[[], object]) -> float:
    """Return the median over the blocks of the seconds per call."""
    blocks_s = []
    for _ in range(1 + part.block_count):
        began_at = time.perf_counter()
        for _ in range(part.call_count):
            call()
        blocks_s.append((time.perf_counter() - began_at) / part.call_count)
    return statistics.median(blocks_s[1:])


async def async_median_s(part: Part, call: Callable[[], Awaitable[object]]) -> float:
    """Return the median over the blocks of the seconds per awaited call."""
    blocks_s = []
    for _ in range(1 + part.block_count):
        began_at = time.perf_counter()
        for _ in range(part.call_count):
            await call()
        blocks_s.append((time.perf_counter() - began_at) / part.call_count)
    return statistics.median(blocks_s[1:])


def check_mean(tensor: torch.Tensor) -> None:
    """Check the mean of the two processes' tensors, which have the values 1 and 2 before the first call."""
    if not bool((tensor == 1.5).all()):
        raise AssertionError(f"expected 1.5 everywhere, got {tensor.unique()[:3].tolist()}")


def write(*, small_s: float | None = None, large_s: float | None = None, mean_s: float | None = None) -> None:
    """Write the times in seconds to the file named on the command line: round trips of messages, and means."""
    halves = {"small_us": small_s and small_s / 2 * 1e6, "large_ms": large_s and large_s / 2 * 1e3}
    Path(sys.argv[1]).write_text(json.dumps(halves | {"mean_ms": mean_s and mean_s * 1e3}))


def start_second(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the running script again, as the second process, with further arguments."""
    return subprocess.Popen([sys.executable, sys.argv[0], sys.argv[1], *arguments])
