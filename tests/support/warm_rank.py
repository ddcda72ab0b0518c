"""What is started in the place of a warm rank: it asks the server for a child, and ends as the child ends.

    python -S tests/support/warm_rank.py SOCKET script.py arguments...

``support.warm`` describes ranks that start warm. Every one of them runs this file first. Therefore it imports
little: ``json``, ``contextlib`` and ``typing`` would take as long as everything else here.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType
    from typing import NoReturn

#: Variables that are read when Python, OpenMP or torch are loaded.
COLD_PREFIXES = ("PYTHON", "OMP_", "MKL_", "TORCH", "PYTORCH")
LENGTH_NBYTES = 8
#: Namespaces in the order of entry: the mount namespace is last, because the others are found in its /proc.
NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")
#: Variable that tells processes of a test the server's address, and the variables with which the server started.
VARIABLE = "ASYNCDIST_TEST_WARM"
#: Word that stands instead of a rank's script: the command ``asyncdist``, which simulates or replays.
SIMULATION = "asyncdist"
#: Variable without which simulations and replays restart.
HASHES = {"PYTHONHASHSEED": "0"}


def asked_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a warm process must share with its server.

    No program reads torchrun's before the script.
    """
    is_asked = {name: name.startswith(COLD_PREFIXES) and not name.startswith("TORCHELASTIC_") for name in environ}
    return {name: environ[name] for name in environ if is_asked[name]}


def be_warm() -> None:
    """Continue as a child of the warm server if this process's environment has the address of one."""
    import json

    asked = asked_of(os.environ)
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
    elif name == "asyncdist" and arguments[:1] in (["sim"], ["replay"]) and HASHES.items() <= asked.items():
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
        text = marshal.dumps(job)
        socket.send_fds(connection, [len(text).to_bytes(LENGTH_NBYTES)], files + namespaces)
        connection.sendall(text)
        word, children, _, _ = socket.recv_fds(connection, 1, 1)
        if not word:
            os._exit(1)  # the server has ended

        def forward(number: int, _frame: FrameType | None) -> None:
            import contextlib

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


if __name__ == "__main__":
    be_rank(sys.argv[1], sys.argv[2:])
