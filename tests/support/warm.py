"""Starts ranks that need not import torch: they are forked from a server that has imported it once for a test session.

    asyncdist run -n 4 tests/support/warm.py SOCKET script.py arguments...     what support.mpi starts
    python tests/support/warm.py SOCKET script.py arguments...                 a rank that support.torchrun starts
    asyncdist run -n 4 script.py arguments...                                  anything, in ``environment``

Importing torch takes 1.5 s of a core, and creating the first optimizer as much again, for each rank of each job: most
of the time of a short job. The process that mpirun (or a test) starts instead of a rank asks the *server* for a child.
It passes its arguments, environment, directory, open files and namespaces (those of a virtual host) to the child,
passes signals on, and ends as the child ends. The child runs the script as ``asyncdist run`` does, by ``launch``.

- The server does not use mpi4py, MPI, process groups or event loops: each rank starts its own.
- A rank ends with the process that mpirun has started for it, and with the server. The server ends with the test
  session, whose pipe is its standard input.
- Two properties differ from a separate process: ranks share one seed of ``hash``, and variables that torch reads when
  it is imported are those of the server. Jobs with such variables start cold.
- Programs that start ranks themselves, such as the demo and the documentation's programs, start them warm if they have
  the variables of ``environment``: Python reads ``warm_site/sitecustomize.py`` first.
- This works on Linux only. On other systems, every rank starts cold.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

#: Variables that are read when Python, OpenMP or torch are loaded.
COLD_PREFIXES = ("PYTHON", "OMP_", "MKL_", "TORCH", "PYTORCH")
#: First file descriptor above those that a launcher passes to a rank.
SPARE_FD = 200
LENGTH_NBYTES = 8
#: Namespaces in the order of entry: the mount namespace is last, because the others are found in its /proc.
NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")
#: Variable that tells processes of a test the server's address, and the variables with which the server started.
VARIABLE = "ASYNCDIST_TEST_WARM"
#: Word that stands instead of a rank's script: the command ``asyncdist``.
SIMULATION = "asyncdist"
#: Training libraries for ``environment``, which take seconds to import.
LIBRARIES = ("lightning", "transformers", "transformers.trainer", "accelerate")
#: Modules of torchgfn that its scripts and the demo import.
GFN = ("gfn.gym", "gfn.gflownet", "gfn.containers.replay_buffer_manager")
#: Variable without which simulations restart.
HASHES = {"PYTHONHASHSEED": "0"}


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
    return [__file__, _server(frozenset((k, v) for k, v in base.items() if k.startswith(COLD_PREFIXES))), *cold]


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
    asked = _asked(environ)
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
    return [sys.executable, "-S", __file__, json.loads(environ[VARIABLE])[0][0], *cold]


def _asked(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a warm process must share with its server.

    No program reads torchrun's before the script.
    """
    is_asked = {name: name.startswith(COLD_PREFIXES) and not name.startswith("TORCHELASTIC_") for name in environ}
    return {name: environ[name] for name in environ if is_asked[name]}


@functools.cache
def _server(asked: frozenset[tuple[str, str]], libraries: tuple[str, ...] = ()) -> str:
    """Start a server with these variables and imports, which lives as long as this process. Return its address."""
    folder = tempfile.TemporaryDirectory(prefix="asyncdist-test-")
    path = str(Path(folder.name, "warm"))
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", path, *libraries],
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


# -- what is started in the place of a rank ---------------------------------------------------------------------------


def be_warm() -> None:
    """Continue as a child of the warm server if this process's environment has the address of one."""
    asked = _asked(os.environ)
    paths = [path for path, variables in json.loads(os.environ[VARIABLE]) if variables == asked]
    program, *arguments = sys.orig_argv[1:] or [""]
    if program == "-m" and arguments[:1] == ["asyncdist"]:
        program, *arguments = arguments
    name = os.path.basename(program)
    if not paths or any(set(word) == {":"} for word in arguments):
        return
    if name == "rank_program.py":
        be_rank(paths[0], arguments)
    # The process that serves a job's store has the variables of rank 0.
    elif name.endswith(".py") and name != "store_server.py" and "RANK" in os.environ:
        be_rank(paths[0], [program, *arguments])
    elif name == "asyncdist" and arguments[:1] == ["sim"] and HASHES.items() <= asked.items():
        be_rank(paths[0], [SIMULATION, *arguments])


def be_rank(path: str, arguments: list[str]) -> NoReturn:
    """Ask for a child and end as the child ends.

    The child also gets everything that the launcher has passed to this process.
    """
    files = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 0 and _is_inherited(fd)]
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    job = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd(), "files": files}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        text = json.dumps(job).encode()
        socket.send_fds(connection, [len(text).to_bytes(LENGTH_NBYTES)], files + namespaces)
        connection.sendall(text)
        word, children, _, _ = socket.recv_fds(connection, 1, 1)
        if not word:
            os._exit(1)  # the server has ended

        def forward(number: int, _frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(children[0], number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)
        status = connection.recv(LENGTH_NBYTES, socket.MSG_WAITALL)
    # the server has ended, and its children with it
    end_as(int.from_bytes(status) if len(status) == LENGTH_NBYTES else 1 << 8)


def end_as(status: int) -> NoReturn:
    """End with a child's status, without printing, since the child has printed everything."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # the descriptor with which the others were listed
        return False


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
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
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
        job: dict[str, Any] = json.loads(client.recv(int.from_bytes(length), socket.MSG_WAITALL))
    except (OSError, ValueError):
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
    own = [os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES]
    others = [fd for fd, number in zip(namespaces, own, strict=True) if os.fstat(fd).st_ino != number]
    libc = ctypes.CDLL(None, use_errno=True)
    for fd in others:
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    _close(namespaces)
    return bool(others)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        pid = os.getpid()
        become(serve(sys.argv[2], sys.argv[3:]), pid)
    else:
        be_rank(sys.argv[1], sys.argv[2:])
