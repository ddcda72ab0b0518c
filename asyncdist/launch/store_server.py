"""Serves the store at which ranks meet, for as long as its launcher lives: ``python store_server.py ADDRESS PORT``.

It reads keys from its standard input, one a line, and sets them: so the launcher tells the ranks what it knows alone.

A store that rank 0 serves would end with rank 0, and a rank that is started again finds the others through it. The
launcher itself cannot serve it, since it does without torch.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Final

#: This file, to be run as a program.
PROGRAM: Final = os.path.abspath(__file__)
_TIMEOUT: Final = timedelta(seconds=60)


def main(address: str, port: int) -> None:
    """Serve until the launcher has ended."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(address, port, None, True, _TIMEOUT, wait_for_workers=False)
    for key in sys.stdin:
        store.set(key.rstrip("\n"), "")


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, whose modules are nobody's here
    main(sys.argv[1], int(sys.argv[2]))
