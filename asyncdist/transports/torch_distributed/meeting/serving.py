"""Creates torch's stores at an address that all processes of the job can reach."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from asyncdist.launchers import addresses

TIMEOUT: Final = timedelta(seconds=60)


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
