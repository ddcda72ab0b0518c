"""Serves the store through which ranks find each other: ``python store_server.py ADDRESS PORT [open]``.

The launcher starts this process, and ends it by closing its standard input. Rank 0 does not serve the store, because
ranks that join later need the store even after rank 0 has ended. Nor does the launcher, because the launcher does not
import torch.

The store listens only on the given address or, with ``open``, on all addresses of this host, for ranks on other hosts.
For each ``KEY VALUE`` line on its standard input, the process sets the key, which lets the launcher notify the ranks.
For each ``!TEXT`` line, it prints the text after it has processed the earlier lines.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, Final

#: Path of this file, which is run as a program.
PROGRAM: Final = os.path.abspath(__file__)


def send_line(process: subprocess.Popen[bytes], line: str) -> None:
    """Send a line to the process that serves the store, unless it has ended."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):
        process.stdin.write(f"{line}\n".encode())
        process.stdin.flush()


def main(address: str, port: int, *, is_open: bool) -> None:
    """Serve the store until standard input is closed."""
    from asyncdist.launchers import job_rendezvous
    from asyncdist.transports.torch_distributed.meeting import stores
    from asyncdist.transports.torch_distributed.meeting.stores import SealedStore
    from asyncdist.trust.job_secret import JobSecret

    secret = JobSecret((job_rendezvous.given_secret() or "").encode()).at_port(port)
    process_lines(SealedStore(stores.serve(address, port, is_open=is_open), secret), sys.stdin)


def process_lines(store: Any, lines: Iterable[str]) -> None:
    """Process the launcher's lines. For ``KEY VALUE``, set the key; for ``!TEXT``, print the text."""
    from asyncdist import local_host

    for line in lines:
        if line.startswith("!"):
            local_host.print_line(line[1:].rstrip("\n"))
            continue
        key, _, value = line.rstrip("\n").partition(" ")
        store.set(key, value)


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(PROGRAM)))
    main(sys.argv[1], int(sys.argv[2]), is_open=sys.argv[3:] == ["open"])
