"""Starts ranks on its host for a launcher on another one: ``python host_agent.py TOKEN`` at the end of an ssh.

The two speak in lines of JSON. What comes on standard input, in this order:

    {"script": PATH, "count": RANKS, "needs": [PATH, ...], "reports": TOKEN}
                                                              what is to run here; answered by ``hello``, or ``problem``
    {"start": RANK, "command": [...], "environ": {...}}       answered by ``ended`` with the exit code, in time
    {"signal": RANK, "number": N}                             a signal for a rank, as :mod:`signal` numbers it
    {"end": RANK}                                             kills a rank, and all that it has started
    {"guardian": RANK, "number": N}                           a signal for the guardian of a rank of an mpirun
    {"probe": true}                                           answered by ``alive`` at once

Answers go to standard output, between lines of ranks, and begin with a mark that has the launcher's TOKEN, so that no
rank writes one by accident. When standard input ends, because the launcher, the ssh or the network has, all ranks are
killed; and so they are by their guardians, on Linux, when this process is. Where an mpirun starts the ranks, TOKEN is
not empty, and ``report`` passes on each report of their guardians.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

#: This file, to be run as a program.
PROGRAM: Final = os.path.abspath(__file__)
if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(PROGRAM)))

from asyncdist import environment, local_host  # noqa: E402
from asyncdist._version import __version__  # noqa: E402
from asyncdist.launch import local_ranks  # noqa: E402
from asyncdist.launch.supervision.guardian_reports import GuardianReports  # noqa: E402


def mark(token: str) -> bytes:
    """Return what a line for the launcher begins with."""
    return f"\x1easyncdist {token} ".encode()


def versions() -> dict[str, str]:
    """Return the versions that must be those of all hosts."""
    return {"asyncdist": __version__, "Python": platform.python_version()}


class _Agent:
    """Carries out what the launcher says.

    Args:
        token: of the launcher.
    """

    def __init__(self, token: str) -> None:
        self._mark = mark(token)
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._ranks: dict[int, local_ranks.RankProcess] = {}
        self._told: dict[str, str] = {}
        self._reports: GuardianReports | None = None

    def run(self) -> None:
        """Do as told until standard input ends."""
        threading.Thread(target=self._read, name="launcher", daemon=True).start()
        with local_host.told_variables() as self._told:
            self._carry_out()

    def _carry_out(self) -> None:
        try:
            while True:
                what, news = self._events.get()
                if what == "over":
                    return
                if what == "ended":
                    process = self._ranks.pop(news)
                    process.end()  # what it left behind
                    self._tell(ended=news, code=process.returncode)
                else:
                    self._obey(news)
        finally:
            for process in self._ranks.values():
                process.end()
            for process in self._ranks.values():
                process.wait()
            if self._reports is not None:
                self._reports.close()

    def _read(self) -> None:
        try:
            for line in sys.stdin.buffer:
                if line.endswith(b"\n"):  # else the launcher, or the ssh, has ended within the line
                    self._events.put(("told", json.loads(line)))
        finally:
            self._events.put(("over", None))

    def _obey(self, told: dict[str, Any]) -> None:
        if "script" in told:
            self._examine(told["script"], told["count"], told["needs"], told["reports"])
        elif "start" in told:
            self._start(told["start"], told["command"], told["environ"])
        elif "probe" in told:
            self._tell(alive=True)
        elif "guardian" in told:
            if self._reports is not None:
                self._reports.send_signal(told["guardian"], told["number"])
        elif (rank := told["signal" if "signal" in told else "end"]) in self._ranks:  # else it has just ended
            process = self._ranks[rank]
            process.send_signal(told["number"]) if "signal" in told else process.end()

    def _examine(self, script: str, count: int, needs: Sequence[str], token: str) -> None:
        try:
            local_host.check_script(script)
            local_host.check_ranks(count)
        except local_host.LaunchError as error:
            self._tell(problem=str(error))
            return
        missing = [path for path in needs if not os.access(path, os.X_OK)]
        if missing:
            self._tell(problem=f"there is no program {missing[0]}")
            return
        if token:
            self._reports = GuardianReports(token, lambda report: self._tell(report=report))
        self._tell(hello=versions(), cores=local_host.available_cores(), port=local_host.find_free_port())

    def _start(self, rank: int, command: list[str], environ: dict[str, str]) -> None:
        events = self._events
        try:
            self._ranks[rank] = local_ranks.start(
                command,
                {**environment.without_launchers(environment.environment()), **environ, **self._told},
                rank=rank,
                ended=lambda: events.put(("ended", rank)),
            )
        except local_host.LaunchError as error:
            print(f"asyncdist run: {error}", file=sys.stderr, flush=True)
            self._tell(ended=rank, code=127)

    def _tell(self, **news: Any) -> None:
        os.write(1, self._mark + json.dumps(news).encode() + b"\n")  # short enough to be written at once


if __name__ == "__main__":
    _Agent(sys.argv[1]).run()
