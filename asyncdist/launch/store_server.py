"""Serves the store at which ranks meet, for as long as its launcher lives: ``python store_server.py ADDRESS PORT``.

It reads lines from its standard input, and sets a key for each: so the launcher tells the ranks what it knows alone.
A line of ``!`` and a text is printed, once what came before is done. When the input ends, so does the store.

A store that rank 0 serves would end with rank 0, and a rank that comes later finds the others through it. The launcher
itself cannot serve it, since it does without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

#: This file, to be run as a program.
PROGRAM: Final = os.path.abspath(__file__)
_TIMEOUT: Final = timedelta(seconds=60)


def main(address: str, port: int) -> None:
    """Serve until the launcher has ended."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    carry_out(TCPStore(address, port, None, True, _TIMEOUT, wait_for_workers=False), sys.stdin)


def carry_out(store: Any, lines: Iterable[str]) -> None:
    """Do what the launcher says: ``KEY VALUE``, or ``!TEXT``."""
    for line in lines:
        if line.startswith("!"):
            print(line[1:].rstrip("\n"), file=sys.stderr, flush=True)
            continue
        key, _, value = line.rstrip("\n").partition(" ")
        store.set(key, value)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose modules are nobody's here
    main(sys.argv[1], int(sys.argv[2]))
