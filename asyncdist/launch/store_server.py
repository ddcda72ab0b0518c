"""Serves the store at which ranks meet, while its launcher lives: ``python store_server.py ADDRESS PORT [open]``.

It listens only at that address or, with ``open``, at all addresses of this host, for ranks of other hosts.

It reads ``KEY VALUE`` lines from its standard input and sets these keys, by which the launcher notifies the ranks. The
text of a ``!TEXT`` line is printed once the lines before it have been carried out. When the input ends, so does the
store.

Rank 0 cannot serve this store, because later ranks need it to find the others even if rank 0 has ended. The launcher
cannot serve it either, because it does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Final

#: Path of this file, to run it as a program.
PROGRAM: Final = os.path.abspath(__file__)


def main(address: str, port: int, *, is_open: bool) -> None:
    """Serve the store until the launcher has ended."""
    from asyncdist import environment
    from asyncdist.transports.torch_distributed.meeting import serving
    from asyncdist.transports.torch_distributed.meeting.sealed_store import SealedStore
    from asyncdist.trust.job_secret import JobSecret

    secret = JobSecret((environment.given_secret() or "").encode())
    carry_out(SealedStore(serving.serve(address, port, is_open=is_open), secret), sys.stdin)


def carry_out(store: Any, lines: Iterable[str]) -> None:
    """Carry out the launcher's lines: set a key for ``KEY VALUE``, print ``!TEXT``."""
    for line in lines:
        if line.startswith("!"):
            print(line[1:].rstrip("\n"), file=sys.stderr, flush=True)
            continue
        key, _, value = line.rstrip("\n").partition(" ")
        store.set(key, value)


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(PROGRAM)))
    main(sys.argv[1], int(sys.argv[2]), is_open=sys.argv[3:] == ["open"])
