"""Creates torch's stores at an address that all processes of the job can reach, and connects to them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncdist.launchers import addresses

TIMEOUT: Final = timedelta(seconds=60)
#: Seconds added to the timeout for connecting, so that torch's own error, which is more precise, is raised first.
_MARGIN_S: Final = 1.0


def serve(address: str, port: int, *, size: int | None = None, is_open: bool = False) -> Any:
    """Serve a store on one address of this host, or on all its addresses.

    Args:
        address: Address to which the other processes connect. If it is a host name, the store listens on all addresses.
        port: Port of the store, or 0 to let the system choose one.
        size: Number of processes, or None if unknown.
        is_open: Whether to listen on all addresses, because processes know the host by different addresses.
    """
    listener = None if is_open else addresses.listen_at(address, port)
    shares_process = port != 0  # Share a store that the user's program serves on this port.
    if listener is None:
        return TCPStore(address, port, size, True, TIMEOUT, wait_for_workers=False, multi_tenant=shares_process)
    return TCPStore(
        address,
        listener.getsockname()[1],
        size,
        True,
        TIMEOUT,
        wait_for_workers=False,
        multi_tenant=shares_process,
        master_listen_fd=listener.detach(),
    )


def connect(
    address: str, port: int, size: int | None, timeout_s: float, *, notice_s: float, notice: Callable[[], object]
) -> Any:
    """Connect to a store.

    Args:
        size: Number of processes, or None if unknown.
        timeout_s: Timeout in seconds for the first answer.
        notice_s: Seconds without an answer after which ``notice`` is called.

    Raises:
        RuntimeError: No store answers, or the listening process does not answer in time.
    """
    within = min(timedelta(seconds=timeout_s), TIMEOUT)
    return answered(
        lambda: TCPStore(address, port, size, False, within, wait_for_workers=False),
        timeout_s,
        notice_s=notice_s,
        notice=notice,
    )


def answered(
    connect: Callable[[], Any],
    timeout_s: float,
    *,
    notice_s: float = math.inf,
    notice: Callable[[], object] = lambda: None,
) -> Any:
    """Return the store to which ``connect`` connects.

    torch's client waits forever, and ignores signals, if the process that listens at the port does not answer. A web
    server, for example, waits for the end of a line. ``connect`` is therefore called in a separate thread, which is
    abandoned after the timeout.

    Args:
        timeout_s: Timeout in seconds, which ``connect`` should also observe.
        notice_s: Seconds after which ``notice`` is called.

    Raises:
        RuntimeError: ``connect`` has not returned in time, or has raised this error.
    """
    connected: Future[Any] = Future()

    def try_to_connect() -> None:
        try:
            connected.set_result(connect())
        except BaseException as error:
            connected.set_exception(error)

    threading.Thread(target=try_to_connect, name="asyncdist-store", daemon=True).start()
    if notice_s < timeout_s:
        with contextlib.suppress(TimeoutError):
            return connected.result(notice_s)
        notice()
        timeout_s -= notice_s
    with contextlib.suppress(TimeoutError):
        return connected.result(timeout_s + _MARGIN_S)
    raise RuntimeError("the process that listens there does not answer; another program may use the port")
