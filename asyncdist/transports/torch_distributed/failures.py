"""Reads torch's errors, and ends a process that a peer aborts."""

from __future__ import annotations

import os
import re
import sys


def reason(error: RuntimeError) -> str:
    """Return what torch says, without the place in its source, its advice and its stack."""
    text = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", text)


def end_process(peer: int, exit_code: int) -> None:
    """End this process, as ``peer`` has asked. Called by threads: the loop may be blocked, hence aborts."""
    sys.stderr.write(f"asyncdist: rank {peer} aborted the job: process {os.getpid()} ends\n")
    sys.stderr.flush()
    os._exit(exit_code)
