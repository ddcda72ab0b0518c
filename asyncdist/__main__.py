"""``python -m asyncdist``, and the ``asyncdist`` command.

``asyncdist run`` first of all holds SIGUSR1 back, which asks ranks what they do: it would end a launcher that still
imports. What starts the ranks lets it through.
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
