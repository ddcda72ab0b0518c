"""Starts the command line: ``python -m asyncdist``, and the ``asyncdist`` command.

``asyncdist run`` first blocks SIGUSR1, the signal that asks ranks for a report, since its default action would end a
launcher that is still importing. The launcher unblocks the signal in the processes that it starts.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process; never returns."""
    if sys.argv[1:2] == ["run"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    from asyncdist import cli

    cli.main()


if __name__ == "__main__":
    main()
