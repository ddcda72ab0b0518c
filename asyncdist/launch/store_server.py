"""Serves the store at which ranks meet, while its launcher lives: ``python store_server.py ADDRESS PORT [open]``.

It listens at that address alone, or with ``open`` at all addresses of this host, for ranks of other hosts.

It reads lines from its standard input, and sets a key for each: so the launcher tells the ranks what it knows alone.
A line of ``!`` and a text is printed, once what came before is done. When the input ends, so does the store.

A store that rank 0 serves would end with rank 0, and a rank that comes later finds the others through it. The launcher
itself cannot serve it, since it does without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final

#: This file, to be run as a program.
PROGRAM: Final = os.path.abspath(__file__)


def main(address: str, port: int, *, is_open: bool) -> None:
    """Serve until the launcher has ended."""
    from asyncdist import environment
    from asyncdist.transports.torch_distributed.meeting import serving
    from asyncdist.transports.torch_distributed.meeting.sealed_store import SealedStore
    from asyncdist.trust.job_secret import JobSecret

    secret = JobSecret((environment.given_secret() or "").encode())
    carry_out(SealedStore(serving.serve(address, port, is_open=is_open), secret), sys.stdin)


def carry_out(store: Any, lines: Iterable[str]) -> None:
    """Do what the launcher says: ``KEY VALUE``, or ``!TEXT``."""
    for line in lines:
        if line.startswith("!"):
            print(line[1:].rstrip("\n"), file=sys.stderr, flush=True)
            continue
        key, _, value = line.rstrip("\n").partition(" ")
        store.set(key, value)


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(PROGRAM)))
    main(sys.argv[1], int(sys.argv[2]), is_open=sys.argv[3:] == ["open"])
