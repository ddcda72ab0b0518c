"""Starts the command line, for ``python -m asyncdist`` and the command ``asyncdist``.

``asyncdist run`` first blocks SIGUSR1, the signal that requests a report from ranks. Otherwise an early signal would
end the launcher while it is importing. The launcher unblocks the signal in the processes that it starts.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process, and exit."""
    if sys.argv[1:2] == ["run"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    from asyncdist import cli

    cli.main()


if __name__ == "__main__":
    main()
