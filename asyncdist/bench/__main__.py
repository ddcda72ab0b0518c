"""Implements ``python -m asyncdist.bench``, which runs one benchmark."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Final

import asyncdist as ad
from asyncdist.argument_types import count
from asyncdist.bench import measurements

#: Subject of each benchmark, meaning of its ``--sizes``, and defaults of ``--sizes``, ``--repeat`` and ``--loop``.
_NAMES: Final[dict[str, tuple[str, str, str, int, int | None]]] = {
    "latency": ("a small message from rank to rank", "bytes of a message", "8,1024,16384", 50, 100),
    "bandwidth": ("a large tensor from rank to rank", "MiB of a tensor", "1,4,16,64", 15, None),
    "ringtest": ("a small message around all ranks", "bytes of a message", "8,1024,16384", 20, 20),
    "step": ("a policy's step in which nothing happens", "parameters of a model", "100000,10000000", 50, 100),
}
#: Maximum ``--sizes`` of each benchmark. For messages, it is a channel's limit less the encoding's overhead.
_LARGEST: Final = {"latency": 60_000, "ringtest": 60_000, "bandwidth": 16_384, "step": 10**9}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m asyncdist.bench",
        description="Compare asyncdist with plain mpi4py or torch.distributed on the ranks of this job.",
        epilog="Started as in: asyncdist run -n 2 -m asyncdist.bench latency",
        allow_abbrev=False,
    )
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (what, unit, sizes, repeat, loop) in _NAMES.items():
        one = names.add_parser(name, help=what, description=f"Time {what}.", allow_abbrev=False)
        one.add_argument(
            "--sizes",
            type=functools.partial(_sizes, largest=_LARGEST[name]),
            default=sizes,
            metavar="N,...",
            help=f"{unit} (default: {sizes})",
        )
        one.add_argument("--repeat", type=count, default=repeat, metavar="N", help=f"blocks (default: {repeat})")
        if loop is not None:
            one.add_argument("--loop", type=count, default=loop, metavar="N", help=f"of a block (default: {loop})")
    return parser


def _sizes(text: str, largest: int) -> list[int]:
    sizes = [count(word) for word in text.split(",")]
    if max(sizes) > largest:
        raise argparse.ArgumentTypeError(f"each size must be <= {largest}, got {max(sizes)}")
    return sizes


async def _main(world: ad.World, options: argparse.Namespace) -> int:
    """Run a benchmark on this rank, and return the exit code.

    Rank 0 prints the table, or the reason why the benchmark cannot run.
    """
    refusal = ""
    if world.is_simulated:
        refusal = "benchmarks need real time, but a simulation's time is virtual: start real ranks with asyncdist run"
    elif world.size < 2 and options.name != "step":
        name = options.name
        refusal = f"{name} needs at least 2 ranks, got 1: asyncdist run -n 2 -m asyncdist.bench {name}"
    if refusal:
        if world.rank == 0:
            print(f"python -m asyncdist.bench: {refusal}", file=sys.stderr)
        return 2
    table = await getattr(measurements, options.name)(world, options)
    if table is not None:
        print(f"{world.describe()}\n{table}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark as one rank, and return the exit code."""
    return ad.run(_main, _parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
