"""Lists the modules that are compiled if a C compiler is available, and tells whether they are compiled.

These modules handle every small message or dominate the time of simulations. They are ordinary Python; ``.pxd`` files
next to them hold C types. ``setup.py`` compiles them with Cython into a folder named after a checksum of their sources,
where their packages look first. Compiled code therefore always matches the present source. After an edit, on another
Python, without a compiler or with ``ASYNCDIST_PURE=1``, the source itself runs, only slower.

The packages call this module before they import any other, and ``setup.py`` and ``tools/setup`` run it by its path, so
it imports nothing of asyncdist. Like the launcher it reads the environment, since it runs before the launcher is
imported.
"""

from __future__ import annotations

import os
import sys
import zlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

#: Names of the modules, relative to asyncdist. All are compiled, or none.
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
#: File in the folder that records an attempt that ended without compiling all modules.
FAILED: Final = "failed"

_PACKAGE: Final = Path(__file__).resolve().parent


def source_of(module: str) -> Path:
    """Return the ``.py`` file of a module; the ``.pxd`` file is next to it."""
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
    """Return the folder, if any, that a package searches before its own.

    Args:
        package: Name of the package relative to asyncdist; empty for asyncdist itself.
    """
    if not is_wanted() or reason_against() is not None:
        return []
    return [str(folder() / package)]


def reason_against() -> str | None:
    """Return why the modules are not compiled although that is wanted, and the remedy; otherwise None."""
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

    An attempt that is in progress or was interrupted has made only some modules, and counts as neither done nor failed.
    """
    return not is_wanted() or reason_against() is None or (folder() / FAILED).is_file()


def describe() -> str:
    """Return one line: whether the modules run compiled in a process like this one, and if not, why."""
    if not is_wanted():
        return f"no, since {PURE_VARIABLE}={os.environ[PURE_VARIABLE]}"
    reason = reason_against()
    return "yes" if reason is None else f"no, {reason}"


if __name__ == "__main__":  # run by tools/setup
    sys.exit(not is_settled())
