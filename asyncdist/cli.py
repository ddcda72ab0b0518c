"""The ``asyncdist`` command: parses arguments and hands over.

Wrong input is one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from asyncdist import launch
from asyncdist._version import __version__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="asyncdist",
        description="Awaitable message passing for distributed PyTorch training.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncdist {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    run = commands.add_parser(
        "run",
        help="start a script on several ranks of this host, with the MPI that is installed",
        usage="asyncdist run -n RANKS [--mpi openmpi|mpich] [--threads-per-rank N] script.py [arguments]",
        description="Start a script on several ranks of this host, with the MPI that is installed.",
        allow_abbrev=False,
    )
    run.add_argument("-n", "--ranks", type=_count, required=True, metavar="RANKS", help="how many processes")
    run.add_argument("--mpi", choices=launch.FLAVOURS, help="which MPI, where two are installed")
    run.add_argument(
        "--threads-per-rank",
        type=_count,
        metavar="N",
        help="OMP_NUM_THREADS of each rank (default: its share of the cores)",
    )
    run.add_argument("script", help="a Python script")
    rest = run.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the script as they are")
    rest.required = False  # argparse would list it as missing
    return parser


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; never returns.

    Args:
        arguments: Without the program's name; the process's own by default.
    """
    options = _parser().parse_args(arguments)
    try:
        launch.run(
            options.script, options.arguments, ranks=options.ranks, mpi=options.mpi, threads=options.threads_per_rank
        )
    except launch.LaunchError as error:
        print(f"asyncdist {options.command}: {error}", file=sys.stderr)
        sys.exit(2)
