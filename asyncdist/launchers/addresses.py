"""Checks the addresses to which ranks connect, and finds free ports."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path
from typing import Final

from asyncdist.local_host import LaunchError

#: File with Linux's ephemeral port range.
_PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: File whose content identifies a host until the host restarts. All containers on the host see the same content.
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
#: First ephemeral port according to RFC 6335.
_RFC_6335_FIRST: Final = 49152
#: Minimum number of ports below the ephemeral range. If there are fewer, most may be reserved for services.
_PORT_COUNT_MIN: Final = 16384
#: Listen backlog, equal to the backlog of torch's store. The kernel may lower it.
_BACKLOG: Final = 4096
#: Number of random ports to try before giving up.
_DRAW_COUNT: Final = 64


def describe_host() -> str:
    """Return a string that differs between hosts, and between containers with different hostnames."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = _BOOT.read_text().strip()
    return f"{socket.gethostname()} {boot}"


def check_address(name: str, address: str) -> None:
    """Raise ValueError unless ``address`` resolves to a host. The error names the setting ``name``."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{name} must be a name that all hosts know, or an address, got {address!r} ({error})"
        ) from error


def is_loopback(address: str) -> bool:
    """Return whether an address belongs to the loopback interface. Does not resolve names."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def check_loopback() -> None:
    """Raise ``LaunchError`` if 127.0.0.1 does not connect ranks on this host, as in a bare network namespace."""
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            socket.create_connection(listener.getsockname(), timeout=10).close()
        except OSError as error:
            raise LaunchError(
                f"ranks of this host cannot reach each other at 127.0.0.1 ({error.strerror}), because the loopback "
                "interface is down: ip link set lo up"
            ) from error


def find_free_port() -> int:
    """Return a TCP port on which no process listens, below the kernel's ephemeral port range."""
    import secrets  # not at the top of the module, because it imports hashlib

    lowest = _lowest_ephemeral_port()
    for _ in range(_DRAW_COUNT if lowest >= _PORT_COUNT_MIN else 0):
        port = lowest - 1 - secrets.randbelow(lowest // 2)
        with contextlib.suppress(OSError):
            probe_port(port)
            return port
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _lowest_ephemeral_port() -> int:
    """Return the kernel's lowest ephemeral port. If it is unknown, return the lowest one of RFC 6335."""
    try:
        return int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _RFC_6335_FIRST


def probe_port(port: int) -> None:
    """Raise OSError unless a torch.distributed store can listen on this port of this host."""
    has_both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if has_both else socket.AF_INET) as probe:
        if has_both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
        probe.bind(("", port))


def listen_at(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens only on this address, or None for a name, another host's address or a used port."""
    host = "127.0.0.1" if address.lower() == "localhost" else address
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError:  # the port is in use, or no interface has the address (for example, behind a gateway)
        listener.close()
        return None
    return listener
