"""Lists the modules that are compiled if a C compiler is available, and checks whether they are compiled.

These modules handle every small message, dominate simulation time, or use C code. They are ordinary Python, and
``.pxd`` files next to them declare C types. ``setup.py`` compiles them with Cython into a folder named after a checksum
of their sources, and their packages search that folder first. Compiled code therefore always matches the current
source. After an edit, on another Python version, without a compiler, or with ``ASYNCDIST_PURE=1``, the slower source
itself runs.

``setup.py`` and ``tools/setup`` run this module by its path, so it imports nothing else of asyncdist.
"""

from __future__ import annotations

import os
import sys
import zlib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

#: Names of the modules to compile, relative to asyncdist. Either all of them are compiled or none are.
MODULES: Final = (
    "blocking.stack_bottom",
    "messaging._crc32",
    "messaging.wire",
    "transports.loop_work",
    "messaging.polling",
    "messaging.flow_control",
    "messaging.mailboxes",
    "recording.writer",
    "transports.doorbell",
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
    "simulation.processes.memory",
)
PURE_VARIABLE: Final = "ASYNCDIST_PURE"
#: File that records that the modules could not be compiled. It is in the folder for compiled modules.
FAILED: Final = "failed"

_PACKAGE: Final = Path(__file__).resolve().parent


def source_of(module: str) -> Path:
    """Return the path of a module's ``.py`` file."""
    return _PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def folder() -> Path:
    """Return the folder for modules compiled from the current sources for this Python version."""
    checksum = 0
    for module in MODULES:
        for path in (source_of(module), source_of(module).with_suffix(".pxd")):
            checksum = zlib.crc32(path.read_bytes(), checksum)
    return _PACKAGE / "_compiled" / f"{sys.implementation.cache_tag.replace('-', '_')}_{checksum:08x}"


def is_wanted() -> bool:
    """Return whether ``ASYNCDIST_PURE`` is unset, empty or 0."""
    return os.environ.get(PURE_VARIABLE, "") in ("", "0")


def search_path(package: str = "") -> list[str]:
    """Return the folder of compiled modules that ``package`` ("" is asyncdist) must search first, or an empty list."""
    if not is_wanted() or reason_against() is not None:
        return []
    return [str(folder() / package)]


def reason_against() -> str | None:
    """Return why compiled modules are missing, with the remedy, or None if all exist."""
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
    """Return whether the modules are compiled, cannot be compiled, or must not be compiled."""
    return not is_wanted() or reason_against() is None or (folder() / FAILED).is_file()


def describe() -> str:
    """Return "yes" if this Python runs the compiled modules, otherwise "no" and the reason."""
    if not is_wanted():
        return f"no, since {PURE_VARIABLE}={os.environ[PURE_VARIABLE]}"
    reason = reason_against()
    return "yes" if reason is None else f"no, {reason}"


if __name__ == "__main__":  # tools/setup runs this file
    sys.exit(not is_settled())
