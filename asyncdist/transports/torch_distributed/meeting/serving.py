"""Serves and reaches torch's stores, at the address that the processes of a job need."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncdist import local_host

TIMEOUT: Final = timedelta(seconds=60)


def serve(address: str, port: int, *, size: int | None = None, is_open: bool = False) -> Any:
    """Serve a store at this address of this host; where that is a name, or ``is_open``, at all of its addresses.

    Args:
        address: Where the other processes look for it.
        port: The port; 0 lets the system choose one.
        size: The number of processes, where it is known.
        is_open: Whether processes that know the host by other addresses come too.

    Raises:
        RuntimeError: The store cannot be served there.
    """
    listener = None if is_open else local_host.listen_at(address, port)
    shares_process = port != 0  # with a store that the user's program has, or will have, at this port
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
