"""Replaces the operating system's random bytes with bytes derived from the simulation's seed.

In a simulation, ``os.urandom``, ``secrets``, ``uuid.uuid4``, ``random.Random()``, ``random.SystemRandom``,
``random.seed()``, ``numpy.random.default_rng()``, ``numpy.random.seed()`` and ``torch.seed()`` use a generator that is
seeded with the simulation's seed and the rank. ``tempfile`` gets a new generator for names. Functions imported by name
before the simulation (``from os import urandom``) and ``torch.Generator().seed()`` still use real random bytes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import torch

#: Module and name of each replaced function. ``random._urandom`` is included because ``secrets`` and numpy use it.
_NAMES: Final[tuple[tuple[Any, str], ...]] = (
    (os, "urandom"),
    (random, "_urandom"),
    *([(os, "getrandom")] if hasattr(os, "getrandom") else []),
)
#: Value that ``torch.seed()`` returns, for example in a replay. If None, the simulation's generator supplies it.
known_torch_seed: ContextVar[int | None] = ContextVar("asyncdist_known_torch_seed", default=None)


@contextlib.contextmanager
def entropy_from(source: Callable[[int], bytes | None]) -> Iterator[None]:
    """Replace this thread's system random bytes with bytes from ``source``, unless ``source`` returns None."""
    thread = threading.get_ident()
    process = os.getpid()

    def drawn(count: int) -> bytes | None:
        is_ours = threading.get_ident() == thread and os.getpid() == process
        return source(count) if is_ours else None

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(by))
            stack.callback(setattr, owner, name, original)

        for module, name in _NAMES:
            replace(module, name, _bytes_of(getattr(module, name), drawn))
        replace(random.Random, "seed", _seeding(random.Random.seed, drawn))
        for module in (torch, torch.random):
            replace(module, "seed", _torch_seeding(module.seed, drawn))
        # The generator for names of temporary files draws its seed only once, in the first simulation of a process.
        stack.callback(setattr, tempfile, "_name_sequence", tempfile._name_sequence)  # type: ignore[attr-defined]
        tempfile._name_sequence = None  # type: ignore[attr-defined]
        yield


def _bytes_of(original: Callable[..., bytes], drawn: Callable[[int], bytes | None]) -> Callable[..., bytes]:
    def urandom(size: int, *flags: int) -> bytes:
        found = drawn(size) if type(size) is int and size >= 0 else None
        return original(size, *flags) if found is None else found

    return urandom


def _seeding(original: Callable[..., None], drawn: Callable[[int], bytes | None]) -> Callable[..., None]:
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        found = drawn(32) if a is None else None
        original(self, a if found is None else int.from_bytes(found, "little"), version)

    return seed


def _torch_seeding(original: Callable[[], int], drawn: Callable[[int], bytes | None]) -> Callable[[], int]:
    def seed() -> int:
        known = known_torch_seed.get()
        if known is not None:
            torch.manual_seed(known)
            return known
        found = drawn(8)
        if found is None:
            return original()
        number = int.from_bytes(found, "little") >> 1  # torch's seeds are signed 64-bit integers
        torch.manual_seed(number)
        return number

    return seed
