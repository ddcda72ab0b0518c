"""Implements ``asyncdist top --web``."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from asyncdist.report.live_page.server import ADDRESS, PageServer
from asyncdist.report.live_page.snapshots import Snapshots
from asyncdist.story.finding import chosen_job


def run(name: str | None, port: int) -> int:
    """Serve the page of a job until Ctrl-C is pressed, and return the exit code.

    ``name`` is the name of the job, or the pid of one of its processes or of their parent. None selects the only job.
    Port 0 selects a free port.
    """
    job = chosen_job("top", name)
    if job is None:
        return 2
    try:
        server = PageServer(Snapshots(job), port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        cure = "choose another port, or omit --port to use a free one"
        print(f"asyncdist top: --port {port}: cannot listen at {ADDRESS}:{port} ({why}); {cure}", file=sys.stderr)
        return 2
    at = server.server_port
    with contextlib.suppress(KeyboardInterrupt), server:
        print(f"The page of job {job}: {server.url}")
        print(f"From another computer, first run: ssh -N -L {at}:{ADDRESS}:{at} {socket.gethostname()}")
        print("Whoever has the address can see the page. Ctrl-C ends the page; the job continues.", flush=True)
        server.serve_forever()
    return 0
