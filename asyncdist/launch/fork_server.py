"""Makes multiprocessing's fork server ignore SIGTERM and SIGHUP, as it already ignores SIGINT.

Only the fork server of :mod:`asyncdist.launch.spawn` imports this module. The server ends with the launcher. If a
signal sent to all processes of a job ended the server, the launcher would not learn the ranks' exit codes, and would
kill the ranks.
"""

from __future__ import annotations

import functools
import os
import signal
from typing import Final

import asyncdist.launch.rank_process  # noqa: F401 - the server imports torch once for all ranks

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


def _restore_in_child(server: int) -> None:
    """Restore the default handlers in a child of the server, but not in the child's own children."""
    if os.getppid() == server:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=functools.partial(_restore_in_child, os.getpid()))
for _number in _SIGNALS:
    signal.signal(_number, signal.SIG_IGN)
