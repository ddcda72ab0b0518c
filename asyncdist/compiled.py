"""Names the modules that are compiled where a C compiler is available, and says whether they are.

They carry every small message, or a simulation spends its time in them. They are ordinary Python; the ``.pxd`` files
beside them hold C types. ``setup.py`` compiles them with Cython into a folder that is named after a checksum of their
sources, where their packages look first. So the code that runs was made from the very source that is here, or is that
source: after an edit, on another Python, without a compiler and with ``ASYNCDIST_PURE=1`` everything works alike, only
slower.

The packages ask this module before they import any other, and ``setup.py`` and ``tools/setup`` run it by its path: it
imports nothing of asyncdist. It is the one place besides the launcher that reads the environment, since it must know
before the launcher is there.
"""

from __future__ import annotations

import os
import sys
import zlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

#: By their names in asyncdist. All are compiled, or none.
MODULES: Final = (
    "messaging._crc32",
    "messaging.wire",
    "messaging.polling",
    "messaging.mailboxes",
    "recording.writer",
    "transports.mpi_requests",
    "transports.persistent_send",
    "simulation.scheduler",
    "simulation.rank_turns",
    "simulation.trace",
    "simulation.distributions",
    "simulation.arrivals",
    "simulation.fabric",
    "simulation.message_faults",
    "simulation.transport",
)
PURE_VARIABLE: Final = "ASYNCDIST_PURE"
#: A file in the folder, where compiling has come to its end without making all of them.
FAILED: Final = "failed"

_PACKAGE: Final = Path(__file__).resolve().parent


def source_of(module: str) -> Path:
    """Return the ``.py`` file of a module; the ``.pxd`` file lies beside it."""
    return _PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def folder() -> Path:
    """Return the folder for modules compiled from the present sources for this Python."""
    checksum = 0
    for module in MODULES:
        for path in (source_of(module), source_of(module).with_suffix(".pxd")):
            checksum = zlib.crc32(path.read_bytes(), checksum)
    return _PACKAGE / "_compiled" / f"{sys.implementation.cache_tag.replace('-', '_')}_{checksum:08x}"


def is_wanted() -> bool:
    """Return whether ``ASYNCDIST_PURE`` is unset, empty or 0."""
    return os.environ.get(PURE_VARIABLE, "") in ("", "0")


def search_path(package: str = "") -> list[str]:
    """Return where a package looks before its own folder: one place, or none.

    Args:
        package: below asyncdist; empty for that one.
    """
    if not is_wanted() or reason_against() is not None:
        return []
    return [str(folder() / package)]


def reason_against() -> str | None:
    """Return why the modules would run interpreted though compiled ones are wanted, and the cure; else None."""
    place = folder()
    if all(place.joinpath(*module.split(".")).with_suffix(EXTENSION_SUFFIXES[0]).is_file() for module in MODULES):
        return None
    if (place / FAILED).is_file():
        return "could not be compiled here: install gcc and Python's headers, then pip install -e ."
    if not (_PACKAGE.parent / "setup.py").is_file():
        return (
            "not compiled when this installation was made: with gcc and Python's headers, install asyncdist again, "
            "with --force-reinstall --no-deps --no-cache-dir"
        )
    return "not compiled since their sources changed: pip install -e . (or ./tools/setup) compiles them"


def is_settled() -> bool:
    """Return whether there is nothing to compile: it has been done, has failed, or is not wanted.

    An attempt that is under way, or was interrupted, has made some of the modules at most, and has not failed either.
    """
    return not is_wanted() or reason_against() is None or (folder() / FAILED).is_file()


def describe() -> str:
    """Say in one line whether the modules run compiled in a process like this one, and if not, why."""
    if not is_wanted():
        return f"no, since {PURE_VARIABLE}={os.environ[PURE_VARIABLE]}"
    reason = reason_against()
    return "yes" if reason is None else f"no, {reason}"


if __name__ == "__main__":  # tools/setup asks
    sys.exit(not is_settled())
