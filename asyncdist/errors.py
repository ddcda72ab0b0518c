"""Defines the errors that asyncdist raises on purpose, as one class hierarchy, named by cause.

Each error carries facts, such as the peer or the tag, as attributes, so that a handler need not parse the message.
Errors can be pickled, so that a launcher can pass them between processes. Transports translate the errors of their
libraries with ``raise ... from``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class AsyncdistError(Exception):
    """Base class of asyncdist's errors. Keyword arguments become attributes and are appended to the message."""

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
    """The peer ``rank`` is lost: its process died, its connection closed, or it reported a failure."""

    rank: int


class TruncationError(AsyncdistError):
    """A message was larger than its buffer. ``message_nbytes`` is None if the message's size is unknown."""

    message_nbytes: int | None
    buffer_nbytes: int

    @classmethod
    def of(cls, message_nbytes: int | None, buffer_nbytes: int, source: int) -> TruncationError:
        """Return the error for a message from ``source``.

        ``message_nbytes`` is None if the message's size is unknown.
        """
        size = f"more than {buffer_nbytes}" if message_nbytes is None else f"{message_nbytes}"
        return cls(
            f"a message of {size} bytes arrived for a buffer of {buffer_nbytes} bytes",
            message_nbytes=message_nbytes,
            buffer_nbytes=buffer_nbytes,
            source=source,
        )


class ClosedError(AsyncdistError):
    """This rank closed the channel, policy, group or world, or a peer that the operation needs has closed it."""


class LateError(ClosedError):
    """This rank was restarted or joined late, but the other ranks have already ended the world or policy.

    Because no work is lost, ``asyncdist.run`` does not raise this error. It prints one line, and ends the process with
    exit code 0.
    """


class BusyError(AsyncdistError):
    """A bounded queue is full, or a resource that allows one user at a time is in use."""


class DeadlockError(AsyncdistError):
    """No events are left in a simulation, but some tasks are still waiting.

    The message lists every waiting task, and the messages for channels that their receiver has not opened.

    Attributes:
        seed: Seed of the simulation.
        report: Report of the simulation (:class:`SimReport`) up to the deadlock, which is not pickled with the error.
    """

    seed: int
    report: Any = None


class TimeLimitError(AsyncdistError, TimeoutError):
    """A simulation has reached its limit ``until_s`` of virtual time before all ranks ended.

    The message shows where each remaining rank is waiting.

    Attributes:
        seed: Seed of the simulation.
        report: Report of the simulation (:class:`SimReport`) up to the limit, which is not pickled with the error.
    """

    seed: int
    report: Any = None


class StallError(AsyncdistError):
    """The rank ``rank`` has waited for its peers for longer than ``stall_s`` seconds."""

    rank: int

    def __str__(self) -> str:
        return self.message  # the message already contains the facts


class LocalProtocolError(AsyncdistError):
    """This rank broke a rule of the runtime: a bad tag, an oversized message, a call in a wrong order, ..."""


class RemoteProtocolError(AsyncdistError):
    """A peer broke a rule of the runtime: its frames cannot be decoded, exceed a limit, or arrive out of order."""


class RemoteError(AsyncdistError):
    """A computation on another rank raised an exception, which that rank raises too, with its traceback.

    Attributes:
        rank: Rank on which the exception was raised.
        kind: Name of the exception's class, with its module unless that is ``builtins``.
        text: The exception's message, shortened if it is very long.
    """

    rank: int
    kind: str
    text: str

    def __str__(self) -> str:
        return self.message  # the message already contains the facts


def inner_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of an exception group, which may contain further groups, or ``error`` if it is not a group."""
    pending = [error]
    while pending:  # groups may be nested more deeply than functions may call each other
        each = pending.pop()
        if isinstance(each, BaseExceptionGroup):
            pending += reversed(each.exceptions)
        else:
            yield each


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports the failure of another rank."""
    return all(isinstance(each, (RankLostError, RemoteError)) for each in inner_errors(error))


def has_cause_here(error: BaseException) -> bool:
    """Return whether ``error`` contains a failure of this rank, not only another rank's failure or a cancellation."""
    return any(map(_is_cause_here, inner_errors(error)))


def _is_cause_here(error: BaseException) -> bool:
    if not isinstance(error, Exception):
        return False
    import asyncio  # not at the top, because the command line imports this module, and asyncio imports 60 others

    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:  # the chain of re-raised errors may be a cycle
        seen.add(id(chain))
        if is_consequence(chain) or isinstance(chain, asyncio.CancelledError):
            return False
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return True


def remote_error(rank: int, kind: str, text: str) -> RemoteError:
    """Return the error that other ranks raise because ``rank`` has raised an exception."""
    return RemoteError(f"rank {rank} failed: {kind}: {text}", rank=rank, kind=kind, text=text)


class DisagreementError(AsyncdistError):
    """Ranks that must agree have different classes, options or models, or some ranks are missing.

    The message names the difference or the missing ranks.
    """


class StartTimeoutError(DisagreementError, TimeoutError):
    """Some of the ranks that must start together did not join in time.

    Attributes:
        missing: Missing ranks.
        difference: Name of the first value on which the other ranks disagree, if any.
    """

    missing: tuple[int, ...]


class TransportError(AsyncdistError):
    """The communication library failed without naming a peer, or cannot be used with this process's launcher."""
