"""Shortens torch's error messages, and ends a process when a peer aborts the job."""

from __future__ import annotations

import os
import re
import sys


def reason(error: RuntimeError) -> str:
    """Return the message of a torch error without source location, advice and stack."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", text)


def end_process(peer: int, exit_code: int) -> None:
    """Abort this process because ``peer`` has requested it. Called by threads, because the loop may be blocked."""
    sys.stderr.write(f"asyncdist: rank {peer} aborted the job: process {os.getpid()} ends\n")
    sys.stderr.flush()
    os._exit(exit_code)
