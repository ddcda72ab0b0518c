"""Starts ranks on this host for a launcher on another host, which runs ``python host_agent.py TOKEN`` by ssh.

Both sides send lines of JSON. The launcher writes commands to the agent's standard input, in this order:

    {"script": PATH, "count": RANKS, "needs": [PATH, ...], "reports": TOKEN}
                                                              checks the host; answered by ``hello`` or ``problem``
    {"start": RANK, "command": [...], "environ": {...}}       starts a rank; answered by ``ended`` when it has ended
    {"signal": RANK, "number": N}                             sends a signal to a rank
    {"end": RANK}                                             kills a rank, and all its processes
    {"guardian": RANK, "number": N}                           sends a signal to the guardian of a rank of mpirun
    {"probe": true}                                           answered by ``alive`` immediately

The agent writes its answers to standard output, between the ranks' output lines. Each answer begins with a mark that
contains the launcher's TOKEN. When its standard input ends, because the launcher, ssh or the network has failed, the
agent kills all ranks. If the agent itself is killed on Linux, the guardians kill the ranks.

If mpirun starts the ranks, the TOKEN of ``reports`` is not empty. The agent then forwards each report from their
guardians as ``report``. It also makes private folders for Open MPI, and removes them when it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

#: Path of this file, which is run as a program.
PROGRAM: Final = os.path.abspath(__file__)
if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(PROGRAM))))

from asyncdist import environment, local_host  # noqa: E402
from asyncdist._version import __version__  # noqa: E402
from asyncdist.launch import guardians, local_ranks  # noqa: E402
from asyncdist.launchers import addresses, child_environment  # noqa: E402
from asyncdist.trust.mpi_folders import MpiFolders  # noqa: E402
from asyncdist.trust.private_folders import TemporaryFolder  # noqa: E402

#: Line that ends the thread that reads guardians' reports.
_OVER: Final = b"over\n"


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts."""
    return {"asyncdist": __version__, "Python": platform.python_version()}


class _Agent:
    """Executes a launcher's commands on this host."""

    def __init__(self, token: str) -> None:
        self._mark = guardians.report_mark(token)
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._ranks: dict[int, local_ranks.RankProcess] = {}
        self._rank_variables: dict[str, str] = {}
        self._reports: GuardianReports | None = None
        self._folders = MpiFolders("", "")

    def run(self) -> None:
        threading.Thread(target=self._read, name="launcher", daemon=True).start()
        with local_host.shared_file_variables() as self._rank_variables:
            self._handle_events()

    def _handle_events(self) -> None:
        try:
            while True:
                what, content = self._events.get()
                if what == "over":
                    return
                if what == "ended":
                    process = self._ranks.pop(content)
                    process.end()  # also ends the rank's remaining child processes
                    self._send(ended=content, code=process.returncode)
                else:
                    self._handle(content)
        finally:
            for process in self._ranks.values():
                process.end()
            for process in self._ranks.values():
                process.wait()
            if self._reports is not None:
                self._reports.close()
            self._folders.remove()

    def _read(self) -> None:
        try:
            for line in sys.stdin.buffer:
                if line.endswith(b"\n"):  # a line is incomplete if the launcher or ssh has ended
                    self._events.put(("command", json.loads(line)))
        finally:
            self._events.put(("over", None))

    def _handle(self, command: dict[str, Any]) -> None:
        if "script" in command:
            self._examine(command["script"], command["count"], command["needs"], command["reports"])
        elif "start" in command:
            self._start(command["start"], command["command"], command["environ"])
        elif "probe" in command:
            self._send(alive=True)
        elif "guardian" in command:
            if self._reports is not None:
                self._reports.send_signal(command["guardian"], command["number"])
        else:
            rank = command["signal" if "signal" in command else "end"]
            if rank in self._ranks:  # false if the rank has just ended
                process = self._ranks[rank]
                process.send_signal(command["number"]) if "signal" in command else process.end()

    def _examine(self, script: str, count: int, needs: Sequence[str], token: str) -> None:
        try:
            local_host.check_script(script)
            local_host.check_ranks(count)
        except local_host.LaunchError as error:
            self._send(problem=str(error))
            return
        missing = [path for path in needs if not os.access(path, os.X_OK)]
        if missing:
            self._send(problem=f"the program {missing[0]} was not found")
            return
        if token:
            self._reports = GuardianReports(token, lambda report: self._send(report=report))
            self._folders = MpiFolders.make(token)
        self._send(
            hello=versions(),
            cores=local_host.available_cores(),
            port=addresses.find_free_port(),
            folders={"files": self._folders.files, "memory": self._folders.memory},
        )

    def _start(self, rank: int, command: list[str], environ: dict[str, str]) -> None:
        events = self._events
        try:
            self._ranks[rank] = local_ranks.start(
                command,
                {**child_environment.without_launchers(environment.environment()), **environ, **self._rank_variables},
                rank=rank,
                ended=lambda: events.put(("ended", rank)),
            )
        except local_host.LaunchError as error:
            local_host.print_launcher_line(str(error))
            self._send(ended=rank, code=127)

    def _send(self, **message: Any) -> None:
        os.write(1, self._mark + json.dumps(message).encode() + b"\n")  # a short line is written at once


class GuardianReports:
    """Calls ``forward``, in a thread, with each report from a job's guardians on this host, and sends them signals.

    The guardians (supervising processes) write to a FIFO. Reports in a rank's output could be lost, because mpirun
    stops reading output when it stops the ranks.
    """

    def __init__(self, token: str, forward: Callable[[str], object]) -> None:
        self._forward = forward
        self._guardians: dict[int, guardians.ProcessHandle] = {}
        self._folder: TemporaryFolder | None = None
        self._reader: threading.Thread | None = None
        path = guardians.reports_path(token)
        with contextlib.suppress(OSError):  # without a FIFO, guardians write to the output of their ranks
            self._folder = TemporaryFolder.make(*os.path.split(guardians.REPORTS_FOLDER), guardians.reports_name(token))
            os.mkfifo(path, mode=0o600)
            # With O_RDWR, the FIFO always has a writer, so the reader never sees an end of file.
            self._fifo = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._reader = threading.Thread(target=self._read, name="reports", daemon=True)
            self._reader.start()

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to the guardian process of a rank on this host, if the guardian is alive."""
        with contextlib.suppress(KeyError):
            self._guardians[rank].send(number)

    def close(self) -> None:
        """Process the reports that have already been written, and remove the FIFO."""
        if self._reader is not None:
            os.write(self._fifo, _OVER)
            self._reader.join()
            os.close(self._fifo)
        if self._folder is not None:
            self._folder.remove()

    def _read(self) -> None:
        with open(self._fifo, "rb", closefd=False) as lines:
            for line in iter(lines.readline, _OVER):
                rank, what, number = line.decode().split()
                if what == "guarded":
                    with contextlib.suppress(ProcessLookupError):  # raised if the guardian has just ended
                        self._guardians[int(rank)] = guardians.ProcessHandle(int(number))
                elif what == "ended" and int(rank) in self._guardians:
                    self._guardians.pop(int(rank)).close()
                self._forward(line.decode().rstrip("\n"))


if __name__ == "__main__":
    _Agent(sys.argv[1]).run()
