"""Implements ``asyncdist top --web``: serves the page of a job on 127.0.0.1 to clients that know its token.

The token protects the page from other users of the host, and from other pages in the reader's browser, which can send
requests to any address. The check of the Host header protects it from pages whose name resolves to 127.0.0.1 (DNS
rebinding). The page loads nothing from other servers.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import sys
import urllib.parse
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from types import MappingProxyType
from typing import Final

from asyncdist.live.address_server import AddressServer
from asyncdist.report.live_page.snapshots import Snapshots
from asyncdist.story.finding import chosen_job

#: The only address on which the server listens.
ADDRESS: Final = "127.0.0.1"
#: Names in the Host header by which a browser may reach the server, directly or through a tunnel.
_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_POLICY: Final = (
    "default-src 'none'; script-src {0}; style-src {0}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HTML: Final = "text/html; charset=utf-8"
_REFUSAL: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title></head>
<body><h1>{title}</h1><p>{cure}</p></body></html>
"""
_NO_TOKEN: Final = (
    "The address lacks the token of this page, or has the token of an earlier page. Open the whole address that "
    "<code>asyncdist top --web</code> has printed. It ends with <code>?token=</code> and 32 characters."
)
_OTHER_NAME: Final = (
    "This server answers at 127.0.0.1 and localhost only. From another computer, use a tunnel: run the "
    "<code>ssh</code> command that <code>asyncdist top --web</code> has printed, and open the address that it printed."
)


class PageServer(AddressServer):
    """Serves HTTP on 127.0.0.1. Raises OSError if the port is in use. Port 0 selects a free port."""

    def __init__(self, snapshots: Snapshots, port: int = 0) -> None:
        self.snapshots = snapshots
        self.token = secrets.token_urlsafe(24)
        self.page = resources.files("asyncdist.report.live_page").joinpath("page.html").read_text(encoding="utf-8")
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page, including the token."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    #: Nonce that permits the scripts and styles of the next response, and additional headers of that response.
    nonce = ""
    more: Mapping[str, str] = MappingProxyType({})

    def do_GET(self) -> None:  # the standard library requires this name
        """Respond with the page, the newest reading of the job, or a refusal."""
        path, _, query = self.path.partition("?")
        name = self.headers.get("Host", "").lower()
        if name.rpartition(":")[2].isdecimal():
            name = name.rpartition(":")[0]
        if name not in _NAMES:
            self._refuse(HTTPStatus.FORBIDDEN, "Not at this address", _OTHER_NAME)
            return
        token = urllib.parse.parse_qs(query).get("token", [""])[0]
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "Token required", _NO_TOKEN)
        elif path == "/":
            self.nonce = secrets.token_urlsafe(16)
            self._send(HTTPStatus.OK, _HTML, self.server.page.replace("{nonce}", self.nonce).encode())
        elif path == "/job.json":
            self._send_job()
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "Not found", "This server has one page, at the address <code>/</code>.")

    def _send_job(self) -> None:
        newest, next_s = self.server.snapshots.newest()
        is_packed = "gzip" in self.headers.get("Accept-Encoding", "")
        self.more = {"Asyncdist-Next-S": f"{next_s:.3f}"} | ({"Content-Encoding": "gzip"} if is_packed else {})
        self._send(HTTPStatus.OK, "application/json", newest.packed if is_packed else newest.body)

    def _refuse(self, status: HTTPStatus, title: str, cure: str) -> None:
        self._send(status, _HTML, _REFUSAL.format(title=title, cure=cure).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Add headers to every response, even to the standard library's responses to malformed requests."""
        scripts = f"'nonce-{self.nonce}'" if self.nonce else "'none'"
        for name, value in {**_HEADERS, **self.more, "Content-Security-Policy": _POLICY.format(scripts)}.items():
            self.send_header(name, value)
        self.nonce, self.more = "", {}
        super().end_headers()

    def version_string(self) -> str:
        """Return the value of the Server header, without versions."""
        return "asyncdist"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because requests contain the token."""


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
