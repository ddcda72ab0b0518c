"""Every error that asyncdist raises on purpose: one tree, named by cause.

Each error carries its facts as attributes (peer, tag, round, state), so that a handler never parses a message, and each
pickles, so that a launcher can carry it between processes. Errors of a library underneath are translated once, in the
transport that met them, with ``raise ... from``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


class AsyncdistError(Exception):
    """Base of the tree: keyword facts become attributes and are appended to the message."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts: Mapping[str, Any] = dict(facts)

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __str__(self) -> str:
        if not self.facts:
            return self.message
        return f"{self.message} [{', '.join(f'{key}={value}' for key, value in self.facts.items())}]"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.facts))


def _rebuild(kind: type[AsyncdistError], message: str, facts: dict[str, Any]) -> AsyncdistError:
    return kind(message, **facts)


class RankLostError(AsyncdistError):
    """A peer is gone: its process died, its connection closed, or it reported a failure. Carries ``rank``."""

    rank: int


class TruncationError(AsyncdistError):
    """A message was larger than its buffer. Carries ``message_nbytes``, if known, and ``buffer_nbytes``."""

    message_nbytes: int | None
    buffer_nbytes: int

    @classmethod
    def of(cls, message_nbytes: int | None, buffer_nbytes: int, source: int) -> TruncationError:
        """Make the error for a message from ``source``; ``message_nbytes`` is None if its size is unknown."""
        size = f"more than {buffer_nbytes}" if message_nbytes is None else f"{message_nbytes}"
        return cls(
            f"a message of {size} bytes arrived for a buffer of {buffer_nbytes} bytes",
            message_nbytes=message_nbytes,
            buffer_nbytes=buffer_nbytes,
            source=source,
        )


class ClosedError(AsyncdistError):
    """The channel, policy, group or world was closed, here or by the peer that it needs."""


class LateError(ClosedError):
    """This rank was restarted or joined late, and the others have ended the world or policy that it would join.

    No work is lost, so ``asyncdist.run`` prints one line and ends the process with exit code 0 instead of raising it.
    """


class BusyError(AsyncdistError):
    """A resource for one user at a time is in use, or a bounded queue is full."""


class DeadlockError(AsyncdistError):
    """A simulation has no events left, but some tasks still wait.

    The message lists every waiting task, and the messages for channels that their receiver has not opened. Carries
    ``seed``, and the SimReport up to the deadlock as ``report``, which is not pickled.
    """

    seed: int
    report: Any = None


class TimeLimitError(AsyncdistError, TimeoutError):
    """A simulation has reached its ``until_s`` before all ranks ended.

    The message tells where each remaining rank is. Carries ``seed``, and the SimReport up to that time as ``report``,
    which is not pickled.
    """

    seed: int
    report: Any = None


class StallError(AsyncdistError):
    """A rank has waited for its peers for longer than ``stall_s`` seconds. Carries ``rank``."""

    rank: int

    def __str__(self) -> str:
        return self.message  # it says all of the facts


class LocalProtocolError(AsyncdistError):
    """This rank broke a rule of the runtime: a bad tag, a message above the limit, a call out of order."""


class RemoteProtocolError(AsyncdistError):
    """A peer broke a rule: its frames do not decode, exceed a protocol's bound, or arrive out of order."""


class RemoteError(AsyncdistError):
    """A computation on another rank raised an exception. Carries ``rank``, ``kind`` and ``text``.

    ``kind`` is the exception's class, qualified by its module unless that is ``builtins``; ``text`` is its message, cut
    if it is very long. The exception itself, with its traceback, is raised on that rank.
    """

    rank: int
    kind: str
    text: str

    def __str__(self) -> str:
        return self.message  # it says all of the facts


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports a failure of other ranks."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_consequence, error.exceptions))
    return isinstance(error, (RankLostError, RemoteError))


def has_cause_here(error: BaseException) -> bool:
    """Return whether a part of ``error`` is this rank's own mistake.

    An error that was raised while the rank handled another rank's failure, or its own end, is not its own mistake.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(map(has_cause_here, error.exceptions))
    if not isinstance(error, Exception):
        return False
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:  # a handler that re-raises its error may make a cycle
        seen.add(id(chain))
        if is_consequence(chain) or isinstance(chain, asyncio.CancelledError):
            return False
        chain = chain.__cause__ or chain.__context__
    return True


def remote_error(rank: int, kind: str, text: str) -> RemoteError:
    """Make the error that the other ranks raise for an exception of ``rank``."""
    return RemoteError(f"rank {rank} failed: {kind}: {text}", rank=rank, kind=kind, text=text)


class DisagreementError(AsyncdistError):
    """Ranks that must agree differ in class, options, model or presence. The message names the ranks and the values."""


class StartTimeoutError(DisagreementError, TimeoutError):
    """Some of the ranks that must start together did not arrive in time.

    Carries ``missing``. ``difference`` names the first value in which the ranks that arrived differ, if any.
    """

    missing: tuple[int, ...]


class TransportError(AsyncdistError):
    """The backend failed without naming a peer, or it cannot be used in a process that was started this way."""
