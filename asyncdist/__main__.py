"""Starts the command line, for ``python -m asyncdist`` and the command ``asyncdist``.

``asyncdist run`` first blocks SIGUSR1, the signal that requests a report from ranks. Without this, an early signal
would end the launcher while it is importing. The launcher unblocks the signal in the processes that it starts.

Ctrl-C silently ends each command while its parser is being imported, and ``asyncdist run`` until its ranks start.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process, and exit."""
    is_run = sys.argv[1:2] == ["run"]
    if is_run:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # if it is not, Ctrl-C is ignored, as under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt would print a traceback of these imports
    from asyncdist import cli

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    try:
        cli.main()
    except KeyboardInterrupt:
        if not is_run:
            raise
        sys.exit(130)


if __name__ == "__main__":
    main()
