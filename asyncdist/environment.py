"""Reads the environment variables of asyncdist and of the system, and sets variables for this process.

Only this module and the package :mod:`asyncdist.launchers` read environment variables, except for modules that run
before this one is imported, such as :mod:`asyncdist.rank_program`. This module does not import torch, so that ranks
start fast.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Final, Literal

Flavour = Literal["openmpi", "mpich"]
FLAVOURS: Final[tuple[Flavour, ...]] = ("openmpi", "mpich")
#: Environment variables of this process.
VARIABLES: Final[Mapping[str, str]] = os.environ
#: Environment variable that selects the transport of programs with ``transport="auto"``.
TRANSPORT_VARIABLE: Final = "ASYNCDIST_TRANSPORT"
#: Environment variable that selects the torch.distributed backend for new process groups, if the program does not.
_BACKEND_VARIABLE: Final = "ASYNCDIST_BACKEND"
#: Environment variable with the seconds that ``main`` may wait before a warning is logged. The program's ``stall_s``
#: overrides it.
STALL_VARIABLE: Final = "ASYNCDIST_STALL_S"
#: Environment variable with the folder in which the user wants to record this job.
RECORD_VARIABLE: Final = "ASYNCDIST_RECORD"
#: Environment variable with the destinations to which ranks export their counters.
METRICS_VARIABLE: Final = "ASYNCDIST_METRICS"
#: Environment variable with the folder to which ranks write their last counters; ``asyncdist run --live`` sets it.
LAST_COUNTERS_VARIABLE: Final = "ASYNCDIST_LAST_COUNTERS"
#: Environment variable with the number of restarts of this rank, in jobs whose launcher restarts ranks.
INCARNATION_VARIABLE: Final = "ASYNCDIST_INCARNATION"
#: Environment variable with the number of ranks (the highest ones) that may join the job after its start.
EMPTY_VARIABLE: Final = "ASYNCDIST_EMPTY_PLACES"
#: Environment variable with the secret by which a job's ranks authenticate each other.
SECRET_VARIABLE: Final = "ASYNCDIST_JOB_SECRET"
#: Environment variable with the path of the secret's file.
SECRET_FILE_VARIABLE: Final = "ASYNCDIST_JOB_SECRET_FILE"
#: Environment variable that is 1 if all ranks of the job are on one host, and 0 if ranks on other hosts may join.
LOOPBACK_VARIABLE: Final = "ASYNCDIST_LOOPBACK"
#: Environment variable with the name of the ``asyncdist run`` job to which the variables of :data:`OF_RUN` apply. A
#: rank's child processes inherit these variables, but may be ranks of another job.
RUN_VARIABLE: Final = "ASYNCDIST_RUN_ID"
OF_RUN: Final = (INCARNATION_VARIABLE, EMPTY_VARIABLE, LOOPBACK_VARIABLE)


def setting(name: str) -> str | None:
    """Return the value of one of the environment variables above, or None if it is not set or empty."""
    return os.environ.get(name) or None


def shared_directories(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders in which this user's processes on this host can exchange files, in order of preference.

    Folders that do not depend on environment variables are first. TMPDIR and XDG_RUNTIME_DIR may differ between a job's
    ranks, because schedulers set a TMPDIR for each rank, and ``su`` keeps its caller's variables.
    """
    session, named = f"/run/user/{os.getuid()}", environ.get("XDG_RUNTIME_DIR", "")
    usable = [path for path in (session, named) if os.path.isdir(path) and os.access(path, os.W_OK)]
    own = [path for path in usable if path == session]
    return list(dict.fromkeys([*own, "/tmp", *usable, environ.get("TMPDIR") or "/tmp"]))


def secret_directories(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders for secrets that this user's processes on this host share, in order of preference.

    The last folder is the user's home directory, because another user can occupy all file names in a shared folder.
    Unlike the folders of :func:`shared_directories`, the home directory may be shared with other hosts.
    """
    own = home(environ)
    return [*shared_directories(environ), *([own] if os.path.isabs(own) else [])]


def program_directories(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the absolute directories in PATH.

    asyncdist must not run programs from relative directories such as ``.``, to which other users may be able to write.
    """
    return list(filter(os.path.isabs, environ.get("PATH", os.defpath).split(os.pathsep)))


def find_program(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of a program in the absolute directories of PATH, or None."""
    return shutil.which(name, path=os.pathsep.join(program_directories(environ)))


def home(environ: Mapping[str, str] = os.environ) -> str:
    """Return this user's home directory, or "" if neither HOME nor the system's user database contains one."""
    if not environ.get("HOME"):
        with contextlib.suppress(KeyError):  # raised if the user is not in the database, as in containers
            return pwd.getpwuid(os.getuid()).pw_dir
    return environ.get("HOME", "")


def stall_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the value of ASYNCDIST_STALL_S, or None if it is not set. Raise ValueError if it is invalid."""
    text = environ.get(STALL_VARIABLE)
    return seconds(text, STALL_VARIABLE) if text else None


def seconds(text: str, name: str) -> float:
    """Convert ``text`` to a number of seconds above 0, possibly infinite.

    Raise ValueError with ``name`` if that fails.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ValueError(f"{name} must be > 0 seconds, or inf for never, got {text!r}")
    return number


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def replace(environ: Mapping[str, str]) -> None:
    """Replace the environment of this process."""
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


HASH_SEED_VARIABLE: Final = "PYTHONHASHSEED"
#: Environment variable that removes the script's folder and the working directory from Python's module search path.
SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"
#: Hash seed when the interpreter started. Setting the variable later, as torchgfn's set_seed does, has no effect.
_HASH_SEED_AT_START: Final = os.environ.get(HASH_SEED_VARIABLE, "")


def hash_seed() -> str | None:
    """Return the hash seed, which determines the order of sets of strings, or None if Python chose a random one."""
    is_number = _HASH_SEED_AT_START.isdecimal()
    return _HASH_SEED_AT_START if is_number and not sys.flags.ignore_environment else None


def fix_hash_seed() -> None:
    """Restart this process with hash seed 0 if Python chose a random one."""
    if hash_seed() is None and not sys.flags.ignore_environment:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED_VARIABLE: "0"})


def has_safe_path() -> bool:
    """Return whether Python searches neither the script's folder nor the working directory for modules."""
    return bool(os.environ.get(SAFE_PATH_VARIABLE))


@contextlib.contextmanager
def variable_set(name: str, text: str) -> Iterator[None]:
    """Set an environment variable for processes that are started in the ``with`` block."""
    before = os.environ.get(name)
    os.environ[name] = text
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables in this process's environment."""
    os.environ.update(variables)


def backend_name() -> str | None:
    """Return the backend that was chosen for torch.distributed process groups, or None."""
    return setting(_BACKEND_VARIABLE)


def set_backend_name(name: str) -> None:
    """Choose the backend for process groups of this process and of processes that it starts later."""
    os.environ[_BACKEND_VARIABLE] = name
