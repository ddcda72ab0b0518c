"""Parses destinations for exported counters, as users write them: ``9100``, ``tensorboard:runs``, ``wandb``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from asyncdist import validation

Sink: TypeAlias = Literal["prometheus", "tensorboard", "wandb", "opentelemetry"]
#: Module that each sink needs. The sink's name is also the name of the extra that installs the module.
NEEDED: Final[Mapping[Sink, str]] = {
    "prometheus": "prometheus_client",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "opentelemetry": "opentelemetry.metrics",
}
#: Default address to listen on, which accepts connections only from this host.
LOCAL: Final = "127.0.0.1"
_ALLOWED: Final = "a port, HOST:PORT, tensorboard:FOLDER, wandb, wandb:PROJECT or opentelemetry"


@dataclass(frozen=True, slots=True)
class Destination:
    """Describes a destination for exported counters.

    ``where`` is the address, folder or project. ``port`` is the Prometheus port of the first rank on a host.
    """

    sink: Sink
    where: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.port:
            return f"[{self.where}]:{self.port}" if ":" in self.where else f"{self.where}:{self.port}"
        return f"{self.sink}:{self.where}" if self.where else self.sink


def destinations(named: object, what: str = "metrics") -> tuple[Destination, ...]:
    """Parse a user's destinations: a port number, a string of one or more destinations, a sequence of these, or None.

    If a destination is invalid, raise a TypeError or ValueError that names the option ``what``.
    """
    if named is None:
        return ()
    if isinstance(named, str):
        parts: Iterable[object] = [part.strip() for part in named.split(",") if part.strip()]
    elif isinstance(named, Iterable):
        parts = named
    else:
        parts = [named]
    found = tuple(_destination(part, what) for part in parts)
    if not found:
        validation.refuse(what, named, f"{_ALLOWED}, or several of them", ValueError)
    return found


def _destination(named: object, what: str) -> Destination:
    if isinstance(named, bool) or not isinstance(named, (int, str)):
        validation.refuse(what, named, _ALLOWED, TypeError)
    text = str(named)
    sink, _, where = text.partition(":")
    if text in ("wandb", "opentelemetry") or (sink == "wandb" and where):
        return Destination("wandb" if sink == "wandb" else "opentelemetry", where)
    if sink == "tensorboard" and where:
        return Destination("tensorboard", where)
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536) or (":" in text and not host):
        validation.refuse(what, named, f"{_ALLOWED}, with a port of 1 to 65535", ValueError)
    return Destination("prometheus", host.strip("[]") or LOCAL, int(port))


def missing(destination: Destination) -> str | None:
    """Return a message that says what must be installed for a destination, or None if nothing is missing."""
    module = NEEDED[destination.sink]
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        is_there = False
    return (
        None if is_there else validation.missing_library(destination.sink, module.partition(".")[0], destination.sink)
    )
