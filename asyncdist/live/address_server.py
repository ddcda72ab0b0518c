"""Serves HTTP at a numeric address, for Prometheus and for the live page."""

from __future__ import annotations

import logging
import socketserver
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import Any, Final

logger = logging.getLogger("asyncdist.live.address_server")

#: Maximum number of open connections. Without it, any user of the host could exhaust the process's file descriptors.
CONNECTION_COUNT_MAX: Final = 64
#: Seconds after which an idle connection is closed, because each connection occupies a thread.
_IDLE_S: Final = 10.0


class AddressServer(ThreadingHTTPServer):
    """Answers each connection in a separate thread, so that an incomplete request does not block others.

    While too many connections are open, new ones are closed at once.
    """

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, some of 20 simultaneous connections are delayed by a second

    def server_bind(self) -> None:
        """Bind the address without the name lookup of the standard library's server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self._has_warned = False
        self._free = threading.Semaphore(CONNECTION_COUNT_MAX)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a new thread, or close it if too many connections are open."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread could not be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, in its thread."""
        try:
            request.settimeout(_IDLE_S)
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect before the response, and log other errors.

        Only the first error is a warning, because any user of the host could fill the log with malformed requests.
        """
        if not isinstance(sys.exception(), OSError):
            level, self._has_warned = logging.DEBUG if self._has_warned else logging.WARNING, True
            logger.log(level, "a request at port %d failed", self.server_port, exc_info=True)
