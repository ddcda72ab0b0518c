"""Starts ranks that need not import torch: they are forked from a server that has imported it once for a test session.

    asyncdist run -n 4 tests/support/warm_rank.py SOCKET script.py arguments...     started by support.mpi
    python -S tests/support/warm_rank.py SOCKET script.py arguments...              a rank of support.torchrun
    asyncdist run -n 4 script.py arguments...                                       anything, in ``environment``

Importing torch takes 1.5 s of a core, and creating the first optimizer as much again, for each rank of each job: most
of the time of a short job. The process that mpirun (or a test) starts instead of a rank asks the *server* for a child.
It passes its arguments, environment, directory, open files and namespaces (of a virtual host) to the child,
passes signals on, and ends as the child ends. The child runs the script as ``asyncdist run`` does, by ``launch``.

- The server does not use mpi4py, MPI, process groups or event loops: each rank starts its own.
- A rank ends with the process that mpirun has started for it, and with the server. The server ends with the test
  session, whose pipe is its standard input.
- Three properties differ from a separate process: ranks share one seed of ``hash``; variables that torch reads when it
  is imported are those of the server; and torch is not destroyed at the end, which took half of a short rank's time.
  Jobs with such variables start cold, and so end cold.
- Programs that start ranks themselves, such as the demo and the documentation's programs, start them warm if they have
  the variables of ``environment``: Python reads ``warm_site/sitecustomize.py`` first.
- This works on Linux only. On other systems, every rank starts cold.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import marshal
import os
import selectors
import signal
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import warm_rank
from support.warm_rank import COLD_PREFIXES, HASHES, LENGTH_NBYTES, NAMESPACES, SIMULATION, VARIABLE, asked_of, end_as

#: Script that is started in the place of a rank.
CLIENT = warm_rank.__file__
#: First file descriptor above those that a launcher passes to a rank.
SPARE_FD = 200
#: Training libraries for ``environment``, which take seconds to import.
LIBRARIES = (
    *("lightning", "transformers", "transformers.trainer", "accelerate"),
    *("gfn.gym", "gfn.gflownet", "gfn.containers.replay_buffer_manager"),
)
#: Packages whose modules are destroyed at the end of a warm rank.
DESTROYED = {*sys.stdlib_module_names, "__main__", "asyncdist", "mpi4py", "protocols"}


def command(
    script: str | os.PathLike[str], args: Sequence[object], base: Mapping[str, str], env: Mapping[str, str]
) -> list[str]:
    """Return the command that starts ``script args`` warm.

    Args:
        script: Path of the script.
        args: Arguments of the script.
        base: Environment that all jobs share.
        env: Variables to add for this job.
    """
    cold = [str(script), *map(str, args)]
    if not hasattr(os, "pidfd_open") or any(name.startswith(COLD_PREFIXES) for name in env):
        return cold
    return [CLIENT, _server(frozenset((k, v) for k, v in base.items() if k.startswith(COLD_PREFIXES))), *cold]


def environment(base: Mapping[str, str], *libraries: str) -> dict[str, str]:
    """Return the variables with which ranks and simulations start warm, whichever process starts them.

    One server, with a simulation's hash seed, starts both.

    Args:
        base: Environment that the processes would have.
        libraries: Modules to import in addition to torch.
    """
    if not hasattr(os, "pidfd_open"):
        return dict(base)
    paths = [str(Path(__file__).with_name("warm_site")), *filter(None, [base.get("PYTHONPATH")])]
    environ = {**base, "PYTHONPATH": os.pathsep.join(paths)}
    asked = asked_of(environ)
    own = {**HASHES, **asked}
    path = _server(frozenset(own.items()), libraries)
    return {**environ, VARIABLE: json.dumps([(path, asked), (path, own)])}


def alone(environ: Mapping[str, str], script: str | os.PathLike[str], *args: object) -> list[str]:
    """Return the command that starts ``script args`` warm in one process without a launcher.

    Args:
        environ: Variables from :func:`environment` with which the command will run.
        script: Path of the script.
        args: Arguments of the script.
    """
    cold = [str(script), *map(str, args)]
    if VARIABLE not in environ:
        return [sys.executable, *cold]
    return [sys.executable, "-S", CLIENT, json.loads(environ[VARIABLE])[0][0], *cold]


@functools.cache
def _server(asked: frozenset[tuple[str, str]], libraries: tuple[str, ...] = ()) -> str:
    """Start a server with these variables and imports, which lives as long as this process. Return its address."""
    import subprocess
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="asyncdist-test-")
    path = str(Path(folder.name, "warm"))
    process = subprocess.Popen(
        [sys.executable, __file__, path, *libraries],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**{k: v for k, v in os.environ.items() if k != VARIABLE}, **dict(asked)},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdout as told:
        assert told.read() == b"ready", "the server of warm ranks did not start"

    def end() -> None:
        with process:  # closes its input
            pass
        folder.cleanup()

    atexit.register(end)
    return path


# -- the server -------------------------------------------------------------------------------------------------------


def serve(path: str, libraries: Sequence[str]) -> dict[str, Any]:
    """Fork a child for every request. In a child, return its job."""
    gc.disable()  # a fifth of the imports' time would go into collections that find no garbage
    for name in libraries:
        importlib.import_module(name)
    import optree  # noqa: F401
    import torch._dynamo  # the first optimizer of a process imports it, which takes 1.4 s of a core
    import torch.distributed  # noqa: F401

    import asyncdist as ad
    import protocols  # noqa: F401
    from asyncdist.runtime.process import spare_collections

    assert len({ad.run, ad.barrier}) == 2  # importing these names imports all modules that a rank needs
    assert len(os.listdir("/proc/self/task")) == 1, (
        "the server must have no other threads, as they do not survive a fork"
    )
    _shorten_ends()
    # Freezing prevents each rank's garbage collections from writing to all imported objects, and so copying them. At
    # the end everything is collected, as in a rank that starts cold, if nanobind looks for leaks: the GPU builds of
    # torch 2.15 import Triton.
    spare_collections()
    gc.enable()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(100)
        ready = stack.enter_context(selectors.DefaultSelector())
        ready.register(listener, selectors.EVENT_READ)
        ready.register(0, selectors.EVENT_READ)
        os.write(1, b"ready")
        os.dup2(2, 1)
        return _serve(listener, ready)


def _shorten_ends() -> None:
    """Let ranks end without destroying the imported libraries, which would copy the memory that all ranks share.

    Everything else happens as in a cold rank: exit handlers run, modules of asyncdist, of the standard library and of
    the script are destroyed, MPI is finalised, and libraries that the rank has loaded itself are unloaded.
    """
    import ctypes
    import weakref

    libc = ctypes.CDLL(None)
    for function in (libc._exit, libc.fcloseall):  # they run in the opposite order
        libc.on_exit(ctypes.cast(function, ctypes.c_void_p), None)
    atexit.register(_keep_libraries)
    for finalizer, called in vars(weakref.finalize)["_registry"].items():
        if called.func.__module__.startswith("torch."):  # it deregisters an operator that is defined in Python
            finalizer.atexit = False


def _keep_libraries() -> None:
    """Exempt the imported libraries from destruction, unless one of them counts its objects at the end."""
    import ctypes

    from asyncdist.runtime.process import _COUNT_AT_THE_END

    if not any(name in sys.modules for name in _COUNT_AT_THE_END):
        names = [name for name in sys.modules if name.partition(".")[0] not in DESTROYED]
        libraries = [sys.modules.pop(name) for name in names]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(libraries))


def _serve(listener: socket.socket, ready: selectors.BaseSelector) -> dict[str, Any]:
    clients: dict[int, socket.socket] = {}  # connections by the pidfd of their child
    while True:
        for key, _ in ready.select():
            if key.fd == 0:
                os._exit(0)  # the session has ended, and the children with this process
            if key.fileobj is listener:
                client = listener.accept()[0]
                job = _receive_job(client)
                if job is None:
                    client.close()
                    continue
                child = os.fork()
                if child == 0:
                    for pidfd, other in clients.items():
                        os.close(pidfd)
                        other.close()
                    return {**job, "client": client}
                _close(job["received"])
                pidfd = os.pidfd_open(child)
                clients[pidfd] = client
                ready.register(client, selectors.EVENT_READ, pidfd)
                ready.register(pidfd, selectors.EVENT_READ, child)
            elif key.fd in clients:
                client = clients.pop(key.fd)
                _, status = os.waitpid(key.data, 0)
                with contextlib.suppress(OSError):
                    client.sendall(status.to_bytes(LENGTH_NBYTES))
                ready.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(KeyError):
                    ready.unregister(client)
                client.close()
            elif clients.get(key.data) is key.fileobj:  # the process that mpirun sees has been killed
                ready.unregister(key.fileobj)
                signal.pidfd_send_signal(key.data, signal.SIGKILL)


def _receive_job(client: socket.socket) -> dict[str, Any] | None:
    """Receive a request; return None if the sender was killed while it sent the request."""
    received: list[int] = []
    try:
        length, received, _, _ = socket.recv_fds(client, LENGTH_NBYTES, SPARE_FD)
        job: dict[str, Any] = marshal.loads(client.recv(int.from_bytes(length), socket.MSG_WAITALL))
    except (OSError, ValueError, EOFError):
        _close(received)
        return None
    return {**job, "received": received}


def _close(files: Sequence[int]) -> None:
    for fd in files:
        os.close(fd)


def become(job: dict[str, Any], server: int) -> None:
    """Become the rank, in a child."""
    from asyncdist import cli, rank_program
    from asyncdist.launch import guardians

    guardians.die_with_parent(server)
    files, namespaces = job["received"][: -len(NAMESPACES)], job["received"][-len(NAMESPACES) :]
    if _enter(namespaces):
        child = os.fork()  # only later children are in the new process namespace
        if child:
            end_as(os.waitpid(child, 0)[1])
        guardians.die_with_parent(os.getppid())
    os.setpgid(0, 0)
    with job["client"] as client, contextlib.suppress(BrokenPipeError):
        own = os.pidfd_open(os.getpid())
        socket.send_fds(client, [b"!"], [own])
        os.close(own)
    spare = [fcntl.fcntl(fd, fcntl.F_DUPFD, SPARE_FD) for fd in files]
    _close(files)
    for fd, number in zip(spare, job["files"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(job["directory"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    script, *arguments = job["arguments"]
    if script == SIMULATION:
        sys.argv = job["arguments"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        cli.main()
    rank_program.run_script(script, arguments)


def _enter(namespaces: Sequence[int]) -> bool:
    """Enter the namespaces that differ from this process's own; return whether there were any."""
    import ctypes

    own = [os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES]
    others = [fd for fd, number in zip(namespaces, own, strict=True) if os.fstat(fd).st_ino != number]
    libc = ctypes.CDLL(None, use_errno=True)
    for fd in others:
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    _close(namespaces)
    return bool(others)


if __name__ == "__main__":
    pid = os.getpid()
    become(serve(sys.argv[1], sys.argv[2:]), pid)
